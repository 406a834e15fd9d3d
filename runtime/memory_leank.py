"""Bytes of a cache by region: what is used, what is allocated, what a dense cache would take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from .store_leank import ChunkStore


@dataclass(frozen=True)
class RegionBytes:
    """Bytes of one region of the cache.

    Attributes:
        used: Channels of tokens that are there, without padding and free capacity.
        allocated: Everything held.
    """

    used: int
    allocated: int

    def __add__(self, other: RegionBytes) -> RegionBytes:
        return RegionBytes(self.used + other.used, self.allocated + other.allocated)


@dataclass(frozen=True)
class CacheMemory:
    """What a cache, or one layer of it, holds, by region.

    Attributes:
        kept_keys: Kept channels of all tokens.
        kept_values: V of heads that see pruned tokens, all tokens.
        window_keys: Dropped channels of sink and recent tokens.
        window_values: V of heads of width 0, sink and recent tokens.
        pending_keys: Whole K that waits to be split (`prune="deferred"`).
        pending_values: Whole V that waits to be split.
        dense_keys: K bytes that a dense cache uses for the same tokens. Padding is left out, except in input
            that waits to be split: how much of that is padding is not known yet.
        dense_values: V bytes of the same.
    """

    kept_keys: RegionBytes = RegionBytes(0, 0)
    kept_values: RegionBytes = RegionBytes(0, 0)
    window_keys: RegionBytes = RegionBytes(0, 0)
    window_values: RegionBytes = RegionBytes(0, 0)
    pending_keys: RegionBytes = RegionBytes(0, 0)
    pending_values: RegionBytes = RegionBytes(0, 0)
    dense_keys: int = 0
    dense_values: int = 0

    @property
    def keys(self) -> RegionBytes:
        """K of all regions."""
        return self.kept_keys + self.window_keys + self.pending_keys

    @property
    def values(self) -> RegionBytes:
        """V of all regions."""
        return self.kept_values + self.window_values + self.pending_values

    @property
    def total(self) -> RegionBytes:
        """All regions."""
        return self.keys + self.values


def pending_memory(keys: torch.Tensor, values: torch.Tensor) -> CacheMemory:
    """Count whole input that waits to be split; its padding counts, as it is held."""
    key_bytes, value_bytes = (states.numel() * states.element_size() for states in (keys, values))
    return CacheMemory(
        pending_keys=RegionBytes(key_bytes, key_bytes),
        pending_values=RegionBytes(value_bytes, value_bytes),
        dense_keys=key_bytes,
        dense_values=value_bytes,
    )


def store_memory(store: ChunkStore, num_tokens: int, num_whole_tokens: int) -> CacheMemory:
    """Count a layer's store.

    Args:
        store: The store.
        num_tokens: Tokens of all rows.
        num_whole_tokens: Those among them in sink or recent.
    """
    layout = store.layout
    all_channels = len(layout.widths) * layout.head_dim
    kept_channels = sum(layout.widths)
    size = store.kept_keys.element_size()

    def region(tensor: torch.Tensor, used: int) -> RegionBytes:
        return RegionBytes(used * size, tensor.numel() * size)

    return CacheMemory(
        kept_keys=region(store.kept_keys, num_tokens * kept_channels),
        kept_values=region(store.values, num_tokens * len(layout.value_heads) * layout.head_dim),
        window_keys=region(store.window_keys, num_whole_tokens * (all_channels - kept_channels)),
        window_values=region(
            store.window_values, num_whole_tokens * len(layout.window_heads) * layout.head_dim
        ),
        dense_keys=num_tokens * all_channels * size,
        dense_values=num_tokens * all_channels * size,
    )


def sum_memory(parts: Iterable[CacheMemory]) -> CacheMemory:
    """Add up layers."""
    total = CacheMemory()
    for part in parts:
        names = [entry.name for entry in fields(CacheMemory)]
        total = CacheMemory(**{name: getattr(total, name) + getattr(part, name) for name in names})
    return total
