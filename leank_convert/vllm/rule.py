"""How many tokens a query sees pruned: the runtime's rule as a function of position.

A query of the prompt sees every token whole. One at position i >= n of a row whose prompt has n tokens sees

    p(i) = p0 + flush * ceil(max(i + 1 - sink - p0 - recent - flush, 0) / flush)
    p0   = max(n - sink - recent, 0)

tokens behind the sink with kept channels alone. Nothing else enters: chunks, batch mates, preemption, hits of
the prefix cache and rejected drafts change nothing in what is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class WindowSizes(NamedTuple):
    """Tokens that keep every channel, and how many leave at a time."""

    sink: int
    recent: int
    flush: int


def pruned_tokens(seen: torch.Tensor, prompts: torch.Tensor, sizes: WindowSizes) -> torch.Tensor:
    """Count the pruned ones among the tokens that queries see.

    Args:
        seen: Tokens of its row that a query sees, itself among them, int32 `[B, d]`.
        prompts: Tokens of the row's prompt, int32 `[B]`.
        sizes: The window's.

    Returns:
        int32 `[B, d]`.
    """
    prompts = prompts[:, None]
    first = (prompts - (sizes.sink + sizes.recent)).clamp(min=0)
    over = (seen - first - sum(sizes)).clamp(min=0)
    pruned = first + (over + (sizes.flush - 1)) // sizes.flush * sizes.flush
    return pruned.masked_fill(seen <= prompts, 0)


def pruned_tokens_of(seen: int, prompt: int, sizes: WindowSizes) -> int:
    """Return `pruned_tokens` of one query."""
    if seen <= prompt:
        return 0
    first = max(prompt - sizes.sink - sizes.recent, 0)
    return first - -max(seen - first - sum(sizes), 0) // sizes.flush * sizes.flush
