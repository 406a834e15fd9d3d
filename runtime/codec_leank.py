"""Codecs: how numbers of keys and values are stored, as they come, in eight bits or in four.

Encoding has three steps: `round` looks at every number by itself, in the order of channels; `gather` brings
channels into the order of chunks, where some lanes are padding; `pack` looks at numbers that are neighbours
as they are stored. Nothing else knows what a cache is stored in, but the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .fp8_leank import FP8, as_bytes, quantise
from .layout_leank import ChunkLayout, gather_lanes

GROUP_SIZE = 32
"""Numbers of a token and head that have one least number and one step, in int4."""
_LARGEST_CODE = 15


class Codec:
    """Numbers as they come, or divided by their scales and rounded to e4m3, which is handled as bytes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def tensors_of(self, num_rows: int, width: int) -> list[tuple[int, int, torch.dtype]]:
        """Return rows, width and dtype of the tensors that hold a pool of so many rows of numbers."""
        return [(num_rows, width, self.dtype)]

    def round(self, states: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Round number by number, where scales are given by these."""
        return states.to(self.dtype) if scale is None else as_bytes(quantise(states, scale))

    def gather(self, states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Bring channels into lanes as `gather_lanes` does, and fill lanes of padding."""
        return gather_lanes(states, index).masked_fill((index < 0)[:, None], 0)

    def pack(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the tensors of a pool are to hold, given numbers `[…, rows of the pool, n]`."""
        return (numbers,)

    def read(self, *parts: torch.Tensor) -> torch.Tensor:
        """Return the numbers, without scales, of what is stored `[m, rows of the pool, …, n]`."""
        return parts[0].view(self.dtype)

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

    Attributes:
        index: Group of every run of neighbours, of which a row of the pool has R `[rows, R]`, int64.
        count_groups: Groups of all rows, G.
        size: Numbers of a row, n.
    """

    def __init__(self, dtype: torch.dtype, counts: Sequence[int], size: int, device: torch.device) -> None:
        """Group a pool's rows of `size` numbers, of which every head has so many as `counts` says."""
        super().__init__(dtype)
        run = math.gcd(GROUP_SIZE, size)
        index: list[int] = []
        self.count_groups, self.size = 0, size
        for count in counts:
            num_runs = count * size // run
            index += [self.count_groups + place * run // GROUP_SIZE for place in range(num_runs)]
            self.count_groups += -(-num_runs * run // GROUP_SIZE)
        self.index = torch.tensor(index, dtype=torch.long, device=device).view(-1, size // run)

    def tensors_of(self, num_rows: int, width: int) -> list[tuple[int, int, torch.dtype]]:
        """Return those of the codes, two in a byte, and of least numbers and steps."""
        return [(num_rows, -(-width // 2), torch.uint8), (self.count_groups, 2, self.dtype)]

    def gather(self, states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Bring channels into lanes, the first of a chunk into its padding."""
        return gather_lanes(states, torch.where(index < 0, index[..., :1], index))

    def pack(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return numbers `[…, rows, n]` as they are stored.

        Two in a byte, those of the first half in the low bits `[…, rows, ⌈n/2⌉]`, uint8; least number and
        step of every group, in the dtype of `numbers` `[…, G, 2]`.
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
        return low | high << 4, extremes

    def _of_groups(self, found: torch.Tensor, reduce: str) -> torch.Tensor:
        """Bring what was found of every run `[…, rows * R]` to groups `[…, G]`."""
        if self.count_groups == found.shape[-1]:
            return found
        index = self.index.flatten().expand(found.shape)
        empty = found.new_empty(*found.shape[:-1], self.count_groups)
        return empty.scatter_reduce(-1, index, found, reduce, include_self=False)

    def read(self, *parts: torch.Tensor) -> torch.Tensor:
        """Return what codes `[m, rows, …, ⌈n/2⌉]` stand for, given extremes `[m, G, …, 2]`."""
        codes, extremes = parts
        num_rows, num_runs = self.index.shape
        numbers = torch.cat([codes & _LARGEST_CODE, codes >> 4], dim=-1)[..., : self.size]
        numbers = numbers.reshape(*numbers.shape[:-1], num_runs, self.size // num_runs).float()
        of_runs = extremes.index_select(1, self.index.flatten())
        of_runs = of_runs.view(len(codes), num_rows, num_runs, *extremes.shape[2:]).movedim(2, -2)
        least, step = of_runs.float().unsqueeze(-2).unbind(-1)
        most = torch.finfo(extremes.dtype).max  # a rounded step may lead beyond it
        return (numbers * step + least).flatten(-2).to(extremes.dtype).clamp(-most, most)

    def count(self, num_tokens: int, num_channels: int) -> int:
        """Count half a byte for every number, and two numbers for every group."""
        return -(-num_tokens * num_channels // 2) + num_tokens * self.count_groups * 2 * self.dtype.itemsize


def make_codecs(
    kv_dtype: str, dtype: torch.dtype, layout: ChunkLayout, device: torch.device
) -> dict[str, Codec]:
    """Return the codec of every pool, by the pool's name; `dtype` is that of keys and values as they come."""
    if kv_dtype != "int4":
        codec = Codec(FP8 if kv_dtype == "fp8" else dtype)
        return dict.fromkeys(("kept_keys", "values", "window_keys", "window_values"), codec)
    size = layout.chunk_size
    return {
        "kept_keys": Int4(dtype, layout.kept_chunks, size, device),
        "values": Int4(dtype, layout.kept_values, layout.value_chunk, device),
        "window_keys": Int4(dtype, layout.dropped_chunks, size, device),
        "window_values": Int4(dtype, layout.dropped_values, layout.value_chunk, device),
    }
