"""Layers of a model that are not pruned: those without full attention keep transformers' own cache.

What they hold is bounded already, by a window or as a state. Here is what a `LeanKCache` needs of them beyond
what their classes do by themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig

from .memory_leank import CacheMemory, RegionBytes

WHY_EAGER = "layers that are not pruned keep transformers' own cache, which no captured step can grow"


def build_other_layers(config: PreTrainedConfig, pruned: Sequence[int]) -> dict[int, Any]:
    """Return transformers' cache layers of a model's layers but the pruned ones, by number."""
    num_layers = int(config.num_hidden_layers)
    if len(pruned) == num_layers:
        return {}
    layers = DynamicCache(config=config).layers
    return {index: layers[index] for index in range(num_layers) if index not in pruned}


def other_memory(layer: Any) -> CacheMemory:
    """Count what such a layer holds of keys and values; a state is neither."""
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
        ValueError: If a window that they attend within has left tokens behind which would be in it again, or
            they hold a state of all tokens.
    """
    for layer in layers:
        window = getattr(layer, "sliding_window", None)
        if window is None:
            raise ValueError(
                "crop of a cache with layers of linear attention, whose state cannot forget a token; run the "
                "prompt again"
            )
        if layer.get_seq_length() >= window and not getattr(layer, "record_past", False):
            raise ValueError(
                f"crop of a cache whose layers with a window of {window} tokens keep no tokens before it; "
                "crop before so many are in it, or run the prompt again"
            )


def concatenate_other_layers(parts: Sequence[Any]) -> Any:
    """Return a layer with the rows of several, in order; in a window fewer columns become left padding."""
    joined = copy.copy(parts[0])
    if not hasattr(joined, "sliding_window"):
        for name, value in vars(joined).items():
            if isinstance(value, dict):  # several states, or what is known of each
                setattr(joined, name, dict(value))
        for name in ("conv_states", "recurrent_states"):
            states = [getattr(part, name) for part in parts]
            if isinstance(states[0], dict):
                setattr(joined, name, {key: torch.cat([s[key] for s in states]) for key in states[0]})
            else:  # in older releases of transformers
                setattr(joined, name, torch.cat(states))
        return joined
    joined.cumulative_length = max(part.cumulative_length for part in parts)
    longest = max(part.keys.shape[2] for part in parts)
    for name in ("keys", "values"):
        states = [getattr(part, name) for part in parts]
        padded = [torch.nn.functional.pad(s, (0, 0, longest - s.shape[2], 0)) for s in states]
        setattr(joined, name, torch.cat(padded))
    return joined
