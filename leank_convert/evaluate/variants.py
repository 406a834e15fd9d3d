"""What decodes from a prefill: the dense model, or a LeanK cache with some choice of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from leank_convert.evaluate.prefill import Prefill, fork
from leank_convert.recipe import WindowsSection

DENSE, PRUNED, WINDOW = "dense", "pruned", "window"


class Variant(Protocol):
    """One way to go on from a prefill.

    Attributes:
        name: What its column is called.
        query_window: How many of the prompt's last queries it looks at; 0 for none.
    """

    name: str
    query_window: int

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """The model and the cache to decode with; the prefill stays as it is."""


class Dense:
    """All keys and values, in the stock class.

    Args:
        model: The stock model on the same weights.
        name: What its column is called.
    """

    query_window = 0

    def __init__(self, model: Any, name: str = DENSE) -> None:
        self.name = name
        self._model = model

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """A dense cache of the keys and values that wait in the prefill's."""
        cache = DynamicCache()
        for index, layer in enumerate(prefill.cache.layers):
            cache.update(*layer.pending, index)
        return self._model, cache


class Masked:
    """A LeanK cache that keeps the same channels for every prompt.

    Args:
        name: What its column is called.
        channel_masks: Kept channels in the checkpoint's head order, bool [L, H_kv, D]; None for the model's.
        windows: Other window sizes than the model's.
    """

    query_window = 0

    def __init__(
        self, name: str, channel_masks: Tensor | None = None, windows: WindowsSection | None = None
    ) -> None:
        self.name = name
        self._channel_masks = channel_masks
        self._windows = windows

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """A fork of the prefill's cache with these channels."""
        cache = fork(prefill.cache, self._windows)
        if self._channel_masks is not None:
            for layer, mask in zip(cache.layers, self._channel_masks, strict=True):
                layer.set_channel_mask(mask.to(layer.channel_mask.device))
        return prefill.model, cache


def window_alone(channel_masks_like: Sequence[Any]) -> Masked:
    """Sink and recent tokens, and no pruned key at all.

    Args:
        channel_masks_like: The model's own channel masks, each [H_kv, D].
    """
    return Masked(WINDOW, torch.stack([torch.zeros_like(mask) for mask in channel_masks_like]))


def in_checkpoint_order(channel_mask: Tensor, head_permutation: Sequence[Sequence[int]]) -> Tensor:
    """Bring a mask from the original head order into a checkpoint's.

    Args:
        channel_mask: Bool [L, H_kv, D].
        head_permutation: Of each layer, which original head stands at each place.
    """
    return torch.stack(
        [mask[list(order)] for mask, order in zip(channel_mask, head_permutation, strict=True)]
    )
