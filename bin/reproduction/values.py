"""V pruned on a model in memory: a basis folded into its weights, and caches that keep part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leank_convert._runtime.layout_leank import cut_layers
from leank_convert.evaluate.loading import EvaluatedModel
from leank_convert.evaluate.prefill import Prefill
from leank_convert.evaluate.variants import Masked
from leank_convert.export.fold import fold


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
