"""Codecs: how numbers of keys and values are stored, as they come, in eight bits or in four.

Encoding has three steps: `round` looks at every number by itself, in the order of channels; `gather` brings
channels into the order of chunks, where some lanes are padding; `pack` looks at numbers that are neighbours
as they are stored. A pool is one tensor. Nothing else knows what a cache is stored in, but the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .fp8_leank import as_bytes, quantise
from .layout_leank import INT4_GROUP_SIZE, ChunkLayout, gather_lanes

_LARGEST_CODE = 15


class Codec:
    """Numbers as they come, or divided by their scales and rounded to e4m3, which is handled as bytes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def pool_of(self, num_chunks: int, width: int) -> tuple[int, int, torch.dtype]:
        """Return chunks, width and dtype of the pool that holds so many chunks of so many numbers."""
        return num_chunks, width, self.dtype

    def round(self, states: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Round number by number, where scales are given by these."""
        return states.to(self.dtype) if scale is None else as_bytes(quantise(states, scale))

    def gather(self, states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Bring channels into lanes as `gather_lanes` does, and fill lanes of padding."""
        return gather_lanes(states, index).masked_fill((index < 0)[:, None], 0)

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return what a pool is to hold, given numbers `[…, chunks, n]`."""
        return numbers

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the numbers, without scales, of what a pool holds `[m, chunks, …, n]`."""
        return stored.view(self.dtype)

    def count(self, num_tokens: int, num_channels: int) -> int:
        """Count the bytes of tokens that have so many channels each in a pool."""
        return num_tokens * num_channels * self.dtype.itemsize


class Int4(Codec):
    """Four-bit codes, with a minimum and a step for every 32 numbers of a token and head.

        step   = (greatest - least) / 15, rounded to the dtype of keys and values
        stored = round((x - least) / step), from 0 to 15; of equal numbers any
        read   = stored * step + least

    The 32 are neighbours as they are stored: a head's kept channels in order, its dropped ones, or those of
    V; the last of each are as many as are left. Both numbers are a token's own, so nothing is calibrated.
    What is not finite makes NaN of its 32 numbers, and of no others. A lane of padding holds what the first
    lane of its chunk does: a zero would count in its group.

    Of a token a pool holds one row of bytes: least number and step of every group, in the dtype of keys and
    values, then the codes, two in a byte.

    Attributes:
        index: Group of every run of neighbours, of which a chunk has R `[chunks, R]`, int64.
        count_groups: Groups of all chunks, G.
        size: Numbers of a chunk, n.
    """

    def __init__(self, dtype: torch.dtype, counts: Sequence[int], size: int, device: torch.device) -> None:
        """Group chunks of `size` numbers, of which every head has so many as `counts` says."""
        super().__init__(dtype)
        run = math.gcd(INT4_GROUP_SIZE, size)
        index: list[int] = []
        self.count_groups, self.size = 0, size
        for count in counts:
            num_runs = count * size // run
            index += [self.count_groups + place * run // INT4_GROUP_SIZE for place in range(num_runs)]
            self.count_groups += -(-num_runs * run // INT4_GROUP_SIZE)
        self.index = torch.tensor(index, dtype=torch.long, device=device).view(-1, size // run)
        self._num_extremes = self.count_groups * 2 * dtype.itemsize  # bytes, like the next two
        self._num_codes = sum(counts) * -(-size // 2)
        self._num_spare = -self._num_codes % dtype.itemsize  # what makes each row begin where a number may

    def pool_of(self, num_chunks: int, width: int) -> tuple[int, int, torch.dtype]:
        """Return those of bytes: a token's chunks are one row."""
        return 1, self._num_extremes + self._num_codes + self._num_spare, torch.uint8

    def gather(self, states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Bring channels into lanes, the first of a chunk into its padding."""
        return gather_lanes(states, torch.where(index < 0, index[..., :1], index))

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers `[…, chunks, n]` as rows of bytes `[…, 1, bytes]`.

        Of the two codes in a byte that of a chunk's first half has the low bits.
        """
        num_runs = self.index.shape[1]
        runs = numbers.reshape(*numbers.shape[:-1], num_runs, self.size // num_runs)
        least, greatest = (
            self._of_groups(found.flatten(-2), reduce)
            for found, reduce in ((runs.amin(-1), "amin"), (runs.amax(-1), "amax"))
        )
        step = ((greatest.float() - least.float()) / _LARGEST_CODE).to(numbers.dtype)
        extremes = torch.stack([least, step], dim=-1)
        of_runs = extremes.index_select(-2, self.index.flatten()).float()
        start, width = of_runs.view(*runs.shape[:-1], 1, 2).unbind(-1)
        codes = ((runs.float() - start) / width).nan_to_num(0).round().clamp(0, _LARGEST_CODE)
        codes = codes.to(torch.uint8).flatten(-2)
        codes = torch.nn.functional.pad(codes, (0, self.size % 2))
        low, high = codes.chunk(2, dim=-1)
        codes = (low | high << 4).flatten(-2)
        spare = codes.new_zeros(*codes.shape[:-1], self._num_spare)
        return torch.cat([extremes.flatten(-2).view(torch.uint8), codes, spare], dim=-1).unsqueeze(-2)

    def _of_groups(self, found: torch.Tensor, reduce: str) -> torch.Tensor:
        """Bring what was found of every run `[…, chunks * R]` to groups `[…, G]`."""
        if self.count_groups == found.shape[-1]:
            return found
        index = self.index.flatten().expand(found.shape)
        empty = found.new_empty(*found.shape[:-1], self.count_groups)
        return empty.scatter_reduce(-1, index, found, reduce, include_self=False)

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what rows of bytes `[m, 1, …, bytes]` stand for `[m, chunks, …, n]`."""
        num_chunks, num_runs = self.index.shape
        if not num_chunks:
            return stored.new_empty(len(stored), 0, *stored.shape[2:-1], self.size, dtype=self.dtype)
        sizes = [self._num_extremes, self._num_codes, self._num_spare]
        extremes, codes, _ = torch.split(stored, sizes, dim=-1)
        shaped = (extremes.view(self.dtype), self.count_groups, 2), (codes, num_chunks, -(-self.size // 2))
        extremes, codes = (
            part.view(*part.shape[:-1], *size).transpose(1, -2).squeeze(-2) for part, *size in shaped
        )
        numbers = torch.cat([codes & _LARGEST_CODE, codes >> 4], dim=-1)[..., : self.size]
        numbers = numbers.reshape(*numbers.shape[:-1], num_runs, self.size // num_runs).float()
        of_runs = extremes.index_select(1, self.index.flatten())
        of_runs = of_runs.view(len(codes), num_chunks, num_runs, *extremes.shape[2:]).movedim(2, -2)
        least, step = of_runs.float().unsqueeze(-2).unbind(-1)
        most = torch.finfo(extremes.dtype).max  # a rounded step may lead beyond it
        return (numbers * step + least).flatten(-2).to(extremes.dtype).clamp(-most, most)

    def count(self, num_tokens: int, num_channels: int) -> int:
        """Count half a byte for every number, and two numbers for every group."""
        return -(-num_tokens * num_channels // 2) + num_tokens * self.count_groups * 2 * self.dtype.itemsize


def int4_codecs(dtype: torch.dtype, layout: ChunkLayout, device: torch.device) -> dict[str, Codec]:
    """Return the codec of every pool, by the pool's name; `dtype` is that of keys and values as they come."""
    size = layout.chunk_size
    return {
        "kept_keys": Int4(dtype, layout.kept_chunks, size, device),
        "values": Int4(dtype, layout.kept_values, layout.value_chunk, device),
        "window_keys": Int4(dtype, layout.dropped_chunks, size, device),
        "window_values": Int4(dtype, layout.dropped_values, layout.value_chunk, device),
    }
