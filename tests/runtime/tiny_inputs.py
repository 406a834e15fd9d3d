"""Masks, tokens and settings of tiny models that several files of tests take."""

from __future__ import annotations

from typing import Any

import torch

from tests.twin_caches import ids

WIDTHS = [[0, 3, 16], [4, 8, 8]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24, "pad_token_id": 0}


def everything(layers: int = 2, heads: int = 2, head_dim: int = 16) -> torch.Tensor:
    """Masks of which all channels are kept."""
    return torch.ones(layers, heads, head_dim, dtype=torch.bool)


def row(length: int, seed: int = 0) -> torch.Tensor:
    """Tokens without a batch dimension."""
    return ids(1, length, seed)[0]


def one_row(length: int = 21) -> torch.Tensor:
    """The beginning of one prompt, as a batch."""
    return ids(1, length, 5)


def random_masks(widths: tuple[int, ...], head_dim: int, seed: int = 0) -> torch.Tensor:
    """A layer's masks: so many channels of each head."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(head_dim, generator=generator) < width for width in widths])
