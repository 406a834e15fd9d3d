"""SnapKV in plain torch: tokens that the prompt's end looks at stay (Li et al., arXiv 2404.14469).

Softmax weights of the prompt's last 32 queries, causal among these, are added up and smoothed along the
tokens by an average over 5; after prefill the tokens of the largest sums stay, and the last 32, as many
together as the capacity says. What is decoded stays. Published code chooses for every query head, which
keeps up to G copies of a KV head; here the G query heads of a KV head choose together, by their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bin.baselines.compared_cache import ComparedLayer, Prompts

QUERY_WINDOW, KERNEL_SIZE, CAPACITY = 32, 5, 2048
PAPER_SHARE = 0.56
"""Of the prompt, where the LeanK paper compares both: 44% of K and V are gone."""


class SnapKVLayer(ComparedLayer):  # type: ignore[no-untyped-call]
    """A layer that has dropped tokens of its prompts; so many of each stay as `capacity` says, or a share."""

    def __init__(self, prompts: Prompts, capacity: int | float = CAPACITY) -> None:
        super().__init__(prompts)
        heads = prompts.keys.shape[1]
        self._dropped = torch.zeros(*prompts.keys.shape[:3], dtype=torch.bool, device=prompts.keys.device)
        for row, length in enumerate(prompts.lengths):
            room = capacity if isinstance(capacity, int) else int(capacity * length)
            if length <= max(room, QUERY_WINDOW):
                continue
            keys = prompts.keys[row, :, :length].float()
            queries = prompts.queries[row].float().view(heads, -1, *prompts.queries.shape[2:])
            scores = token_scores(queries, keys, prompts.softmax_scale)
            best = scores.topk(max(room - QUERY_WINDOW, 0), dim=-1).indices
            dropped = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, best, False)
            self._dropped[row, :, : dropped.shape[1]] = dropped

    def held(self, seen: Tensor) -> Tensor:
        """Every token that was not dropped."""
        decoded = seen.shape[-1] - self._dropped.shape[-1]
        return seen & ~functional.pad(self._dropped, (0, decoded))


def token_scores(queries: Tensor, keys: Tensor, softmax_scale: float) -> Tensor:
    """Score the tokens before the last W [H_kv, N - W] by the attention that these pay them.

    Queries are those of the last tokens [H_kv, G, W, D], keys those of all [H_kv, N, D].
    """
    num_queries, num_tokens = queries.shape[2], keys.shape[1]
    places = torch.arange(num_tokens, device=keys.device)
    later = places > places[-num_queries:, None]
    logits = (queries @ keys[:, None].mT * softmax_scale).masked_fill(later, float("-inf"))
    sums = logits.softmax(-1)[..., : num_tokens - num_queries].sum(2).mean(1)
    return functional.avg_pool1d(sums[:, None], KERNEL_SIZE, stride=1, padding=KERNEL_SIZE // 2)[:, 0]
