"""Differentiable attention of tokens that follow a stored context, never [N, H, S] at once.

The softmax is split in two. Keys that every query treats alike, the middle of the context, go through a
fused kernel that keeps nothing but output and log-sum-exp. All others (sink, recent window, the border
between them, the questions' own tokens) are few and go through plain torch, which may mask and scale each
pair by itself. Both are merged by their log-sum-exps. Keys and values of the middle are neither copied nor
repeated: the G query heads of a KV head are folded into the queries, and the scaling factors go onto the
query, whose product with a key is the same. Letters as in `attention`; W keys of the second part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from leank_convert.train.fused import attend, query_gradient
from leank_convert.train.packing import PackedSample
from leank_convert.train.windowed import of_queries
from leank_convert.windows import Windows

Pair = tuple[Tensor, Tensor]


@dataclass
class StoredContext:
    """Keys and values after RoPE of a context and of questions asked on it; states of linear attention."""

    num_tokens: int  # P, tokens of the context
    offload: bool = False  # whether they wait in host memory, pinned where there is a GPU
    num_seen: int = 0  # tokens of earlier blocks, while the context is filled block by block
    # What comes off all keys of layers with full attention, and off those of what follows the context,
    # float32 [L, H_kv, D]; None for nothing.
    key_mean: Tensor | None = None
    # Per layer, keys and values of the questions' own tokens [1, H_kv, T, D], answers excluded.
    questions: dict[int, Pair] = field(default_factory=dict)
    # What layers with linear attention hold at the context's end, None before it is run.
    states: Cache | None = None
    # Per such layer, what the questions' own tokens put in [1, T, hidden_size].
    inputs: dict[int, Tensor] = field(default_factory=dict)
    _pairs: dict[int, Pair] = field(default_factory=dict)
    # Block by block: only whole tensors are copied between host and device without a detour.
    _offloaded: dict[int, list[Pair]] = field(default_factory=dict)
    _devices: dict[int, torch.device] = field(default_factory=dict)

    def first(self, num_tokens: int) -> StoredContext:
        """The first tokens, in the same memory."""
        view = StoredContext(num_tokens, key_mean=self.key_mean)
        for layer in self._pairs:
            view._pairs[layer] = self.load(layer, num_tokens)
        return view

    def clear(self, start: int) -> None:
        """Zero what lies from a token on."""
        for pair in self._pairs.values():
            for kept in pair:
                kept[:, :, start:].zero_()

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep one block [1, H_kv, N, D], tokens `num_seen` … `num_seen + N`."""
        start, stop = self.num_seen, self.num_seen + key.shape[2]
        if self.offload:
            self._devices[layer] = key.device
            self._offloaded.setdefault(layer, []).append((_to_host(key), _to_host(value)))
            return
        if layer not in self._pairs:
            if stop == self.num_tokens:
                self._pairs[layer] = key, value
                return
            shape = (*key.shape[:2], self.num_tokens, key.shape[3])
            self._pairs[layer] = key.new_empty(shape), value.new_empty(shape)
        for kept, new in zip(self._pairs[layer], (key, value), strict=True):
            kept[:, :, start:stop] = new

    def load(self, layer: int, stop: int | None = None) -> Pair:
        """Keys and values of the tokens before `stop`, an end of a block [1, H_kv, stop, D]; None for all."""
        if not self.offload:
            key, value = (kept[:, :, :stop] for kept in self._pairs[layer])
            return key, value
        device = self._devices[layer]
        blocks = self._offloaded[layer]
        if stop is not None:
            ends = accumulate(block[0].shape[2] for block in blocks)
            blocks = [block for block, end in zip(blocks, ends, strict=True) if end <= stop]
        keys = torch.cat([block[0].to(device, non_blocking=True) for block in blocks], dim=2)
        values = torch.cat([block[1].to(device, non_blocking=True) for block in blocks], dim=2)
        return keys, values


