"""Decode attention over the pruned cache in plain torch: the CPU path, and what the kernel is held to.

Scores are taken chunk by chunk from the append-only store, the dropped channels' share is added to the
tokens that the window buffer holds, and one softmax in fp32 runs over all of it. See README.md for the maths.
"""

from __future__ import annotations

import torch

from .layout_leank import ChunkLayout, StoreTensors, gather_lanes
from .step_leank import StoredView, stored_view

# Queries are cut into blocks whose scores stay under this many numbers (256 MB of fp32).
_MAX_SCORES = 1 << 26


def decode_attention(
    query: torch.Tensor,
    store: StoreTensors,
    lengths: torch.Tensor,
    pruned_lengths: torch.Tensor,
    *,
    layout: ChunkLayout,
    sink_size: int,
    num_slots: int,
    max_length: int,
    softmax_scale: float,
    new_keys: torch.Tensor | None = None,
    new_values: torch.Tensor | None = None,
    new_valid: torch.Tensor | None = None,
    view: StoredView | None = None,
) -> torch.Tensor:
    """Attend to sink, pruned and recent tokens, and to new tokens where given.

    Memory beyond `lengths` must be finite, its value does not matter. A row of length 0 gets finite
    numbers without meaning.

    Args:
        query: `[B, H, Q, D]`. Without new keys every query sees all `lengths` tokens.
        store: What is stored; its `head_table` is not looked at.
        lengths: Stored tokens per row `[B]`.
        pruned_lengths: Pruned ones among them `[B]`.
        layout: How the layer's channels are cut into chunks.
        sink_size: Sink slots of the window; its other slots are the ring.
        num_slots: All its slots; those that no row has reached need not be there.
        max_length: Upper bound of `lengths`, known to the host.
        softmax_scale: Factor on the logits.
        new_keys: Keys of the query tokens themselves, not stored yet, all channels `[B, H_kv, Q, D]`:
            query i sees new tokens 0 … i at full width. Zero where `new_valid` is False.
        new_values: Their V `[B, H_kv, Q, D]`.
        new_valid: Real tokens among them `[B, Q]`; None without padding.
        view: `stored_view` of these lengths, where it is at hand.

    Returns:
        `[B, H, Q, D]` in the dtype of `query`.
    """
    batch_size, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = len(layout.widths)
    num_groups = num_heads // num_kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)

    stored_k = store.kept_keys[:, :, :max_length].to(dtype).transpose(-1, -2)
    stored_v = store.values[:, :, :max_length].to(dtype)
    if view is None:
        view = stored_view(lengths, pruned_lengths, sink_size, num_slots, max_length)
    hidden_slots, slot_tokens = view.hidden_slots, view.slot_tokens
    num_reached = hidden_slots.shape[-1]
    window_k = store.window_keys[:, :, :num_reached].to(dtype).transpose(-1, -2)
    window_v = store.window_values[:, :, :num_reached].to(dtype)

    scaled = query.to(dtype).view(batch_size, num_kv_heads, num_groups, num_queries, head_dim) * softmax_scale
    columns = scaled.permute(0, 2, 3, 1, 4).reshape(batch_size, num_groups * num_queries, -1)
    chunks = (
        gather_lanes(columns, store.chunk_index)
        .transpose(1, 2)
        .contiguous()
        .view(batch_size, layout.num_kept_chunks + layout.num_dropped_chunks, num_groups, num_queries, -1)
    )

    num_seen = max_length + (0 if new_keys is None else num_queries)
    rows_per_query = batch_size * max(chunks.shape[1], num_kv_heads) * num_groups * num_seen
    block_size = max(1, _MAX_SCORES // max(rows_per_query, 1))
    blocks = []
    for start in range(0, num_queries, block_size):
        stop = min(start + block_size, num_queries)
        block = chunks[:, :, :, start:stop].flatten(2, 3)  # [B, C + C_dropped, G * q, E]
        kept, dropped = block[:, : layout.num_kept_chunks], block[:, layout.num_kept_chunks :]
        window_scores = _sum_chunks(dropped @ window_k, layout, kept=False)
        scores = _sum_chunks(kept @ stored_k, layout, kept=True)
        window_scores = window_scores.masked_fill(hidden_slots, 0)
        if layout.num_dropped_chunks and layout.value_heads:
            share = window_scores[:, _head_index(layout.value_heads, num_kv_heads)]
            scores.scatter_add_(3, slot_tokens.expand_as(share), share)
        lowest = torch.finfo(dtype).min
        scores = scores.masked_fill(view.hidden_tokens, lowest)
        window_scores = window_scores.masked_fill(hidden_slots, lowest)
        new_scores = None
        if new_keys is not None:
            new_scores = _new_scores(scaled[:, :, :, start:stop], new_keys, new_valid, start)
        attended = _attend_regions(layout, scores, stored_v, window_scores, window_v, new_scores, new_values)
        blocks.append(attended.view(batch_size, num_kv_heads, num_groups, stop - start, head_dim))
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=3)  # [B, H_kv, G, Q, D]
    return out.flatten(1, 2).to(query.dtype)


