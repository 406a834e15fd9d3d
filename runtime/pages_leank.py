"""Page tables: allocation and reallocation of a cache's pages.

All layers of a cache share one `PageTables`, as their rows are alike: every layer has two pools of the same
numbers of pages, one for kept channels of all tokens, and the window for what only whole tokens need. Tables
say which page of a pool holds which tokens of a row, and kernels read nothing else. Here a row's pages follow
one another in both pools, its run:

    page of a row              0  1  2  3  4  5  6  7  8
    in its run                 0  1  2  3  4  5  6  7  8
    in its run of the window   0  1  2  3  4  2  3  4  2     two of the sink, a ring of three: holds 6, 7, 8

Tables are not changed: where rows need more pages, or become other rows, there are other tables, and each
layer's store moves from those that it has to those when its turn comes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAGE = 64
"""Tokens of a page, one tile of the kernels."""


@dataclass(frozen=True)
class PageList:
    """Pages of a pool that plain torch reads, row by row."""

    count: int  # how many (host)
    pages: torch.Tensor | None = None  # which `[count]`; None: the pool's first as they lie
    rows: torch.Tensor | None = None  # row of each `[count]`; None, like the next two: rows have equally many
    entries: torch.Tensor | None = None  # place here of every row's pages `[B, n]`, any beyond its last
    numbers: torch.Tensor | None = None  # place of each in `[B, n]`, flattened `[count]`

    def most(self, batch_size: int) -> int:
        """Return n, the pages of the row that has most."""
        return self.count // batch_size if self.entries is None else self.entries.shape[1]


class PageTables:
    """Which pages hold the tokens of every row."""

    def __init__(self, runs: Sequence[int], sink_size: int, ring_size: int) -> None:
        """Lay out runs, row by row, of at least one page each; see `RowState` for the sizes."""
        self.page_size = PAGE
        self.num_sink = -(-sink_size // PAGE)  # window pages of a row that stay
        self.num_ring = _ring_pages(ring_size)  # those behind them, which are used again and again
        self.runs = tuple(runs)
        self.window_runs = tuple(min(run, self.num_sink + self.num_ring) for run in runs)
        self.pool_runs = (self.runs, self.window_runs)
        self.is_even = min(self.runs) == max(self.runs)
        self._copies: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return whether rows of so many tokens have room."""
        return all(length <= run * self.page_size for length, run in zip(lengths, self.runs, strict=True))

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return page table and window table `[B, n]`, int32, made once per device without waiting for it.

        Entries beyond a row's run name its last page.
        """
        if device not in self._copies:
            with torch.inference_mode(False):  # they serve in any mode
                number = _host(range(max(self.runs)))
                tables = _starts(self.runs)[:, None] + number.minimum(_host(self.runs)[:, None] - 1)
                slot = self.num_sink + (number - self.num_sink) % self.num_ring
                slot = torch.where(number < self.num_sink, number, slot)
                windows = _starts(self.window_runs)[:, None] + slot.minimum(
                    _host(self.window_runs)[:, None] - 1
                )
                self._copies[device] = (
                    tables.to(torch.int32).to(device, non_blocking=True),
                    windows.to(torch.int32).to(device, non_blocking=True),
                )
        return self._copies[device]

    def window_numbers(self, lengths: torch.Tensor) -> torch.Tensor:
        """Say which page of its row every window page holds, -1 for none `[B, n]`, by rows' lengths `[B]`."""
        slot = torch.arange(max(self.window_runs), device=lengths.device, dtype=lengths.dtype)
        last = (lengths[:, None] - 1).div(self.page_size, rounding_mode="floor")
        rounds = (last - slot).div(self.num_ring, rounding_mode="floor")
        number = torch.where(slot < self.num_sink, slot, slot + rounds * self.num_ring)
        return torch.where(slot <= last, number, -1)

    def lists(self, lengths: Sequence[int], device: torch.device) -> tuple[PageList, PageList]:
        """List the pages of rows of `lengths` tokens, and their window pages.

        All that there are, where these are few more: a pool is read as it lies then, and not copied.
        """
        runs = pages_of(lengths)
        if len(runs) > 1 and 4 * sum(self.runs) <= 5 * sum(runs):
            runs = list(self.runs)
        windows = [min(run, self.num_sink + self.num_ring) for run in runs]
        return _page_list(runs, self.runs, device), _page_list(windows, self.window_runs, device)

    def prompt_pages(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """List the pages that prompts of `lengths` tokens fill, in the first pool and in the window.

        Each `[3, pages]`: row, number of the page in its row, page of the pool.
        """
        count = -(-_host(lengths)[:, None] // self.page_size)
        number = _host(range(max(self.runs)))
        used = number < count
        held = used & ((number < self.num_sink) | (number >= count - self.num_ring))
        tables = self.on(torch.device("cpu"))
        found = []
        for pages, table in zip((used, held), tables, strict=True):
            rows, numbers = pages.nonzero(as_tuple=True)
            found.append(torch.stack([rows, numbers, table[rows, numbers].long()]))
        return found[0], found[1]


def _page_list(runs: Sequence[int], pool_runs: Sequence[int], device: torch.device) -> PageList:
    """List the first pages of every row's run in a pool."""
    count, as_it_lies = sum(runs), len(runs) == 1 or tuple(runs) == tuple(pool_runs)
    is_even = min(runs) == max(runs)
    if as_it_lies and is_even:
        return PageList(count)
    rows = _host(range(len(runs))).repeat_interleave(_host(runs))
    number = _host(range(count)) - _starts(runs)[rows]
    pages = None if as_it_lies else (_starts(pool_runs)[rows] + number).to(device, non_blocking=True)
    if is_even:
        return PageList(count, pages)
    entries = _starts(runs)[:, None] + _host(range(max(runs))).minimum(_host(runs)[:, None] - 1)
    tensors = (rows, entries, rows * max(runs) + number)
    return PageList(count, pages, *(tensor.to(device, non_blocking=True) for tensor in tensors))


def _ring_pages(num_tokens: int) -> int:
    """Return the pages that so many tokens in a row touch at most."""
    return (num_tokens + PAGE - 2) // PAGE + 1


def pages_of(lengths: Sequence[int]) -> list[int]:
    """Return the pages that rows of `lengths` tokens take, at least one each."""
    return [max(-(-length // PAGE), 1) for length in lengths]


def spread_pages(lengths: Sequence[int], sink_size: int, ring_size: int) -> list[int]:
    """Give pages to rows of `lengths` tokens whose ends are not known, so that all go on equally long.

    As many in all as hold a sixteenth more tokens than there are, and one more for every row; the same holds
    for the window's rows that are not whole yet. Growth by a constant factor keeps the copying per token
    constant, and a sixteenth keeps what is allocated within an eighth of what is used and a page a row.
    """
    most = -(-sink_size // PAGE) + _ring_pages(ring_size)
    growing = [length for length in lengths if -(-length // PAGE) < most]

    def runs(extra: int) -> list[int]:
        return pages_of([length + extra for length in lengths])

    def allowed(tokens: Sequence[int]) -> int:
        return sum(tokens) * 17 // 16 // PAGE + len(tokens)

    num_pages = allowed(lengths)
    num_window_pages = allowed(growing) + (len(lengths) - len(growing)) * most

    def too_many(extra: int) -> bool:
        found = runs(extra)
        return sum(found) > num_pages or sum(min(run, most) for run in found) > num_window_pages

    return runs(bisect_left(range(num_pages * PAGE), True, lo=1, key=too_many) - 1)


def _host(numbers: Sequence[int]) -> torch.Tensor:
    """Return a tensor on the CPU, whatever torch's default device is."""
    return torch.tensor(numbers, device="cpu")


def _starts(runs: Sequence[int]) -> torch.Tensor:
    counts = _host(runs)
    return counts.cumsum(0) - counts


def page_sources(
    runs: Sequence[int], old_runs: Sequence[int], rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Say which page of an old pool every page of a pool goes on from, -1 for a new one `[sum(runs)]`.

    `rows` `[B]` is the old row that each row goes on from, None for the same; it lies on the CPU unless rows
    of both pools all have equally many pages, and the result lies where it does.
    """
    if rows is None:
        rows = _host(range(len(runs)))
    number = torch.arange(max(runs), device=rows.device)
    if min(runs) == max(runs) and min(old_runs) == max(old_runs):
        pages = rows[:, None] * old_runs[0] + number
        return torch.where(number < old_runs[0], pages, -1).flatten()
    pages = _starts(old_runs)[rows][:, None] + number
    pages = torch.where(number < _host(old_runs)[rows][:, None], pages, -1)
    return pages[number < _host(runs)[:, None]]
