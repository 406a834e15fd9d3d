"""Decode attention of one step: exact, what it reads, over a pruned cache, and by dense peers.

Exact attention is written from the definition, on dense keys and values, so it shares no code with the
runtime: a pruned token's key counts in its kept channels alone, and a head of width 0 does not see it at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from leank_convert._runtime.layout_leank import ChunkLayout
from leank_convert._runtime.turns_leank import attend_turn
from leank_convert.errors import LeanKError
from leank_convert.windows import Windows

Attend = Callable[[], Tensor]
# Takes query `[B, H, d, D]`, keys and values `[B, H_kv, S, D]`; returns a call that attends `[B, H, d, D]`.
# The query's d tokens are the last of S.
Prepare = Callable[[Tensor, Tensor, Tensor], Attend]

# An implementation may be this many times as far from the exact result as torch is in the same dtype.
TOLERANCE = 2.0
# The precision that results are held to.
EXACT = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_MAX_CHECKED_ROWS = 16


def finite(value: float) -> float | None:
    """The value as JSON has it, None for NaN and infinity."""
    return value if math.isfinite(value) else None


def judge(error: float, torch_error: float) -> dict[str, Any]:
    """An error, ‖result - exact‖ / ‖exact‖, beside torch's own in that dtype; a NaN is not ok."""
    ok = error <= TOLERANCE * torch_error
    return {"error": finite(error), "torch_error": finite(torch_error), "tolerance": TOLERANCE, "ok": ok}


def relative_error(result: Tensor, exact: Tensor) -> float:
    """‖result - exact‖ / ‖exact‖ in the precision of `exact`."""
    return float((result.to(exact) - exact).norm() / exact.norm())


@dataclass(frozen=True)
class AttentionTruth:
    """Exact attention `[rows, H, d, D]` of the rows in `rows`, and torch's own error in the inputs' dtype."""

    rows: Tensor
    output: Tensor
    torch_error: float

    def check(self, attend: Attend, query: Tensor) -> dict[str, Any]:
        """Hold a call's result for all rows `[B, H, d, D]` to this; what it does not write does not pass."""
        poison = [torch.full_like(query, float("nan")) for _ in range(4)]
        del poison  # the allocator gives such memory out again first
        return judge(relative_error(attend()[self.rows], self.output), self.torch_error)


class Pruning(NamedTuple):
    """What is pruned of a layer."""

    channel_mask: Tensor  # kept channels [H_kv, D]
    sink_size: int
    num_tokens: int  # behind the sink, that are pruned
    value_widths: Sequence[int] | None = None  # of V heads keep so many channels, the first; None: all