def _to_host(tensor: Tensor) -> Tensor:
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return kept.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class Regions:
    """Which of the two parts a key belongs to, and how a query sees those of the second.

    The second part's keys are, in this order, context tokens before `middle_start`, context tokens from
    `middle_stop` on, and the tokens that follow the context.
    """

    middle_start: int  # first context token of the middle
    middle_stop: int  # end of the middle
    seen: Tensor  # which queries see which keys of the second part, bool [N, W]
    full: Tensor | None  # where a query sees a key with every channel, bool [N, W]; None for everywhere
    first: int = 0  # context tokens before it are seen by no query, and left out of all other numbers here


@dataclass(frozen=True)
class Student:
    """What the answers are computed with."""

    windows: Windows  # sink and recent window
    scaling_factors: Tensor  # stage 1's factors, or stage 2's zeros and ones [L, H_kv, D]
    # Bool [L, H_kv]: False for a head without channels, whose middle is at minus infinity. In stage 1 every
    # head sees it: factors of 0 still leave logits of 0.
    sees_middle: Tensor
    # DuoAttention's, float [L, H_kv]: a head's output is g times what it is otherwise, and 1 - g times what
    # it is without the middle; None for no such mixture.
    gates: Tensor | None = None
    # A pruned token's V has its directions, the columns of a basis [L, H_kv, D, D], each times a factor
    # [L, H_kv, D]; None for all of V, as while channels of K are learned.
    value_basis: Tensor | None = None
    value_factors: Tensor | None = None

    def of_layer(self, place: int) -> Student:
        """What one layer's answers are computed with, from its place among those with full attention."""
        tensors = ((name, part) for name, part in vars(self).items() if isinstance(part, Tensor))
        own: dict[str, Any] = {name: part[place] for name, part in tensors}
        return replace(self, **own)

    @property
    def learned(self) -> Tensor:
        """The gates of heads where there are any, else the factors of V's directions, else those of K."""
        if self.gates is not None:
            return self.gates
        return self.scaling_factors if self.value_factors is None else self.value_factors


def plan_regions(
    packed: PackedSample,
    num_queries: int,
    windows: Windows | None,
    device: torch.device,
    sliding_window: int | None = None,
) -> Regions:
    """Find out how the last tokens of some packed questions see everything.

    A query at position p sees the context and its own question's tokens up to p, with every channel where
    j < sink_size or j >= p - recent_size. Of a padded sample, the border of the middle lies where it is right
    for the shortest context of its size. The queries are the last N of the tokens that follow the context;
    without windows attention is dense. In layers with a `sliding_window`, which have no windows, a query sees
    so many tokens, itself among them.
    """
    num_context, num_real = packed.sizes.context, packed.num_real
    start, stop = 0, packed.sizes.least_context
    if windows is not None:
        first = stop if num_real is not None else int(packed.positions[-num_queries:].min())
        start = min(windows.sink_size, num_context)
        stop = min(max(first - windows.recent_size, start), num_context)
    if sliding_window is not None:
        stop = max(stop - sliding_window + 1, 0)
    key_positions, key_owners = (t.to(device, non_blocking=True) for t in (packed.positions, packed.owners))
    positions, owners = key_positions[-num_queries:, None], key_owners[-num_queries:, None]
    context = torch.cat([torch.arange(start, device=device), torch.arange(stop, num_context, device=device)])
    own = (key_owners == owners) & (key_positions <= positions)
    real = torch.ones_like(context, dtype=torch.bool)
    if num_real is not None:
        real = context < num_real.to(device)
    seen = torch.cat([real.expand(num_queries, -1), own], dim=1)
    j = torch.cat([context, key_positions])
    if sliding_window is not None:
        return Regions(0, 0, seen & (j > positions - sliding_window), None, stop)
    if windows is None:
        return Regions(start, stop, seen, None)
    return Regions(start, stop, seen, (j < windows.sink_size) | (j >= positions - windows.recent_size))


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stored: Callable[[], Pair],
    regions: Regions,
    scaling: float,
    student: Student | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [1, N, H, D] of queries [1, H, N, D] over a layer's stored context and T tokens after it.

    Their keys and values are [1, H_kv, T, D]. The logit is `scaling * q·k` where `regions` say full, and
    `scaling * (q ⊙ scaling_factors)·k` elsewhere, with this layer's part of a student; heads that do not see
    the middle are False in its `sees_middle` [H_kv]. Sinks' logits, [H] or [1, H, N] for every query, take
    their share of the softmax. Where `regions` do not say full, V has each of its directions, the columns of
    `value_basis` [H_kv, D, D], times a factor of `value_factors` [H_kv, D]. Gradients reach all but the
    basis.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    folded = query.reshape(batch, key.shape[1], -1, head_dim)
    scaled = hidden = basis = factors = None
    if student is not None:
        compute = torch.promote_types(query.dtype, torch.float32)
        scaled = folded.to(compute) * student.scaling_factors.to(query.device, compute)[:, None]
        hidden = ~student.sees_middle.to(query.device)
        if student.value_basis is not None and student.value_factors is not None:
            both = student.value_basis, student.value_factors
            basis, factors = (part.to(query.device, compute) for part in both)
    if sinks is not None:
        sinks = of_queries(sinks, num_queries).reshape(batch, key.shape[1], -1)
    output: Tensor = _SplitAttention.apply(  # type: ignore[no-untyped-call]
        *(folded, scaled, key, value, stored, regions, scaling, hidden, sinks, basis, factors)
    )
    return output.view(batch, num_heads, num_queries, head_dim).transpose(1, 2).to(query.dtype)


