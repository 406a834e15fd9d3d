"""Variants of experiments alone: prompts whose keys or values alone are rounded, and V pruned in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from bin.baselines.int4 import assign_chunks
from bin.baselines.int4 import quantise as round_to_int4
from leank_convert._runtime.constants_leank import centre
from leank_convert._runtime.fp8_leank import reread, scale_of
from leank_convert._runtime.layout_leank import cut_layers
from leank_convert.evaluate.prefill import Prefill
from leank_convert.evaluate.variants import Masked


@dataclass
class RoundedPrompt(Masked):
    """A LeanK cache in the model's dtype, of prompts of which keys or values were rounded before.

    Keys are rounded around the mean among its constants.
    """

    rounded_to: str = "fp8"  # by scales of every prompt's channels, or `int4`
    keys: bool = True  # whether keys are rounded; else values are

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """A fork of the prefill's cache with rounded prompts."""
        model: Any
        cache: Any
        model, cache = super().start(prefill)
        assert self.channel_masks is not None
        for layer, mask in zip(cache.pruned_layers, self.channel_masks, strict=True):
            keys, values = layer.pending
            chosen = mask.to(keys.device)
            if self.keys:
                mean = layer.model_constants.key_mean[0].to(keys.device)[:, None]
                rounded = self._rounded(centre(keys, mean), chosen)
                keys = (rounded.float() + mean).to(keys.dtype)
            else:
                values = self._rounded(values, torch.ones_like(chosen))
            layer.pending = keys, values
        return model, cache

    def _rounded(self, states: Tensor, mask: Tensor) -> Tensor:
        """What a rounded cache gives back of states [B, H_kv, S, D]."""
        if self.rounded_to == "int4":
            return torch.cat([round_to_int4(row[None], assign_chunks(mask)) for row in states])
        rounded: Tensor = reread(states, scale_of(states.abs().amax(2, keepdim=True)))
        return rounded


@dataclass
class PrunedValues(Masked):
    """A LeanK cache that keeps a part of V, too."""

    value_widths: Tensor | None = None  # so many directions of every head, the first ones [L, H_kv]
    value_basis: Tensor | None = None  # of this basis [L, H_kv, D, D]

    def start(self, prefill: Prefill) -> tuple[Any, Any]:
        """A fork of the prefill's cache with these channels."""
        model: Any
        cache: Any
        model, cache = super().start(prefill)
        assert self.value_widths is not None and self.value_basis is not None
        assert self.channel_masks is not None
        kept = self.channel_masks.sum(-1).tolist()
        layouts = cut_layers(kept, self.value_widths.tolist(), self.channel_masks.shape[-1])
        for layer, layout, basis in zip(cache.pruned_layers, layouts, self.value_basis, strict=True):
            layer.layout, layer.value_basis = layout, basis
        return model, cache
