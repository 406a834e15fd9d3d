"""The pruning rule as a function of position: how many tokens a query sees pruned.

A query of the prompt sees every token whole. One at position i >= n of a row whose prompt has n tokens sees

    p(i) = p0 + flush * ceil(max(i + 1 - sink - p0 - recent - flush, 0) / flush)
    p0   = max(n - sink - recent, 0)

tokens behind the sink with kept channels alone. Nothing else enters: chunks, batch mates, preemption, hits of
the prefix cache and rejected drafts change nothing in what is computed.
"""

from __future__ import annotations

import torch

from leank_convert._runtime.rows_leank import pruned_after_append, pruned_after_prefill
from leank_convert._runtime.windows_leank import Windows


def pruned_tokens(seen: torch.Tensor, prompts: torch.Tensor, sizes: Windows) -> torch.Tensor:
    """Count the pruned ones among the tokens that queries see, each itself among them, both int32 `[B, d]`.

    `prompts` are the tokens of each row's prompt, int32 `[B]`.
    """
    prompts = prompts[:, None]
    first = pruned_after_prefill(prompts, sizes)
    return pruned_after_append(seen, first, sizes).masked_fill(seen <= prompts, 0)


def pruned_tokens_of(seen: int, prompt: int, sizes: Windows) -> int:
    """Return `pruned_tokens` of one query."""
    # In integers, as the scheduler asks for every request at every step.
    if seen <= prompt:
        return 0
    first = max(prompt - sizes.sink_size - sizes.recent_size, 0)
    return first - -max(seen - first - sizes.total, 0) // sizes.flush_size * sizes.flush_size
