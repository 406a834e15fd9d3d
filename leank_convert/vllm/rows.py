"""Rows and prompts of one engine step, for the decode kernels and for dense attention.

A request with few new tokens is a row. A longer input is cut where its prompt ends: the prompt's part attends
densely, tokens behind it (a request that was preempted computes its answer again) make rows of their own.
Prompts that lie side by side in the step's input are one run, which attends in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from leank_convert._runtime.kernel_key_leank import MAX_DRAFT
from leank_convert._runtime.step_leank import StoredView
from leank_convert._runtime.stored_leank import StoreTensors
from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.attention import view_tables
from leank_convert.vllm.rule import pruned_tokens


class Prompt(NamedTuple):
    """A part of a prompt that is read in this step."""

    request: int  # its number in the batch
    first: int  # its first token in the step's input
    stop: int  # one past its last there
    num_tokens: int  # tokens of the request up to its end

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of it was read before."""
        return self.num_tokens == self.stop - self.first


@dataclass(frozen=True)
class PromptRun:
    """Prompts side by side in the step's input, all fresh or none."""

    parts: tuple[Prompt, ...]  # the prompts
    starts: torch.Tensor  # each one's first token in the run, and one past the last `[n + 1]`, int32
    key_starts: torch.Tensor  # the same of all their tokens, earlier ones among them
    requests: torch.Tensor  # their requests `[n]`, int32
    tokens: slice  # theirs in the step's input
    longest: int  # most new tokens of one
    longest_keys: int  # most tokens of one
    num_keys: int  # tokens of all


