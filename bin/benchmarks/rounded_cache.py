"""A dense cache that rounds to e4m3 what it stores: how far that alone takes logits from exact ones.

Numbers that differ in their last bit are rounded apart, so whoever decodes from an FP8 cache is further from
the same in higher precision than without one. Scales, and the mean that comes off keys before, are those of a
row's prompt, which attends unrounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from leank_convert._runtime.fp8_leank import reread, scale_of


def rounded_cache(model: Any) -> Cache:
    """An empty cache of this kind for a stock model."""
    return Cache(layers=[_RoundedLayer() for _ in model.model.layers])  # type: ignore[no-untyped-call]


class _RoundedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer `[B, H_kv, S, D]`, each a multiple of its channel's scale."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens `[B, H_kv, S, D]`; return all there are."""
        is_prompt = not self.is_initialized
        if is_prompt:
            self.mean = key_states.mean(2, dtype=torch.float32)[:, :, None]
            largest_key = (key_states - self.mean).abs().amax(2)
            pairs = torch.maximum(*largest_key.chunk(2, dim=-1))
            self.scales = scale_of(pairs.repeat(1, 1, 2)), scale_of(value_states.abs().amax(2))
        key_scale, value_scale = (scale[:, :, None] for scale in self.scales)
        centred = (key_states - self.mean).to(key_states.dtype)
        stored = reread(centred, key_scale), reread(value_states, value_scale)
        held: tuple[Tensor, Tensor] = super().update(*stored, *args, **kwargs)
        return (key_states, value_states) if is_prompt else held
