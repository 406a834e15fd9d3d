"""Layers of a model that are not pruned: those without full attention keep transformers' own cache.

What they hold is bounded by a window already. Here is what a `LeanKCache` needs of them beyond what their
classes do by themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from .store_leank import CacheMemory, RegionBytes

WHY_EAGER = "layers that are not pruned keep transformers' own cache, which no captured step can grow"


def build_other_layers(config: PreTrainedConfig, pruned: Sequence[int]) -> dict[int, Any]:
    """Return transformers' cache layers of a model's layers but the pruned ones, by number."""
    num_layers = int(config.num_hidden_layers)
    if len(pruned) == num_layers:
        return {}
    layers = DynamicCache(config=config).layers
    return {index: layers[index] for index in range(num_layers) if index not in pruned}


def other_memory(layer: Any) -> CacheMemory:
    """Count what such a layer holds."""
    keys, values = (
        0 if states is None else states.numel() * states.element_size()
        for states in (getattr(layer, name, None) for name in ("keys", "values"))
    )
    return CacheMemory(
        other_keys=RegionBytes(keys, keys),
        other_values=RegionBytes(values, values),
        dense_keys=keys,
        dense_values=values,
    )


def check_croppable(layers: Sequence[Any]) -> None:
    """Check that columns can be dropped of such layers.

    Raises:
        ValueError: If a window that they attend within has left tokens behind which would be in it again.
    """
    for layer in layers:
        full = layer.get_seq_length() >= layer.sliding_window
        if full and not getattr(layer, "record_past", False):
            raise ValueError(
                f"crop of a cache whose layers with a window of {layer.sliding_window} tokens keep no tokens "
                "before it; crop before so many are in it, or run the prompt again"
            )


def concatenate_other_layers(parts: Sequence[Any]) -> Any:
    """Return a sliding layer with the rows of several, in order; fewer columns become padding on the left."""
    joined = copy.copy(parts[0])
    joined.cumulative_length = max(part.cumulative_length for part in parts)
    longest = max(part.keys.shape[2] for part in parts)
    for name in ("keys", "values"):
        states = [getattr(part, name) for part in parts]
        padded = [torch.nn.functional.pad(s, (0, 0, longest - s.shape[2], 0)) for s in states]
        setattr(joined, name, torch.cat(padded))
    return joined