@dataclass
class Rows:
    """Rows of columns, all as long as the longest; what layers share is made by the first that asks."""

    seen: torch.Tensor  # tokens of its row that a column sees, itself among them `[B, d]`, int32
    pruned: torch.Tensor  # pruned ones among them `[B, d]`, int32
    is_wide: bool = False  # whether a row may have more columns than a decode step
    # The column's token in the step's input `[B, d]`; None where every request is a row, in order.
    tokens: torch.Tensor | None = None
    # Places of columns that are no padding among all `[n]`; None where none is.
    real: torch.Tensor | None = None
    requests: torch.Tensor | None = None  # the row's request `[B]`; None with `tokens` None
    _tables: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)
    _plan: torch.Tensor | None = field(default=None, repr=False)
    _views: list[tuple[slice, StoredView]] | None = field(default=None, repr=False)

    def store(self, store: StoreTensors) -> StoreTensors:
        """Give a store of requests the tables of the rows."""
        if self.requests is None:
            return store
        if self._tables is None:
            self._tables = store.page_table[self.requests], store.window_table[self.requests]
        return store._replace(page_table=self._tables[0], window_table=self._tables[1])

    @cached_property
    def places(self) -> torch.Tensor | None:
        """Tokens of the step's input that are columns, in the order of `real`."""
        if self.tokens is None:
            return None
        return self.tokens.flatten() if self.real is None else self.tokens.flatten()[self.real]

    def plan(self, kernels: Any, sink_size: int) -> torch.Tensor:
        """What the kernels do with the rows."""
        if self._plan is None:
            self._plan = kernels.plan(self.seen, self.pruned, sink_size)
        return self._plan

    def views(
        self, store: StoreTensors, sink_size: int, max_length: int, most_tokens: int
    ) -> list[tuple[slice, StoredView]]:
        """What plain torch reads for the rows of a store that has their tables: so many tokens at once.

        All rows count as `max_length` tokens; one of them is read in any case.
        """
        if self._views is None:
            self._views, step = [], max(most_tokens // max(max_length, 1), 1)
            for part in (slice(first, first + step) for first in range(0, len(self.seen), step)):
                pages, window_pages = store.page_table[part], store.window_table[part]
                own = store._replace(page_table=pages, window_table=window_pages)
                view = view_tables(own, self.seen[part], self.pruned[part], sink_size, max_length)
                self._views.append((part, view))
        return self._views


def uniform_rows(lengths: torch.Tensor, prompts: torch.Tensor, num_columns: int, sizes: Windows) -> Rows:
    """Make a row of each request, all with as many new tokens; asks the device nothing.

    `lengths` are their tokens, the new ones counted, 0 of padding, `prompts` those of prompts, both int32
    `[B]`.
    """
    later = torch.arange(num_columns - 1, -1, -1, dtype=torch.int32, device=lengths.device)
    seen = (lengths[:, None] - later).clamp(min=0)
    return Rows(seen, pruned_tokens(seen, prompts, sizes))


def cut_requests(
    starts: Sequence[int],
    lengths: Sequence[int],
    prompts: Sequence[int],
    most_columns: int,
    num_columns: int,
    most_keys: int,
) -> tuple[list[list[tuple[int, int, int, int]]], list[list[Prompt]]]:
    """Cut the requests of a step into rows and runs of prompts, on the host.

    `starts` are their first tokens in the step's input, and one past the last of all, `lengths` their tokens,
    the new ones counted, `prompts` those of prompts. A prompt of up to `most_columns` tokens makes a row
    although it is read at once; prompts of a run which is not fresh have no more than `most_keys` together,
    and one prompt has no more.

    Returned are rows of at most `num_columns` tokens and longer ones, each its request, its first token,
    their number and how many of the request are behind them; and runs.
    """
    rows: list[list[tuple[int, int, int, int]]] = [[], []]
    runs: list[list[Prompt]] = []
    for request, length in enumerate(lengths):
        first, stop = starts[request], starts[request + 1]
        before = length - (stop - first)
        if stop - first > (MAX_DRAFT if before else most_columns) and before < prompts[request]:
            end = min(stop, first + prompts[request] - before)
            part = Prompt(request, first, end, before + end - first)
            last = runs[-1] if runs else []
            if (
                last
                and last[-1].stop == first
                and last[-1].is_fresh == part.is_fresh
                and (part.is_fresh or sum(own.num_tokens for own in last) + part.num_tokens <= most_keys)
            ):
                last.append(part)
            else:
                runs.append([part])
            first = end
        for token in range(first, stop, MAX_DRAFT):
            count = min(MAX_DRAFT, stop - token)
            rows[count > num_columns].append((request, token, count, stop - token - count))
    return rows, runs


def place_requests(
    rows: list[list[tuple[int, int, int, int]]],
    runs: list[list[Prompt]],
    lengths: torch.Tensor,
    prompts: torch.Tensor,
    sizes: Windows,
) -> tuple[list[Rows], list[PromptRun]]:
    """Bring what `cut_requests` cut to the device: one copy, not waited for.

    There `lengths` and `prompts` are int32 `[B]`; lengths may be fewer than the host knows.
    """
    parts: list[torch.Tensor] = []
    for own in filter(None, rows):
        request, first, count, behind = torch.tensor(own, dtype=torch.int32).T
        # Padding is the last real one again.
        column = torch.arange(int(count.max()), dtype=torch.int32).minimum(count[:, None] - 1)
        real = (torch.arange(column.shape[1]) < count[:, None]).flatten().nonzero().to(torch.int32)
        parts += [request, first[:, None] + column, behind[:, None] + (count[:, None] - 1 - column), real]
    counts = [([p.stop - p.first for p in run], [p.num_tokens for p in run]) for run in runs]
    for run, (new, all_tokens) in zip(runs, counts, strict=True):
        for numbers in ([0, *accumulate(new)], [0, *accumulate(all_tokens)], [p.request for p in run]):
            parts.append(torch.tensor(numbers, dtype=torch.int32))
    here = torch.cat([part.flatten() for part in parts])
    # A copy of much that is not pinned may wait for the device.
    there = (here.pin_memory() if lengths.is_cuda else here).to(lengths.device, non_blocking=True)
    split = iter(there.split([part.numel() for part in parts]))
    made: list[Rows] = []
    for is_wide, own in enumerate(rows):
        if own:
            request, tokens, behind, real = (next(split) for _ in range(4))
            tokens, behind = (part.view(len(own), -1) for part in (tokens, behind))
            seen = lengths[request][:, None] - behind
            pruned = pruned_tokens(seen, prompts[request], sizes)
            columns = None if len(real) == tokens.numel() else real.long()
            made.append(Rows(seen, pruned, bool(is_wide), tokens.long(), columns, request))
    return made, [
        PromptRun(
            tuple(run),
            *(next(split), next(split), next(split)),
            slice(run[0].first, run[-1].stop),
            max(new),
            max(all_tokens),
            sum(all_tokens),
        )
        for run, (new, all_tokens) in zip(runs, counts, strict=True)
    ]