def attend_exactly(query: Tensor, keys: Tensor, values: Tensor, pruning: Pruning) -> AttentionTruth:
    """Work out attention over a pruned cache from dense keys and values, in higher precision.

    Query is `[B, H, d, D]`, of the last d tokens, keys and values `[B, H_kv, S, D]`.
    """
    # First and last row are always among them.
    count = min(query.shape[0], _MAX_CHECKED_ROWS)
    rows = torch.linspace(0, query.shape[0] - 1, count).round().long().to(query.device)
    exact, own = [], []
    for row in rows.tolist():
        q, k, v = (tensor[row : row + 1] for tensor in (query, keys, values))
        own.append(attend_row(q, k, v, pruning))
        q, k, v = (tensor.to(EXACT[query.dtype]) for tensor in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            exact.append(attend_row(q, k, v, pruning))
    output = torch.cat(exact)
    return AttentionTruth(rows, output, relative_error(torch.cat(own), output))


def attend_row(query: Tensor, keys: Tensor, values: Tensor, pruning: Pruning) -> Tensor:
    """Attention of one row, heads that see pruned tokens and heads that do not apart."""
    channel_mask, sink_size, num_pruned, value_widths = pruning
    queries = query.view(1, keys.shape[1], -1, query.shape[-1])  # [1, H_kv, G * d, D]: queries are rows
    num_new, per_head = query.shape[2], query.shape[1] // keys.shape[1]
    out, pruned = torch.empty_like(queries), slice(sink_size, sink_size + num_pruned)
    cut, cut_values = keys.clone(), values.clone()
    cut[:, :, pruned] *= channel_mask[:, None]
    if value_widths is not None:
        stays = torch.arange(out.shape[-1]) < torch.tensor(value_widths)[:, None]
        cut_values[:, :, pruned] *= stays[:, None].to(out.device)
    window, seeing = torch.ones(keys.shape[2], dtype=torch.bool), channel_mask.any(-1)
    window[pruned] = False
    for heads, tokens in ((seeing, slice(None)), (~seeing, window)):
        if heads.any():
            own, own_values = cut[:, heads][:, :, tokens], cut_values[:, heads][:, :, tokens]
            mask = causal_mask(num_new, own, per_head)
            out[:, heads] = functional.scaled_dot_product_attention(queries[:, heads], own, own_values, mask)
    return out.view_as(query)


def causal_mask(num_new: int, keys: Tensor, per_head: int = 1) -> Tensor | None:
    """What the last tokens of keys `[B, H_kv, S, D]` see of them, `per_head` times `[d, S]`; None: all."""
    if num_new == 1:
        return None
    num_tokens = keys.shape[2]
    mask = torch.ones(num_new, num_tokens, dtype=torch.bool, device=keys.device)
    return mask.tril(num_tokens - num_new).repeat(per_head, 1)


def pruned_length(num_tokens: int, windows: Windows, num_new: int = 1) -> int:
    """Pruned tokens that the last of `num_tokens` see, where a row was prefilled with all before these.

    A single one never makes the recent window overflow: a flush takes one token or more. Several see the
    cache as it was.
    """
    return max(num_tokens - num_new - windows.sink_size - windows.recent_size, 0)


def count_attention_bytes(
    layout: ChunkLayout, tokens: int, pruned: int, element_bytes: int
) -> dict[str, int]:
    """Count what decode attention of a layer has to read, each byte once, by the cache's regions.

    Of all rows' `tokens` so many are `pruned`. What is read of a head is padded to chunks of channels.
    """
    whole, key, value = tokens - pruned, layout.chunk_size * element_bytes, layout.value_chunk * element_bytes
    return {
        "kept_keys": tokens * layout.num_kept_chunks * key,
        "kept_values": tokens * sum(layout.kept_values) * value,
        "window_keys": whole * layout.num_dropped_chunks * key,
        "window_values": whole * sum(layout.dropped_values) * value,
    }


def fill_layer(cache: Any, layer: int, keys: Tensor, values: Tensor) -> None:
    """Put a whole prompt, `[B, H_kv, S, D]` each, into one layer of a cache that prunes eagerly."""
    filled, num_tokens = cache.layers[layer], keys.shape[2]
    filled.lazy_initialization(keys, values)
    step = cache.rows.step(0, len(keys), num_tokens, None, keys.device)
    filled.extend_pending(keys, values)
    filled.num_columns = num_tokens
    filled.split(step)


class FilledLayer:
    """One layer of a LeanK model's cache after a prompt of all tokens but the last d, and those behind it.

    Query is `[B, H, d, D]`, of these, keys and values of all tokens are `[B, H_kv, S, D]`. More than kernels
    decode at once are not stored: they attend before they would be.
    """

    def __init__(self, model: Any, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        self.cache, num_new = model.build_cache("eager"), query.shape[2]
        fill_layer(self.cache, layer, keys[:, :, :-num_new], values[:, :, :-num_new])
        filled, scale = self.cache.layers[layer], query.shape[3] ** -0.5
        self._store = filled.store
        new = keys[:, :, -num_new:], values[:, :, -num_new:]
        step = self.cache.rows.step(filled.num_columns, len(query), num_new, None, query.device)
        if self.cache.takes_step(num_new):
            filled.decode(query, *new, step, scale)
            self._attend = partial(filled.attend, query, step.append, scale)
        else:
            given = query, *self.as_stored(*new), filled.store, step.append, scale, None
            self._attend = partial(attend_turn, *given, filled.kernels_for(query[:, :, :1]))

    def as_stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the cache gives them back: how far it rounds them is no fault of attention's.

        Keys lack their mean where the cache takes one off, all of them.
        """
        rounded: tuple[Tensor, Tensor] = self._store.tensors.rounded(keys, values, self._store.layout)
        return rounded

    def attend(self) -> Tensor:
        """Attention of the new tokens over all of them `[B, H, d, D]`; changes nothing."""
        out: Tensor = self._attend()
        return out


def _prepare_sdpa(backend: SDPBackend | None, query: Tensor, keys: Tensor, values: Tensor) -> Attend:
    num_new = query.shape[2]
    mask = causal_mask(num_new, keys)
    if mask is not None and query.is_cuda:  # a form that flash attention knows
        mask = causal_lower_right(num_new, keys.shape[2])

    def attend() -> Tensor:
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

    return attend


OWN_DENSE = "leank-all-channels"
# Those that are called for several new tokens too.
CAUSAL_PEERS = (OWN_DENSE, "sdpa-flash", "sdpa")
PEERS: Mapping[str, Prepare] = {
    "sdpa-cudnn": partial(_prepare_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": partial(_prepare_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa": partial(_prepare_sdpa, None),
}


def read_peers(names: str, known: Collection[str]) -> tuple[str, ...]:
    """Read a list of names between commas, `none` for no peers; LeanKError if one is unknown."""
    chosen = () if names == "none" else tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in known:
            hint = "known: " + ", ".join(f"`{peer}`" for peer in known)
            raise LeanKError(f"there is no peer `{name}`", hint=hint)
    return chosen
