"""Multi-token attention over a pruned cache: turns of a conversation, chunks of input.

A channel that is pruned adds nothing to a score. So K with zeros in its place, and the new tokens behind, are
all that dense attention needs to give what the pruned cache means. Some rows are copied at a time, so that
little of a layer is held twice; by a kernel where there is one. On Hopper another kernel attends, which reads
of pruned tokens what is kept alone. Elsewhere torch's flash attention does, once for heads of width 0, which
see whole tokens alone, and once for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

from .decode_kernels_leank import DecodeKernels
from .kernel_key_leank import KERNEL_DTYPES
from .layout_leank import head_index
from .parts_leank import load_part
from .step_leank import Append
from .store_leank import ChunkStore
from .stored_leank import StoredRow

# Tokens that are copied at once: 1 GB of K and V of eight heads in half precision.
_MAX_TOKENS = 1 << 18


def attend_turn(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    store: ChunkStore,
    append: Append,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
    kernels: DecodeKernels | None = None,
) -> torch.Tensor:
    """Attend to what is stored, and causally to new tokens that are not stored yet: `[B, H, d, D]`.

    Queries are `[B, H, d, D]`; keys and values of the same tokens, as they will be stored, `[B, H_kv, d, D]`.
    Logits of attention sinks are `[H]`. `kernels` copy rows; None is plain torch. The result is zero for
    padding.
    """
    assert append.columns is not None
    layout, memory, stored, new_valid = store.layout, store.tensors, append.columns.spans, append.valid
    dtype = torch.promote_types(query.dtype, new_keys.dtype)
    grouped = query.to(dtype).view(query.shape[0], len(layout.widths), -1, *query.shape[2:])
    output = torch.zeros_like(grouped)  # [B, H_kv, G, d, D]
    for rows in _alike(stored, new_valid):
        real = slice(None) if new_valid is None else new_valid[rows.start].nonzero()[:, 0]
        columns, keys, values = (
            states[rows].to(dtype)[..., real, :] for states in (grouped, new_keys, new_values)
        )
        if not columns.shape[3]:
            continue
        length, pruned = stored[rows.start]
        first = StoredRow(memory, layout, rows.start, length, pruned, append.sink_size)
        beside = None
        if sinks is not None:
            own = memory.constants.take(torch.arange(rows.start, rows.stop, device=query.device))
            beside = load_part("sinks").sinks_beside(
                columns.flatten(1, 2), sinks, own.key_mean, softmax_scale
            )
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "sinks": beside}
        if kernels is not None and kernels.attends_turns:
            attended = kernels.attend_turn(columns.flatten(1, 2), keys, values, first, **options)
        else:
            attended = _attend_by_torch(first, columns, keys, values, kernels, **options)
        output[rows][..., real, :] = attended.view(columns.shape)
    return output.flatten(1, 2).to(query.dtype)


def _alike(stored: Sequence[tuple[int, int]], new_valid: torch.Tensor | None) -> Iterator[slice]:
    """Yield rows that attend at once: neighbours with equally many tokens, every row alone with padding."""
    start = 0
    for stop in range(1, len(stored) + 1):
        ends = stop == len(stored) or new_valid is not None or stored[stop] != stored[start]
        if ends or (stop + 1 - start) * stored[start][0] > _MAX_TOKENS:
            yield slice(start, stop)
            start = stop


def _attend_by_torch(
    first: StoredRow,
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    kernels: DecodeKernels | None,
    *,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with queries `[R, H_kv, G, d, D]` to what R rows hold, as many as the first, and to new tokens.

    New keys and values are `[R, H_kv, d, D]`, sinks as `sinks_beside` gives them, `[R or 1, H, d or 1]`.
    """
    attended, layout = torch.empty_like(query), first.layout
    if sinks is not None:
        sinks = sinks.view(len(sinks), query.shape[1], -1, sinks.shape[2])
    for heads in filter(None, (layout.value_heads, layout.window_heads)):
        select = head_index(heads)
        if kernels is not None and heads is layout.value_heads:
            keys, values = kernels.copy_rows(first, new_keys, new_values)
        else:
            cached = (replace(first, row=first.row + place) for place in range(len(query)))
            of_window = heads is layout.window_heads
            rows = zip(*(row.dense(new_keys.dtype, window_alone=of_window) for row in cached), strict=True)
            keys, values = (
                torch.cat([torch.stack(held)[:, :, select], new[:, select].transpose(1, 2)], dim=1)
                for held, new in zip(rows, (new_keys, new_values), strict=True)
            )
        own_sinks = None if sinks is None else sinks[:, select].flatten(1, 2)
        attended[:, select] = _attend(query[:, select], keys, values, softmax_scale, own_sinks)
    return attended


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with the last tokens `[R, H_kv, G, d, D]` to tokens `[R, n, H_kv, D]` and sinks, causally.

    Sinks are as `sinks_beside` gives them, `[R or 1, H, d or 1]`.
    """
    states = query.flatten(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    if sinks is not None:
        states = load_part("sinks").add_sink_token(*states, sinks, softmax_scale)
    num_new, num_tokens = query.shape[3], states[1].shape[2]
    if query.is_cuda and query.dtype in KERNEL_DTYPES:  # a form that flash attention knows
        mask: torch.Tensor = causal_lower_right(num_new, num_tokens)
    else:
        mask = torch.ones(num_new, num_tokens, dtype=torch.bool, device=query.device)
        mask = mask.tril(num_tokens - num_new)
    attend = torch.nn.functional.scaled_dot_product_attention
    attended = attend(*states, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
    return attended[..., : query.shape[4]].reshape(query.shape)
