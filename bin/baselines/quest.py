"""Quest in plain torch: a step reads the pages that may matter most to it (Tang et al., arXiv 2406.10774).

Tokens lie in pages by position. Of every page the least and the greatest value of each channel are kept; a
page's score is the most that q·k can be within them, the sum over channels of max(q·greatest, q·least). Of a
budget of 1024 tokens the last page is always read, and the best-scored others fill it; the first two layers
read everything. Queries choose for themselves, as published, or all of a KV head together by the sum of their
scores, as a kernel that loads a page once would. It saves reads, and no memory.

With LeanK, scores and their extremes are of kept channels, so heads that keep none have no pages; the tokens
of the window, sink and recent, are always read, beside the budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bin.baselines.compared_cache import ComparedLayer, Prompts

TOKEN_BUDGET, DENSE_LAYERS, LEAST_PAGES = 1024, 2, 3


class QuestLayer(ComparedLayer):  # type: ignore[no-untyped-call]
    """A layer that reads some pages, of `token_budget` together; of a KV head queries may choose as one."""

    def __init__(
        self,
        prompts: Prompts,
        page_size: int = 16,
        per_kv_head: bool = False,
        token_budget: int = TOKEN_BUDGET,
    ) -> None:
        super().__init__(prompts)
        self._page_size, self._per_kv_head = page_size, per_kv_head
        self._num_pages = max(LEAST_PAGES, token_budget // page_size)

    def chosen(self, query: Tensor, seen: Tensor, whole: Tensor) -> Tensor:
        """Tokens of chosen pages, of the last one and of the window."""
        if self.index < DENSE_LAYERS:
            return seen
        num_tokens = self.keys.shape[2]
        scores = page_scores(
            query * self.channel_mask[:, None], self.keys.float(), seen[:, 0], self._page_size
        )
        if self._per_kv_head:
            scores = scores.sum(2, keepdim=True)
        pages = torch.arange(scores.shape[-1], device=scores.device)
        lengths = torch.tensor(self.lengths, device=scores.device)[:, None, None, None]
        last = (lengths - 1) // self._page_size
        in_pages = torch.arange(num_tokens, device=scores.device) // self._page_size
        # A page is worth a place in the budget if it holds a token that is not read anyway.
        open_pages = torch.zeros(*seen.shape[:3], len(pages), dtype=torch.int32, device=scores.device)
        open_pages.index_add_(3, in_pages, (seen & ~whole).int())
        scores = scores.masked_fill((open_pages == 0) | (pages == last), float("-inf"))
        best = scores.topk(min(self._num_pages - 1, len(pages)), dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        chosen &= scores > float("-inf")
        return (chosen | (pages == last))[..., in_pages] | whole

    def extra_bits(self) -> int:
        """Least and greatest values of kept channels, of every page."""
        if self.index < DENSE_LAYERS:
            return 0
        num_pages = sum(-(-length // self._page_size) for length in self.lengths)
        return 2 * num_pages * int(self.widths.sum()) * 8 * self.keys.element_size()


def page_scores(query: Tensor, keys: Tensor, seen: Tensor, page_size: int) -> Tensor:
    """Bound each page's largest logit from above [B, H_kv, G, pages]; the lowest there is without tokens.

    Queries are [B, H_kv, G, D], keys [B, H_kv, N, D], and `seen` says which tokens there are, bool [B, 1, N].
    """
    room = -keys.shape[2] % page_size
    keys = torch.nn.functional.pad(keys, (0, 0, 0, room))
    unseen = ~torch.nn.functional.pad(seen, (0, room))[..., None]
    limit = torch.finfo(keys.dtype).max
    pages = -1, page_size
    least = torch.unflatten(keys.masked_fill(unseen, limit), 2, pages).amin(3)
    greatest = torch.unflatten(keys.masked_fill(unseen, -limit), 2, pages).amax(3)
    return query.clamp(min=0) @ greatest.mT + query.clamp(max=0) @ least.mT
