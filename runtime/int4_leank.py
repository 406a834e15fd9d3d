"""int4 cache format: four-bit codes, with a minimum and a step for every 32 numbers of a token and head.

    step   = (greatest - least) / 15, rounded to the dtype of keys and values
    stored = round((x - least) / step), from 0 to 15; of equal numbers any
    read   = stored * step + least

The 32 are neighbours as they are stored: a head's kept channels in order, its dropped ones, or those of V;
the last of each are as many as are left. Both numbers are a token's own, so nothing is calibrated. What is
not finite makes NaN of its 32 numbers, and of no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROUP_SIZE = 32
_LARGEST_CODE = 15


@dataclass(frozen=True)
class Groups:
    """Which numbers of a pool's rows, chunks of keys or heads of values, have one least number and one step.

    Attributes:
        index: Group of every run of neighbours, of which a row has R `[rows, R]`, int64.
        count: Groups of all rows, G.
        size: Numbers of a row, n.
    """

    index: torch.Tensor
    count: int
    size: int


def group_chunks(chunks: Sequence[int], chunk_size: int, device: torch.device) -> Groups:
    """Group chunks of keys, of which every head has so many; a power of two up to 32 is a chunk's size."""
    index, count = _group_runs(chunks, chunk_size)
    return Groups(torch.tensor(index, dtype=torch.long, device=device).view(-1, 1), count, chunk_size)


def group_heads(num_heads: int, head_dim: int, device: torch.device) -> Groups:
    """Group values of so many heads."""
    run = math.gcd(GROUP_SIZE, head_dim)
    index, count = _group_runs([head_dim // run] * num_heads, run)
    return Groups(
        torch.tensor(index, dtype=torch.long, device=device).view(-1, head_dim // run), count, head_dim
    )


def _group_runs(runs: Sequence[int], run_size: int) -> tuple[list[int], int]:
    """Number the groups of heads with so many runs each: that of every run, and how many there are."""
    index: list[int] = []
    count = 0
    for number in runs:
        index += [count + place * run_size // GROUP_SIZE for place in range(number)]
        count += -(-number * run_size // GROUP_SIZE)
    return index, count


def quantise(states: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers as they are stored.

    Args:
        states: `[…, rows, n]`.
        groups: Of these rows.

    Returns:
        Two numbers in a byte, those of the first half in the low bits `[…, rows, ⌈n/2⌉]`, uint8; least number
        and step of every group, in the dtype of `states` `[…, G, 2]`.
    """
    num_runs = groups.index.shape[1]
    runs = states.reshape(*states.shape[:-1], num_runs, groups.size // num_runs)
    least, greatest = (
        _of_groups(found.flatten(-2), groups, reduce)
        for found, reduce in ((runs.amin(-1), "amin"), (runs.amax(-1), "amax"))
    )
    step = ((greatest.float() - least.float()) / _LARGEST_CODE).to(states.dtype)
    extremes = torch.stack([least, step], dim=-1)
    of_runs = extremes.index_select(-2, groups.index.flatten()).float()
    start, width = of_runs.view(*runs.shape[:-1], 1, 2).unbind(-1)
    codes = ((runs.float() - start) / width).nan_to_num(0).round().clamp(0, _LARGEST_CODE)
    codes = codes.to(torch.uint8).flatten(-2)
    codes = torch.nn.functional.pad(codes, (0, groups.size % 2))
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4, extremes


def _of_groups(found: torch.Tensor, groups: Groups, reduce: str) -> torch.Tensor:
    """Bring what was found of every run `[…, rows * R]` to groups `[…, G]`."""
    if groups.count == found.shape[-1]:
        return found
    index = groups.index.flatten().expand(found.shape)
    empty = found.new_empty(*found.shape[:-1], groups.count)
    return empty.scatter_reduce(-1, index, found, reduce, include_self=False)


def widen(codes: torch.Tensor, extremes: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return what stored numbers stand for.

    Args:
        codes: `[m, rows, …, ⌈n/2⌉]`.
        extremes: `[m, G, …, 2]`.
        groups: Of these rows.

    Returns:
        `[m, rows, …, n]` in the dtype of `extremes`.
    """
    num_rows, num_runs = groups.index.shape
    numbers = torch.cat([codes & _LARGEST_CODE, codes >> 4], dim=-1)[..., : groups.size]
    numbers = numbers.reshape(*numbers.shape[:-1], num_runs, groups.size // num_runs).float()
    of_runs = extremes.index_select(1, groups.index.flatten())
    of_runs = of_runs.view(len(codes), num_rows, num_runs, *extremes.shape[2:]).movedim(2, -2)
    least, step = of_runs.float().unsqueeze(-2).unbind(-1)
    most = torch.finfo(extremes.dtype).max  # a rounded step may lead beyond it
    return (numbers * step + least).flatten(-2).to(extremes.dtype).clamp(-most, most)
