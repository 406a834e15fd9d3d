"""Variants of experiments alone: prompts whose keys or values alone are rounded, and V pruned in memory.

For the latter a basis is folded into the model's weights, and caches keep part of it.
"""

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
from leank_convert.evaluate.loading import EvaluatedModel
from leank_convert.evaluate.prefill import Prefill
from leank_convert.evaluate.variants import Masked
from leank_convert.export.fold import fold


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


@torch.no_grad()
def fold_values(evaluated: EvaluatedModel, directions: Tensor) -> None:
    """Fold a basis of V [L, H_kv, D, D] into the weights that a LeanK model and its dense one share."""
    for layer, bases in zip(evaluated.facts.layers, directions.double(), strict=True):
        attention = evaluated.model.model.layers[layer].self_attn
        value, output = attention.v_proj, attention.o_proj
        for weight, dim in ((value.weight, 0), (value.bias, 0), (output.weight, 1)):
            if weight is not None:
                blocks = weight.unsqueeze(1) if weight.ndim == 1 else weight
                parts = blocks.cpu().chunk(len(bases), dim)
                folded = [fold(part, basis, dim) for part, basis in zip(parts, bases, strict=True)]
                weight.copy_(torch.cat(folded, dim).view_as(weight))


@dataclass
class PrunedValues(Masked):
    """A LeanK cache that keeps of every head its first directions of V, too: so many [L, H_kv]."""

    value_widths: Tensor | None = None

    def start(self, prefill: Prefill) -> tuple[Any, Any]:
        """A fork of the prefill's cache with these channels."""
        model: Any
        cache: Any
        model, cache = super().start(prefill)
        assert self.value_widths is not None and self.channel_masks is not None
        kept = self.channel_masks.sum(-1).tolist()
        layouts = cut_layers(kept, self.value_widths.tolist(), self.channel_masks.shape[-1])
        for layer, layout in zip(cache.pruned_layers, layouts, strict=True):
            layer.layout = layout
        return model, cache
