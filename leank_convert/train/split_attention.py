"""Attention of the tokens that follow a stored context: differentiable, and never [N, H, S] at once.

The softmax is split in two. Keys that every query treats alike, the middle of the context, go through a
fused kernel that keeps nothing but output and log-sum-exp. All others (sink, recent window, the border
between them, the questions' own tokens) are few and go through plain torch, which may mask and scale each
pair by itself. Both are merged by their log-sum-exps. Keys and values of the middle are neither copied nor
repeated: the G query heads of a KV head are folded into the queries, and the scaling factors go onto the
query, whose product with a key is the same. Letters as in `attention`; W keys of the second part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leank_convert.train.context import StoredContext
from leank_convert.train.fused import attend, merge, query_gradient


@dataclass(frozen=True)
class Windows:
    """The regions that keep every channel.

    Attributes:
        sink_size: First tokens of the sequence.
        recent_size: Tokens before the query's own.
    """

    sink_size: int
    recent_size: int


@dataclass(frozen=True)
class Regions:
    """Which of the two parts a key belongs to, and how a query sees those of the second.

    The second part's keys are, in this order, context tokens before `middle_start`, context tokens from
    `middle_stop` on, and the tokens that follow the context.

    Attributes:
        middle_start: First context token of the middle.
        middle_stop: End of the middle.
        seen: Which queries see which keys of the second part, bool [N, W].
        full: Where a query sees a key with every channel, bool [N, W]; None for everywhere.
    """

    middle_start: int
    middle_stop: int
    seen: Tensor
    full: Tensor | None


def plan_regions(
    num_context: int,
    key_positions: Tensor,
    key_owners: Tensor,
    num_queries: int,
    windows: Windows | None,
) -> Regions:
    """Find out how the last tokens of some packed questions see everything.

    A query at position p sees the context and its own question's tokens up to p, with every channel where
    j < sink_size or j >= p - recent_size.

    Args:
        num_context: P.
        key_positions: Positions of the tokens that follow the context [T].
        key_owners: Which question each belongs to [T].
        num_queries: N; the queries are the last N of those tokens.
        windows: None for dense attention.
    """
    positions, owners = key_positions[-num_queries:, None], key_owners[-num_queries:, None]
    start, stop = 0, num_context
    if windows is not None:
        start = min(windows.sink_size, num_context)
        stop = min(max(int(positions.min()) - windows.recent_size, start), num_context)
    context = torch.cat([torch.arange(start), torch.arange(stop, num_context)]).to(key_positions.device)
    own = (key_owners == owners) & (key_positions <= positions)
    seen = torch.cat([own.new_ones(num_queries, len(context)), own], dim=1)
    if windows is None:
        return Regions(start, stop, seen, None)
    j = torch.cat([context, key_positions])
    return Regions(start, stop, seen, (j < windows.sink_size) | (j >= positions - windows.recent_size))


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: StoredContext,
    layer: int,
    regions: Regions,
    scaling: float,
    scaling_factors: Tensor | None = None,
    sees_middle: Tensor | None = None,
) -> Tensor:
    """Attention over a stored context and the tokens that follow it.

    The logit is `scaling * q·k` where `regions` say full, and `scaling * (q ⊙ scaling_factors)·k` elsewhere.
    Gradients reach query, key, value and scaling factors.

    Args:
        query: After RoPE [1, H, N, D].
        key: Of the tokens that follow the context [1, H_kv, T, D].
        value: The same.
        context: The stored context.
        layer: Which layer of it.
        regions: How the queries see the keys.
        scaling: The model's softmax scale.
        scaling_factors: This layer's [H_kv, D]; None for dense attention.
        sees_middle: This layer's heads [H_kv] that see the middle; None for all.

    Returns:
        [1, N, H, D] in the query's dtype.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    folded = query.reshape(batch, num_kv_heads, -1, head_dim)
    compute = torch.promote_types(query.dtype, torch.float32)
    if scaling_factors is not None:
        scaling_factors = scaling_factors.to(query.device, compute)
    hidden = None if sees_middle is None else ~sees_middle.to(query.device)
    arguments = (folded, key, value, context, layer, regions, scaling, scaling_factors, hidden)
    if torch.is_grad_enabled():
        # Its [N, W] scores are computed again in the backward pass, so that one layer's exist at a time.
        output, lse = checkpoint(
            _attend_to_the_rest, *arguments, use_reentrant=False, preserve_rng_state=False
        )
    else:
        output, lse = _attend_to_the_rest(*arguments)
    if regions.middle_stop > regions.middle_start:
        scaled = folded if scaling_factors is None else folded.to(compute) * scaling_factors[:, None]
        output = _AddMiddle.apply(  # type: ignore[no-untyped-call]
            scaled, output, lse, context, layer, regions, scaling, hidden
        )
    result: Tensor = output.view(batch, num_heads, num_queries, head_dim).transpose(1, 2).to(query.dtype)
    return result