def _sum_chunks(partial: torch.Tensor, layout: ChunkLayout, *, kept: bool) -> torch.Tensor:
    """Add up each head's chunks: `[B, chunks, …]` to `[B, heads, …]`.

    Heads without kept chunks are left out of the result for kept chunks; heads without dropped chunks
    stay in the result for dropped ones, as zeros.
    """
    batch_size = partial.shape[0]
    parts = []
    for bucket in layout.buckets:
        start, stop = bucket.kept if kept else bucket.dropped
        per_head = bucket.kept_per_head if kept else bucket.dropped_per_head
        if per_head:
            chunks = partial[:, start:stop]
            parts.append(chunks.view(batch_size, bucket.num_heads, per_head, *partial.shape[2:]).sum(2))
        elif not kept:
            parts.append(partial.new_zeros(batch_size, bucket.num_heads, *partial.shape[2:]))
    if not parts:
        return partial
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _head_index(heads: tuple[int, ...], num_heads: int) -> slice | list[int]:
    if len(heads) == num_heads:
        return slice(None)
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return slice(heads[0], heads[-1] + 1)
    return list(heads)


def _new_scores(
    query: torch.Tensor, new_keys: torch.Tensor, new_valid: torch.Tensor | None, first_query: int
) -> torch.Tensor:
    """Score new tokens against some of their queries: `[B, H_kv, G, q, D]` to `[B, H_kv, G * q, Q]`."""
    num_queries, num_new = query.shape[3], new_keys.shape[2]
    position = torch.arange(num_new, device=query.device)
    visible = position <= first_query + torch.arange(num_queries, device=query.device)[:, None]  # [q, Q]
    mask = visible[None, None, None]
    if new_valid is not None:
        mask = mask & new_valid[:, None, None, None, :]
    scores = query @ new_keys.to(query.dtype)[:, :, None].transpose(-1, -2)
    return scores.masked_fill(~mask, torch.finfo(query.dtype).min).flatten(2, 3)


def _attend_regions(
    layout: ChunkLayout,
    scores: torch.Tensor,
    stored_v: torch.Tensor,
    window_scores: torch.Tensor,
    window_v: torch.Tensor,
    new_scores: torch.Tensor | None,
    new_values: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax and weigh V, heads that see pruned tokens and heads of width 0 apart: `[B, H_kv, G * q, D]`."""
    num_heads = len(layout.widths)
    parts = []
    for heads, part_scores, part_v in (
        (layout.value_heads, scores, stored_v),
        (layout.window_heads, window_scores, window_v),
    ):
        if not heads:
            continue
        select = _head_index(heads, num_heads)
        if part_scores is window_scores:
            part_scores = part_scores[:, select]
        if new_scores is None or new_values is None:
            part = part_scores.softmax(-1) @ part_v
        else:
            num_stored = part_scores.shape[-1]
            weights = torch.cat([part_scores, new_scores[:, select]], dim=-1).softmax(-1)
            part = weights[..., :num_stored] @ part_v
            part += weights[..., num_stored:] @ new_values[:, select].to(part.dtype)
        parts.append((heads, select, part))
    if len(parts) == 1:
        return parts[0][2]
    sample = parts[0][2]
    out = sample.new_zeros(sample.shape[0], num_heads, *sample.shape[2:])
    for _, select, part in parts:
        out[:, select] = part
    return out
