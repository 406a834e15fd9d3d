"""Attention over pages in torch: of prompts everywhere, of decode steps where no kernel serves them.

Prompts attend densely: by torch's own attention, to keys that are put together from both groups' pages where
an earlier chunk or the prefix cache holds some of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from leank_convert._runtime.layout_leank import ChunkLayout, gather_lanes


class PagedStore(NamedTuple):
    """One layer's pages, and what says how to read them, as append and attention take them.

    Attributes:
        kept_keys: Kept channels of all tokens `[pages, C, P, E]`.
        values: V of heads that see pruned tokens `[pages, H_values, P, D]`.
        window_keys: Dropped channels of whole tokens `[window_pages, C_dropped, P_window, E]`.
        window_values: V of heads of width 0 `[window_pages, H_window, P_window, D]`.
        chunk_index: Channel of every lane, `ChunkLayout.chunk_index` `[1, C + C_dropped, E]`, int32.
        head_table: Where every head's chunks lie, `ChunkLayout.head_table`, int32.
        page_table: Page of every row's tokens `[B, n]`, int32.
        window_table: The same of the window's pages, without meaning where no token is whole.
    """

    kept_keys: torch.Tensor
    values: torch.Tensor
    window_keys: torch.Tensor
    window_values: torch.Tensor
    chunk_index: torch.Tensor
    head_table: torch.Tensor
    page_table: torch.Tensor
    window_table: torch.Tensor


def append_by_slot(
    keys: torch.Tensor,
    values: torch.Tensor,
    store: PagedStore,
    layout: ChunkLayout,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
) -> None:
    """Write tokens to both groups' pages, in place.

    Args:
        keys: `[T, H_kv, D]`.
        values: `[T, H_kv, D]`.
        store: What they are written to.
        layout: How the layer's channels are cut.
        slots: Page times P plus place of each token `[T]`; of padding -1, and page 0 is nobody's.
        window_slots: The same of the window's pages.
    """
    lanes = gather_lanes(keys.flatten(1)[None], store.chunk_index)[0]  # [T, C + C_dropped, E]
    lanes = lanes.masked_fill(store.chunk_index[0] < 0, 0)
    kept, dropped = lanes.split([layout.num_kept_chunks, layout.num_dropped_chunks], dim=1)
    for pool, rows, where in (
        (store.kept_keys, kept, slots),
        (store.values, values[:, list(layout.value_heads)], slots),
        (store.window_keys, dropped, window_slots),
        (store.window_values, values[:, list(layout.window_heads)], window_slots),
    ):
        if pool.shape[1]:
            where = where.clamp(min=0)
            pool[where // pool.shape[2], :, where % pool.shape[2]] = rows


def gather_tokens(
    store: PagedStore, layout: ChunkLayout, row: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put keys and values of a row's first tokens together, which are all whole `[H_kv, n, D]`."""
    num_heads, head_dim = len(layout.widths), layout.head_dim
    tables = (store.page_table, store.page_table, store.window_table, store.window_table)
    kept, values, dropped, window_values = (
        _read_rows(pool, table[row : row + 1], num_tokens)[0]
        for pool, table in zip(store[:4], tables, strict=True)
    )
    index = store.chunk_index[0].flatten().long()
    lanes = torch.cat([kept, dropped]).transpose(0, 1).flatten(1)  # [n, lanes]
    keys = lanes.new_empty(num_tokens, num_heads * head_dim + 1)
    # Lanes of padding go to a column of their own.
    keys[:, torch.where(index < 0, num_heads * head_dim, index)] = lanes
    order = torch.tensor([*layout.value_heads, *layout.window_heads], device=values.device).argsort()
    return (
        keys[:, :-1].unflatten(1, (num_heads, head_dim)).transpose(0, 1),
        torch.cat([values, window_values])[order],
    )


