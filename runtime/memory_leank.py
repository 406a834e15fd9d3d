"""Memory of a cache in bytes, by region."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


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
        kept_values: Kept channels of V of all tokens.
        window_keys: Dropped channels of sink and recent tokens.
        window_values: Dropped channels of V of sink and recent tokens.
        pending_keys: Whole K that waits to be split (`prune="deferred"`).
        pending_values: Whole V that waits to be split.
        other_keys: K of layers that are not pruned.
        other_values: V of the same.
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
    other_keys: RegionBytes = RegionBytes(0, 0)
    other_values: RegionBytes = RegionBytes(0, 0)
    dense_keys: int = 0
    dense_values: int = 0

    def __add__(self, other: CacheMemory) -> CacheMemory:
        names = [entry.name for entry in fields(self)]
        return CacheMemory(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def keys(self) -> RegionBytes:
        """K of all regions."""
        return self.kept_keys + self.window_keys + self.pending_keys + self.other_keys

    @property
    def values(self) -> RegionBytes:
        """V of all regions."""
        return self.kept_values + self.window_values + self.pending_values + self.other_values

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
