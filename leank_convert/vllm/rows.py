"""Rows and prompts of one engine step, for the decode kernels.

A request with few new tokens is a row. A longer input is cut where its prompt ends: the prompt's part attends
densely, tokens behind it (a request that was preempted computes its answer again) make rows of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from leank_convert._runtime.kernel_key_leank import MAX_DRAFT
from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.rule import pruned_tokens


class Prompt(NamedTuple):
    """A part of a prompt that is read in this step.

    Attributes:
        request: Its number in the batch.
        first: Its first token in the step's input, and one past the last.
        stop: See `first`.
        num_tokens: Tokens of the request up to its end.
    """

    request: int
    first: int
    stop: int
    num_tokens: int


@dataclass(frozen=True)
class Rows:
    """Rows of columns, all as long as the longest.

    Attributes:
        seen: Tokens of its row that a column sees, itself among them `[B, d]`, int32.
        pruned: Pruned ones among them `[B, d]`, int32.
        tokens: The column's token in the step's input `[B, d]`; None where every request is a row, in order.
        valid: Columns that are no padding `[B, d]`; None with `tokens` None.
        requests: The row's request `[B]`; None with `tokens` None.
    """

    seen: torch.Tensor
    pruned: torch.Tensor
    tokens: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    requests: torch.Tensor | None = None


def uniform_rows(lengths: torch.Tensor, prompts: torch.Tensor, num_columns: int, sizes: Windows) -> Rows:
    """Make a row of each request, all with as many new tokens; asks the device nothing.

    Args:
        lengths: Tokens of every request, the new ones counted `[B]`, int32; 0 of a request that is padding.
        prompts: Tokens of its prompt `[B]`, int32.
        num_columns: New tokens of each.
        sizes: The window's.
    """
    later = torch.arange(num_columns - 1, -1, -1, dtype=torch.int32, device=lengths.device)
    seen = (lengths[:, None] - later).clamp(min=0)
    return Rows(seen, pruned_tokens(seen, prompts, sizes))


def cut_rows(
    starts: Sequence[int],
    lengths: Sequence[int],
    prompts: Sequence[int],
    sizes: Windows,
    most_columns: int,
    device: torch.device,
) -> tuple[Rows | None, list[Prompt]]:
    """Cut the requests of a step into rows and prompts.

    Args:
        starts: First token of every request in the step's input, and one past the last of all.
        lengths: Tokens of every request, the new ones counted.
        prompts: Tokens of its prompt.
        sizes: The window's.
        most_columns: Most tokens of a prompt that make a row although it is read at once.
        device: Where rows lie.
    """
    parts: list[Prompt] = []
    rows: list[tuple[int, int, int, int]] = []  # request, first token, tokens, tokens seen by the first
    for request, length in enumerate(lengths):
        first, stop = starts[request], starts[request + 1]
        before = length - (stop - first)
        if stop - first > (MAX_DRAFT if before else most_columns) and before < prompts[request]:
            end = min(stop, first + prompts[request] - before)
            parts.append(Prompt(request, first, end, before + end - first))
            before, first = before + end - first, end
        for token in range(first, stop, MAX_DRAFT):
            rows.append((request, token, min(MAX_DRAFT, stop - token), before + token - first + 1))
    if not rows:
        return None, parts
    request, first, count, seen = torch.tensor(rows).T
    column = torch.arange(int(count.max())).minimum(count[:, None] - 1)  # padding is the last real one again
    seen = (seen[:, None] + column).to(torch.int32)
    pruned = pruned_tokens(seen, torch.tensor(prompts, dtype=torch.int32)[request], sizes)
    valid = torch.arange(column.shape[1]) < count[:, None]
    return (
        Rows(*(part.to(device) for part in (seen, pruned, first[:, None] + column, valid, request))),
        parts,
    )