def _attend_to_the_rest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: StoredContext,
    layer: int,
    regions: Regions,
    scaling: float,
    scaling_factors: Tensor | None,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The second part: output [1, H_kv, G·N, D] and log-sum-exp [1, H_kv, G·N]; every query sees itself."""
    compute = torch.promote_types(query.dtype, torch.float32)
    sink = context.load(layer, 0, regions.middle_start)
    recent = context.load(layer, regions.middle_stop, context.num_tokens)
    keys, values = (
        torch.cat([*parts], dim=2).to(compute) for parts in zip(sink, recent, (key, value), strict=True)
    )
    query = query.to(compute) * scaling
    num_queries, num_keys = regions.seen.shape
    by_head = (*query.shape[:2], -1, num_queries, num_keys)
    scores = (query @ keys.mT).view(by_head)
    if regions.full is not None:
        assert scaling_factors is not None
        scaled = ((query * scaling_factors[:, None]) @ keys.mT).view(by_head)
        if hidden is not None:
            scaled = scaled.masked_fill(hidden[:, None, None, None], float("-inf"))
        scores = torch.where(regions.full, scores, scaled)
    scores = scores.masked_fill(~regions.seen, float("-inf")).flatten(2, 3)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]) @ values, lse


class _AddMiddle(torch.autograd.Function):
    """Merges the middle into a split softmax, whose other part is given as output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        output: Tensor,
        lse: Tensor,
        context: StoredContext,
        layer: int,
        regions: Regions,
        scaling: float,
        hidden: Tensor | None,
    ) -> Tensor:
        span = (layer, regions.middle_start, regions.middle_stop)
        key, value = context.load(*span)
        fitting = query.to(key.dtype)
        middle, middle_lse = attend(fitting, key, value, scaling=scaling)
        if hidden is not None:
            middle_lse = middle_lse.masked_fill(hidden[:, None], float("-inf"))
        merged, merged_lse = merge((output, lse), (middle, middle_lse))
        ctx.save_for_backward(fitting, output, lse, merged, merged_lse, hidden)
        ctx.context, ctx.span, ctx.scaling, ctx.dtype = context, span, scaling, query.dtype
        return merged

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient = grad_outputs[0]
        query, output, lse, merged, merged_lse, hidden = ctx.saved_tensors
        share = torch.exp(lse - merged_lse)[..., None]
        to_output = gradient * share
        to_lse = (to_output * (output - merged)).sum(-1)
        if hidden is not None:
            # The kernels then find weights of zero, not those of keys that these heads never saw.
            merged_lse = merged_lse.masked_fill(hidden[:, None], float("inf"))
        key, value = ctx.context.load(*ctx.span)
        to_query = query_gradient(gradient, query, key, value, merged, merged_lse, scaling=ctx.scaling)
        return to_query.to(ctx.dtype), to_output, to_lse, None, None, None, None, None
