"""Memory of a cache in bytes, by region."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class RegionBytes:
    """Bytes of one region of the cache."""

    used: int  # channels of tokens that are there, without padding and free capacity
    allocated: int  # everything held

    def __add__(self, other: RegionBytes) -> RegionBytes:
        return RegionBytes(self.used + other.used, self.allocated + other.allocated)


@dataclass(frozen=True)
class CacheMemory:
    """What a cache, or one layer of it, holds, by region.

    Padding is left out of dense bytes, except in input that waits to be split: how much of that is padding is
    not known yet.
    """

    kept_keys: RegionBytes = RegionBytes(0, 0)  # kept channels of all tokens
    kept_values: RegionBytes = RegionBytes(0, 0)
    window_keys: RegionBytes = RegionBytes(0, 0)  # dropped channels of sink and recent tokens
    window_values: RegionBytes = RegionBytes(0, 0)
    pending_keys: RegionBytes = RegionBytes(0, 0)  # whole input that waits to be split (`prune="deferred"`)
    pending_values: RegionBytes = RegionBytes(0, 0)
    other_keys: RegionBytes = RegionBytes(0, 0)  # of layers that are not pruned
    other_values: RegionBytes = RegionBytes(0, 0)
    dense_keys: int = 0  # bytes that a dense cache uses for the same tokens
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


def count_whole(region: str, keys: torch.Tensor | None, values: torch.Tensor | None) -> CacheMemory:
    """Count what is held as it came, of region `pending` or `other`; its padding counts."""
    num_bytes = [0 if states is None else states.nbytes for states in (keys, values)]
    held = (RegionBytes(count, count) for count in num_bytes)
    regions = dict(zip((f"{region}_keys", f"{region}_values"), held, strict=True))
    return CacheMemory(**regions, dense_keys=num_bytes[0], dense_values=num_bytes[1])
