"""Bytes of a cache after a decode step: held in memory, and read by the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UsedBytes:
    """K and V of a cache, all layers and rows together.

    Attributes:
        held: Bytes of the tokens in memory, with what a method keeps beside them.
        read: Bytes of them that the last decode step had to read.
    """

    held: int
    read: int


def used_bytes(cache: Any) -> UsedBytes:
    """Count K and V of a dense cache, a LeanK cache, or one that counts them itself by `used`."""
    if hasattr(cache, "used"):
        used: UsedBytes = cache.used()
        return used
    if hasattr(cache, "memory"):
        memory = cache.memory()
        held = memory.keys.used + memory.values.used
    else:
        # States of linear attention are neither.
        tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
        held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return UsedBytes(held, held)