def attend_densely(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Attend causally; the last query is the last token's.

    Args:
        query: `[q, H, D]`.
        keys: `[H_kv, n, D]`.
        values: `[H_kv, n, D]`.
        softmax_scale: Factor on the logits.

    Returns:
        `[q, H, D]`.
    """
    num_queries, num_heads, _ = query.shape
    groups = num_heads // keys.shape[0]
    # Repeated here, as not every of torch's kernels for such a mask takes fewer heads of K and V.
    keys, values = (states.repeat_interleave(groups, dim=0)[None] for states in (keys, values))
    mask = causal_lower_right(num_queries, keys.shape[2])
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=softmax_scale
    )
    return output[0].transpose(0, 1)


def decode_attention(
    query: torch.Tensor,
    store: PagedStore,
    seen: torch.Tensor,
    pruned: torch.Tensor,
    *,
    layout: ChunkLayout,
    sink_size: int,
    max_length: int,
    softmax_scale: float,
) -> torch.Tensor:
    """Attend to what is stored, the columns' own tokens among it; softmax in fp32.

    Args:
        query: `[B, H, d, D]`.
        store: What is attended to; its `head_table` is not looked at.
        seen: Tokens of its row that a column sees `[B, d]`.
        pruned: Pruned ones among them `[B, d]`.
        layout: How the layer's channels are cut.
        sink_size: Tokens at the front that are never pruned.
        max_length: Upper bound of `seen`, known to the host.
        softmax_scale: Factor on the logits.

    Returns:
        `[B, H, d, D]`; of columns that see nothing, numbers without meaning.
    """
    batch_size, num_heads, num_columns, head_dim = query.shape
    num_kv_heads = len(layout.widths)
    groups = num_heads // num_kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)
    tables = (store.page_table, store.page_table, store.window_table, store.window_table)
    kept, values, dropped, window_values = (
        _read_rows(pool, table, max_length).to(dtype) for pool, table in zip(store[:4], tables, strict=True)
    )
    token = torch.arange(max_length, device=query.device)
    visible = token < seen[..., None]  # [B, d, n]
    whole = visible & ((token < sink_size) | (token >= sink_size + pruned[..., None]))

    # [B, G * d, H_kv * D], then chunks [B, chunks, G * d, E]
    columns = (query.to(dtype) * softmax_scale).view(batch_size, num_kv_heads, groups, num_columns, head_dim)
    columns = columns.permute(0, 2, 3, 1, 4).reshape(batch_size, groups * num_columns, -1)
    chunks = gather_lanes(columns, store.chunk_index).transpose(1, 2)
    chunks = chunks.masked_fill((store.chunk_index[0] < 0)[:, None], 0)
    scores = query.new_zeros((batch_size, num_kv_heads, groups * num_columns, max_length), dtype=dtype)
    split = layout.num_kept_chunks
    for queries, keys, counts, where in (
        (chunks[:, :split], kept, layout.kept_chunks, visible),
        (chunks[:, split:], dropped, layout.dropped_chunks, whole),
    ):
        # What lies where nothing is seen may be anything: it is replaced, never multiplied.
        part = (queries @ keys.transpose(-1, -2)).unflatten(2, (groups, num_columns))
        part = part.masked_fill(~where[:, None, None], 0).flatten(2, 3)
        head_of = [head for head, count in enumerate(counts) for _ in range(count)]
        scores.index_add_(1, torch.tensor(head_of, dtype=torch.long, device=query.device), part)

    output = scores.new_empty(batch_size, num_kv_heads, groups * num_columns, head_dim)
    for heads, rows, where in (
        (layout.value_heads, values, visible),
        (layout.window_heads, window_values, whole),
    ):
        if heads:
            hidden = ~where[:, None, None].expand(-1, 1, groups, -1, -1).flatten(2, 3)
            weights = scores[:, list(heads)].masked_fill(hidden, torch.finfo(dtype).min).softmax(-1)
            rows = rows.masked_fill(~where.any(1)[:, None, :, None], 0)
            output[:, list(heads)] = weights @ rows
    return output.view(batch_size, num_heads, num_columns, head_dim).to(query.dtype)


def _read_rows(pool: torch.Tensor, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Read the first tokens of rows `[B, rows of the pool, n, width]` by their page table `[B, pages]`."""
    pages = table[:, : -(-num_tokens // pool.shape[2])].long()
    return pool[pages].transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]
