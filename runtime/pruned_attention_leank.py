"""Decode attention in plain torch, the CPU path: of pruned tokens nothing is read but what is kept.

Scores are taken chunk by chunk from the pages, the dropped channels' share is added to the tokens that the
window holds, and one softmax in fp32 runs over all of it. See README.md for the maths.
"""

from __future__ import annotations

import functools
import itertools

import torch

from .layout_leank import ChunkLayout, gather_lanes, head_index
from .pages_leank import PageList
from .parts_leank import load_part
from .step_leank import StoredView
from .stored_leank import StoreTensors, value_index


def decode_attention(
    query: torch.Tensor,
    store: StoreTensors,
    view: StoredView,
    *,
    layout: ChunkLayout,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to sink, pruned and recent tokens with queries `[B, H, Q, D]`; sinks are `[H]`.

    Pages that hold no token must be finite if they are read, their values do not matter. A column that sees
    nothing gets finite numbers without meaning.
    """
    batch_size, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = len(layout.widths)
    num_groups = num_heads // num_kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)
    stored_k, stored_v = (_pages(store, name, view.kept, dtype) for name in ("kept_keys", "values"))
    window_k, window_v = (
        _pages(store, name, view.window, dtype) for name in ("window_keys", "window_values")
    )

    scaled = query.to(dtype).view(batch_size, num_kv_heads, num_groups, num_queries, head_dim) * softmax_scale
    if store.key_scale is not None:
        scaled = scaled * store.key_scale[:, :, None, None]
    columns = scaled.permute(0, 2, 3, 1, 4).reshape(batch_size, num_groups * num_queries, -1)
    chunks = (
        gather_lanes(columns, store.chunk_index)
        .transpose(1, 2)
        .contiguous()
        .view(batch_size, layout.num_kept_chunks + layout.num_dropped_chunks, num_groups, num_queries, -1)
    )

    columns = chunks.flatten(2, 3)  # [B, C + C_dropped, G * Q, E]
    if layout.has_padded_lanes:  # where a codec may store anything
        columns = columns.masked_fill((store.chunk_index < 0)[:, :, None], 0)
    kept, dropped = columns[:, : layout.num_kept_chunks], columns[:, layout.num_kept_chunks :]
    window_scores = _page_scores(dropped, window_k, view.window, layout, kept=False)
    scores = _page_scores(kept, stored_k, view.kept, layout, kept=True)
    hidden_tokens, hidden_places = (
        _of_columns(mask, num_groups) for mask in (view.hidden_tokens, view.hidden_places)
    )
    window_scores = window_scores.masked_fill(hidden_places, 0)
    if layout.num_dropped_chunks and layout.value_heads:
        share = window_scores[:, head_index(layout.value_heads)]
        scores.scatter_add_(3, view.place_tokens.expand_as(share), share)
    lowest = torch.finfo(dtype).min
    scores = scores.masked_fill(hidden_tokens, lowest)
    window_scores = window_scores.masked_fill(hidden_places, lowest)
    if sinks is not None:
        sinks = load_part("sinks").sinks_beside(query, sinks, store.key_mean, softmax_scale)
        sinks = sinks.expand(batch_size, -1, num_queries).reshape(batch_size, num_kv_heads, -1)
    attended = _attend_regions(layout, view, scores, stored_v, window_scores, window_v, hidden_places, sinks)
    if store.value_scale is not None:
        attended = attended * store.value_scale[:, :, None]
    return attended.view(batch_size, num_heads, num_queries, head_dim).to(query.dtype)


def _pages(store: StoreTensors, name: str, listed: PageList, dtype: torch.dtype) -> torch.Tensor:
    """Take pages of a pool `[N, chunks, P, E or F]`, as they lie if they lie in order."""
    pages = listed.pages
    if pages is None:
        return store.read(name, lambda pool: pool[: listed.count]).to(dtype)
    return store.read(name, lambda pool: pool.index_select(0, pages)).to(dtype)


def _of_columns(mask: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Bring a mask `[B, 1, 1, q, n]` to scores' `[B, 1, 1 or G * q, n]`."""
    return mask[:, 0] if mask.shape[3] == 1 else mask.expand(-1, -1, num_groups, -1, -1).flatten(2, 3)


def _page_scores(
    query: torch.Tensor, keys: torch.Tensor, listed: PageList, layout: ChunkLayout, *, kept: bool
) -> torch.Tensor:
    """Score `[B, chunks, G * Q, E]` against pages `[N, chunks, P, E]`: `[B, heads, G * Q, n * P]`."""
    if listed.rows is None:
        own = query[:, None].expand(-1, listed.count // query.shape[0], -1, -1, -1).flatten(0, 1)
    else:
        own = query.index_select(0, listed.rows)
    scores = _sum_chunks(own @ keys.transpose(-1, -2), layout, kept=kept)
    return _by_row(scores, listed, query.shape[0]).permute(0, 2, 3, 1, 4).flatten(3)


def _weigh(
    weights: torch.Tensor, values: torch.Tensor, listed: PageList, heads: tuple[int, ...]
) -> torch.Tensor:
    """Weigh pages `[N, chunks, P, F]` by `[B, H, G * Q, n * P]` of chunks' heads: `[B, chunks, G * Q, F]`."""
    batch_size, num_heads, num_queries, _ = weights.shape
    paged = weights.view(batch_size, num_heads, num_queries, -1, values.shape[2])
    paged = paged.permute(0, 3, 1, 2, 4).flatten(0, 1)[:, head_index(heads)]
    if listed.rows is None or listed.numbers is None:
        return _by_row(paged @ values, listed, batch_size).sum(1)
    parts = paged.index_select(0, listed.numbers) @ values
    return parts.new_zeros(batch_size, *parts.shape[1:]).index_add(0, listed.rows, parts)


def _by_row(parts: torch.Tensor, listed: PageList, batch_size: int) -> torch.Tensor:
    """Bring what pages have `[N, …]` to `[B, n, …]`, something finite beyond a row's pages."""
    if listed.entries is not None:
        parts = parts.index_select(0, listed.entries.flatten())
    return parts.view(batch_size, len(parts) // batch_size, *parts.shape[1:])


def _sum_chunks(partial: torch.Tensor, layout: ChunkLayout, *, kept: bool) -> torch.Tensor:
    """Add up each head's chunks: `[B, chunks, …]` to `[B, heads, …]`.

    Heads without kept chunks are left out for kept ones; those without dropped chunks are zeros for dropped
    ones.
    """
    parts, start = [], 0
    for per_head, heads in itertools.groupby(layout.kept_chunks if kept else layout.dropped_chunks):
        num_heads = len(list(heads))
        shape = (len(partial), num_heads, per_head, *partial.shape[2:])
        if per_head:
            chunks = partial[:, start : start + num_heads * per_head].view(shape)
            # Far quicker than `sum` where a head has few of them.
            parts.append(functools.reduce(torch.add, (chunks.select(2, place) for place in range(per_head))))
        elif not kept:
            parts.append(partial.new_zeros(shape[:2] + shape[3:]))
        start += num_heads * per_head
    if not parts:
        return partial
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_regions(
    layout: ChunkLayout,
    view: StoredView,
    scores: torch.Tensor,
    stored_v: torch.Tensor,
    window_scores: torch.Tensor,
    window_v: torch.Tensor,
    hidden_places: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax and weigh V by what each head sees `[B, H_kv, G * Q, D]`: all tokens, or whole ones alone."""
    num_heads, per_head = len(layout.widths), layout.head_dim // layout.value_chunk
    seeing, narrow = head_index(layout.value_heads), head_index(layout.window_heads)
    batch_size, _, num_queries, _ = window_scores.shape
    out = stored_v.new_zeros(batch_size, num_heads * per_head, num_queries, layout.value_chunk)
    if layout.value_heads:
        weights = _softmax(scores, None if sinks is None else sinks[:, seeing])
    if layout.kept_value_index:
        places = tuple(layout.value_heads.index(chunk // per_head) for chunk in layout.kept_value_index)
        out[:, value_index("values", layout)] = _weigh(weights, stored_v, view.kept, places)
    if layout.dropped_value_index:
        beside = None if sinks is None else sinks[:, narrow]
        of_window = torch.zeros_like(window_scores)
        of_window[:, narrow] = _softmax(window_scores[:, narrow], beside)
        if layout.value_heads and layout.value_widths is not None:
            share = view.place_tokens.expand(*weights.shape[:3], -1)
            of_window[:, seeing] = weights.gather(3, share).masked_fill(hidden_places, 0)
        heads = tuple(chunk // per_head for chunk in layout.dropped_value_index)
        out[:, value_index("window_values", layout)] = _weigh(of_window, window_v, view.window, heads)
    return out.view(batch_size, num_heads, per_head, num_queries, -1).transpose(2, 3).flatten(3)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weigh `[B, heads, G * Q, n]`, beside a sink's logit `[B, heads, G * Q]` that takes its share."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks[..., None]], dim=-1).softmax(-1)[..., :-1]
