"""Forks and batches of LeanK caches whose prompts are pending, by the code that a checkpoint brings along.

A checkpoint keeps the runtime it was exported with. Caches of older ones have neither `fork` nor a
`concatenate` that takes pending prompts; what these do is done from outside for them, and only for them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from leank_convert.windows import Windows

_SIZES = ("sink_size", "recent_size", "flush_size")


def pruned_layers(cache: Any) -> list[Any]:
    """The layers of a LeanK cache that are pruned, in order."""
    return list(getattr(cache, "pruned_layers", cache.layers))  # older releases prune all


def fork(cache: Any, windows: Windows | None = None) -> Any:
    """A cache that goes on from one whose prompts are pending, which stays as it is.

    Args:
        cache: A LeanK cache; keys and values are shared, not copied.
        windows: Other window sizes than the model's.
    """
    sizes = {} if windows is None else {name: getattr(windows, name) for name in _SIZES}
    if hasattr(cache, "fork"):
        return cache.fork(**sizes)
    pending = [tensor for layer in cache.layers for tensor in layer.pending]
    forked = copy.deepcopy(cache, {id(tensor): tensor for tensor in pending})
    for name, size in sizes.items():
        setattr(forked.rows, name, size)
    return forked


def join(caches: Sequence[Any], model: Any, attention_mask: Tensor) -> Any:
    """One cache of several of one row each, layer by layer; they are empty afterwards.

    Args:
        caches: LeanK caches of the model, whose prompts are pending.
        model: A LeanK model.
        attention_mask: 1 where a row of the result is real [B, S]; padding is on the left.
    """
    if hasattr(caches[0], "fork"):
        return type(caches[0]).concatenate(caches)
    joined = model.build_cache("deferred")
    batch_size, num_columns = attention_mask.shape
    for index, layer in enumerate(joined.layers):
        pending = [cache.layers[index].pending for cache in caches]
        for cache in caches:
            cache.layers[index].pending = None
        keys, values = map(stack_left_padded, zip(*pending, strict=True))
        layer.lazy_initialization(keys, values)
        layer.rows.step(0, batch_size, num_columns, attention_mask.bool(), keys.device)
        layer.extend_pending(keys, values)
        layer.num_columns = num_columns
    return joined


def stack_left_padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of [1, H, N, D], as many columns of zeros before each as make it as long as the longest."""
    longest = max(row.shape[2] for row in rows)
    return torch.cat([functional.pad(row, (0, 0, longest - row.shape[2], 0)) for row in rows])