class _SplitAttention(torch.autograd.Function):
    """Keeps queries, output and log-sum-exp; the backward pass computes all scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        scaled: Tensor | None,
        key: Tensor,
        value: Tensor,
        load: Callable[[], Pair],
        regions: Regions,
        scaling: float,
        hidden: Tensor | None,
        sinks: Tensor | None,
        basis: Tensor | None,
        factors: Tensor | None,
    ) -> Tensor:
        parts = _Parts(load, key, value, regions, query.dtype)
        scores = parts.scores(query, scaled, scaling, hidden)
        lse = scores.logsumexp(-1)
        middle = None
        if regions.middle_stop > regions.middle_start:
            fitting = (query if scaled is None else scaled).to(key.dtype)
            middle, middle_lse = attend(fitting, *parts.middle, scaling=scaling)
            if hidden is not None:
                middle_lse = middle_lse.masked_fill(hidden[:, None], float("-inf"))
            lse = torch.logaddexp(lse, middle_lse)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        weights = scores.sub_(lse[..., None]).exp_()
        directions = None
        if factors is None:
            output = weights @ parts.values
            if middle is not None:
                output += middle * torch.exp(middle_lse - lse)[..., None]
        else:
            assert basis is not None
            full = parts.where_full(weights, 0.0)
            output, pruned = full @ parts.values, weights.sub_(full) @ parts.values
            if middle is not None:
                pruned += middle * torch.exp(middle_lse - lse)[..., None]
            directions = pruned @ basis
            output += (directions * factors[:, None]) @ basis.mT
        ctx.save_for_backward(
            query, scaled, key, value, output, lse, hidden, sinks, basis, factors, directions
        )
        ctx.load, ctx.regions, ctx.scaling = load, regions, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient = grad_outputs[0]
        query, scaled, key, value, output, lse, hidden, sinks, basis, factors, directions = ctx.saved_tensors
        regions: Regions = ctx.regions
        scaling: float = ctx.scaling
        parts = _Parts(ctx.load, key, value, regions, query.dtype)
        weights = parts.scores(query, scaled, scaling, hidden).sub_(lse[..., None]).exp_()
        own = slice(parts.keys.shape[2] - key.shape[2], None)
        mean = (gradient * output).sum(-1, keepdim=True)
        to_weights, to_factors, to_pruned = gradient @ parts.values.mT, None, gradient
        if factors is None:
            to_value = weights[..., own].mT @ gradient
        else:
            to_directions = gradient @ basis
            to_factors = (directions * to_directions).sum((0, 2))
            to_pruned = (to_directions * factors[:, None]) @ basis.mT
            full = parts.where_full(weights, 0.0)
            to_value = full[..., own].mT @ gradient + (weights - full)[..., own].mT @ to_pruned
            to_weights = parts.where_full(to_weights, to_pruned @ parts.values.mT)
        to_sinks = None
        if ctx.needs_input_grad[-3]:
            to_sinks = (torch.exp(sinks - lse) * -mean[..., 0]).to(sinks.dtype)  # its value is zero
        to_scores = weights.mul_(to_weights.sub_(mean)).mul_(scaling)
        to_scaled = None
        if scaled is None:
            to_query = to_scores @ parts.keys
            to_key = to_scores[..., own].mT @ query.to(to_scores.dtype)
        else:
            to_full = parts.where_full(to_scores, 0.0)
            to_middle = to_scores.sub_(to_full)
            to_query, to_scaled = to_full @ parts.keys, to_middle @ parts.keys
            to_key = to_full[..., own].mT @ query.to(to_full.dtype) + to_middle[..., own].mT @ scaled
        if regions.middle_stop > regions.middle_start:
            if hidden is not None:
                # Weights are then zero, not those of keys that these heads never saw.
                lse = lse.masked_fill(hidden[:, None], float("inf"))
            fitting = (query if scaled is None else scaled).to(key.dtype)
            keys, values = parts.middle
            share = query_gradient(to_pruned, fitting, keys, values, mean, lse, scaling=scaling)
            if to_scaled is None:
                to_query += share
            else:
                to_scaled += share
        return (
            to_query.to(query.dtype),
            to_scaled,
            to_key.to(key.dtype),
            to_value.to(value.dtype),
            *(None,) * 4,
            to_sinks,
            None,
            to_factors,
        )


class _Parts:
    """Both parts: the middle as it is stored, the second [1, H_kv, W, D] at least in float32."""

    def __init__(
        self, load: Callable[[], Pair], key: Tensor, value: Tensor, regions: Regions, dtype: torch.dtype
    ) -> None:
        self._compute = torch.promote_types(dtype, torch.float32)
        # Of a model that is spread over devices, a layer may lie elsewhere than the first.
        self._seen = regions.seen.to(key.device)
        self._full = None if regions.full is None else regions.full.to(key.device)
        stored = [kept[:, :, regions.first :] for kept in load()]
        self.middle = [kept[:, :, regions.middle_start : regions.middle_stop] for kept in stored]
        self.keys, self.values = (
            torch.cat([kept[:, :, : regions.middle_start], kept[:, :, regions.middle_stop :], own], dim=2).to(
                self._compute
            )
            for kept, own in zip(stored, (key, value), strict=True)
        )

    def scores(self, query: Tensor, scaled: Tensor | None, scaling: float, hidden: Tensor | None) -> Tensor:
        """Logits [1, H_kv, G·N, W], minus infinity where nothing is seen; every query sees itself."""
        scores = (query.to(self._compute) * scaling) @ self.keys.mT
        if scaled is not None and hidden is not None:  # a student's
            middle = (scaled * scaling) @ self.keys.mT
            middle.masked_fill_(hidden[:, None, None], float("-inf"))
            scores = self.where_full(scores, middle)
        return self._by_head(scores).masked_fill_(~self._seen, float("-inf")).flatten(2, 3)

    def where_full(self, scores: Tensor, other: Tensor | float) -> Tensor:
        """The scores where a query sees every channel, and others elsewhere [1, H_kv, G·N, W]."""
        assert self._full is not None
        elsewhere = self._by_head(other) if isinstance(other, Tensor) else other
        return torch.where(self._full, self._by_head(scores), elsewhere).flatten(2, 3)

    def _by_head(self, scores: Tensor) -> Tensor:
        return scores.unflatten(2, (-1, self._seen.shape[0]))  # type: ignore[no-untyped-call, no-any-return]
