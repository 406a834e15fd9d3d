"""Variants that choose channels anew for every prompt, from its keys and last queries: ThinK's rule.

ThinK (Xu et al., arXiv 2407.21018) keeps, of each head, the channels i of the largest ||Q_i K_i^T||_F, whose
square is sum_w q_wi^2 · sum_s k_si^2: Q the prompt's last queries, K all its keys, both after RoPE. A KV
head's channels serve its G query heads alike, so their sums are added. This is what kvpress's `ThinKPress`
does; ThinK's own code repeats the keys for every query head and chooses for each. Columns of padding are no
queries and no keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from leank_convert.errors import LeanKError
from leank_convert.evaluate.prefill import Prefill, fork
from leank_convert.recipe import WindowsSection

QUERY_WINDOW = 32  # as many as ThinK's code takes
# ThinK's own: no sink, the prompt's last 32 tokens, and what is decoded, here up to 128 tokens of it.
THINK_WINDOWS = WindowsSection(sink_size=0, recent_size=32, flush_size=128)


@dataclass
class ThinK:
    """ThinK: every head drops ⌊D · pruning_ratio⌋ channels of its own, chosen for each prompt.

    Attributes:
        pruning_ratio: Share that is removed, at least 0 and below 1.
        windows: Tokens that stay whole, None for the checkpoint's; ThinK's own are `THINK_WINDOWS`.
        query_window: The prompt's last queries that choose.
        name: What results call it.
    """

    pruning_ratio: float
    windows: WindowsSection | None = None
    query_window: int = QUERY_WINDOW
    name: str = "think"

    def __post_init__(self) -> None:
        _check_query_window(self)
        if not 0 <= self.pruning_ratio < 1:
            raise LeanKError(
                f"`{self.name}`: pruning ratio {self.pruning_ratio} is not at least 0 and below 1",
                hint="ThinK keeps at least one channel of every head",
            )

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """Return the model and a cache that will keep what this prompt's queries choose."""
        layer = prefill.cache.layers[0]
        num_heads, head_dim = layer.pending[0].shape[1], layer.pending[0].shape[3]
        widths = torch.full(
            (len(prefill.cache.layers), num_heads), kept_channels(head_dim, self.pruning_ratio)
        )
        return _start(prefill, widths, self)


@dataclass
class PerHeadBudget:
    """A mask's widths with ThinK's choice of channels: tells what the choice is worth, apart from the widths.

    Attributes:
        widths: Channels that each head keeps, int64 [L, H_kv], in the CHECKPOINT's head order.
        windows: Tokens that stay whole, None for the checkpoint's.
        query_window: The prompt's last queries that choose.
        name: What results call it.
    """

    widths: Tensor
    windows: WindowsSection | None = None
    query_window: int = QUERY_WINDOW
    name: str = "per-head-budget-dynamic"

    def __post_init__(self) -> None:
        _check_query_window(self)

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """Return the model and a cache that will keep what this prompt's queries choose.

        Raises:
            LeanKError: If the widths are not the model's.
        """
        keys = prefill.cache.layers[0].pending[0]
        layers, heads, head_dim = len(prefill.cache.layers), keys.shape[1], keys.shape[3]
        if (
            tuple(self.widths.shape) != (layers, heads)
            or not 0 <= self.widths.min() <= self.widths.max() <= head_dim
        ):
            raise LeanKError(
                f"`{self.name}`: widths {list(self.widths.shape)} from {int(self.widths.min())} to "
                f"{int(self.widths.max())}, the model has [{layers}, {heads}] heads of {head_dim} channels",
                hint="take the widths of a mask of this model",
            )
        return _start(prefill, self.widths, self)


def kept_channels(head_dim: int, pruning_ratio: float) -> int:
    """Channels of a head that ThinK keeps: it rounds down what it drops."""
    # A ratio such as 0.29 is below itself in binary: 0.29 of 100 channels are 29.
    return head_dim - math.floor(head_dim * pruning_ratio + 1e-9)


def choose_channels(queries: Tensor, keys: Tensor, attention_mask: Tensor, widths: Tensor) -> Tensor:
    """Choose each head's channels for each row; of equal ones the first.

    Args:
        queries: The prompt's last queries after RoPE [B, H, W, D].
        keys: Its keys after RoPE [B, H_kv, S, D].
        attention_mask: 1 where a column is real [B, S].
        widths: Channels that each head keeps [H_kv].

    Returns:
        True where a channel is kept, bool [B, H_kv, D].
    """
    batch_size, num_heads, num_columns, head_dim = keys.shape
    real = attention_mask.to(keys.device, torch.float32)
    # By head: in float32, a long prompt's keys are the largest thing there is.
    key_sums = torch.stack(
        [torch.einsum("bs,bsd->bd", real, keys[:, head].float().square()) for head in range(num_heads)], dim=1
    )
    window = real[:, num_columns - queries.shape[2] :]
    squares = torch.einsum("bw,bhwd->bhd", window, queries.float().square())
    query_sums = squares.view(batch_size, num_heads, -1, head_dim).sum(2)
    order = (query_sums * key_sums).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1) < widths.to(keys.device)[:, None]


def _start(prefill: Prefill, widths: Tensor, variant: ThinK | PerHeadBudget) -> tuple[Any, Cache]:
    """Fork the prompt's cache and give every layer of it the channels that the rule chooses."""
    cache = fork(prefill.cache, variant.windows)
    for layer, queries, layer_widths in zip(cache.layers, prefill.queries, widths, strict=True):
        queries = queries[:, :, -variant.query_window :]
        keys = layer.pending[0]
        layer.set_channel_mask(choose_channels(queries, keys, prefill.attention_mask, layer_widths))
    return prefill.model, cache


def _check_query_window(variant: ThinK | PerHeadBudget) -> None:
    if variant.query_window < 1:
        raise LeanKError(f"`{variant.name}`: a window of {variant.query_window} queries can choose nothing")
