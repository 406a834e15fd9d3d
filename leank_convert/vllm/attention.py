"""Page writes and prompt attention in plain torch.

Prompts attend densely: by torch's own attention, to keys that are put together from both groups' pages where
an earlier chunk or the prefix cache holds some of them. Decode attention is the runtime's.
"""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from leank_convert._runtime.constants_leank import centre
from leank_convert._runtime.fp8_leank import as_bytes, quantise
from leank_convert._runtime.layout_leank import ChunkLayout, StoreTensors, gather_lanes


def append_by_slot(
    keys: torch.Tensor,
    values: torch.Tensor,
    store: StoreTensors,
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
    keys = _as_stored(centre(keys, store.key_mean), store.kept_keys.dtype, store.key_scale)
    values = _as_stored(values, store.kept_keys.dtype, store.value_scale)
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
            as_bytes(pool)[where // pool.shape[2], :, where % pool.shape[2]] = rows


def gather_tokens(
    store: StoreTensors, layout: ChunkLayout, row: int, num_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put keys and values of a row's first tokens together in `dtype`, all whole, each `[H_kv, n, D]`.

    Keys lack their mean, all of them, which attention does not see.
    """
    num_heads, head_dim = len(layout.widths), layout.head_dim
    tables = (store.page_table, store.page_table, store.window_table, store.window_table)
    kept, values, dropped, window_values = (
        _read_rows(pool, table[row : row + 1], num_tokens)[0].to(dtype)
        for pool, table in zip(store[:4], tables, strict=True)
    )
    index = store.chunk_index[0].flatten().long()
    lanes = torch.cat([kept, dropped]).transpose(0, 1).flatten(1)  # [n, lanes]
    keys = lanes.new_empty(num_tokens, num_heads * head_dim + 1)
    # Lanes of padding go to a column of their own.
    keys[:, torch.where(index < 0, num_heads * head_dim, index)] = lanes
    order = torch.tensor([*layout.value_heads, *layout.window_heads], device=values.device).argsort()
    keys = keys[:, :-1].unflatten(1, (num_heads, head_dim)).transpose(0, 1)
    values = torch.cat([values, window_values])[order]
    if store.key_scale is not None and store.value_scale is not None:  # which round nothing
        keys, values = (
            states * scale[0, :, None].to(dtype)
            for states, scale in ((keys, store.key_scale), (values, store.value_scale))
        )
    return keys, values


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


def _read_rows(pool: torch.Tensor, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Read the first tokens of rows `[B, rows of the pool, n, width]` by their page table `[B, pages]`."""
    pages = table[:, : -(-num_tokens // pool.shape[2])].long()
    return as_bytes(pool)[pages].view(pool.dtype).transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]


def _as_stored(states: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Return `[T, H_kv, D]` as pages hold it, FP8 as bytes."""
    return states.to(dtype) if scale is None else as_bytes(quantise(states, scale))
