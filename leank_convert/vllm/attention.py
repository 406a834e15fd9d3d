"""Page writes by slot and prompt attention in plain torch.

It serves where there are no kernels. Prompts attend densely, to keys that are put together from both groups'
pages where an earlier chunk or the prefix cache holds some of them. Decode attention is the runtime's.
"""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from leank_convert._runtime.layout_leank import ChunkLayout
from leank_convert._runtime.pages_leank import PageList
from leank_convert._runtime.sinks_leank import add_sink_token
from leank_convert._runtime.step_leank import StoredView, hidden_tokens, make_view
from leank_convert._runtime.stored_leank import StoredRow, StoreTensors


def append_by_slot(
    keys: torch.Tensor,
    values: torch.Tensor,
    store: StoreTensors,
    layout: ChunkLayout,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
) -> None:
    """Write tokens' keys and values `[T, H_kv, D]` to both groups' pages, in place.

    Slots `[T]` are page times P plus place of each token, in its kept page and its window page; of padding
    -1, and page 0 is nobody's.
    """
    # Padding may be no number, and so may a request's embeddings. Others read both, with weights of 0.
    keys, values = (own.masked_fill((slots < 0)[:, None, None], 0).nan_to_num() for own in (keys, values))
    places, window_places = (
        (where // pool.shape[2], where % pool.shape[2])
        for pool, where in (
            (store.kept_keys, slots.clamp(min=0)[None]),
            (store.window_keys, window_slots.clamp(min=0)[None]),
        )
    )
    store.write(keys[None], values[None], layout, places, window_places)


def gather_tokens(
    store: StoreTensors, layout: ChunkLayout, row: int, num_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put keys and values of a row's first tokens together in `dtype`, all whole, each `[n, H_kv, D]`.

    Keys lack their mean, all of them. Without sinks attention is the same; with them the caller adds it.
    """
    return StoredRow(store, layout, row, num_tokens, 0, 0).dense(dtype)


def view_tables(
    store: StoreTensors, seen: torch.Tensor, pruned: torch.Tensor, sink_size: int, max_length: int
) -> StoredView:
    """Say what columns see of a store, from its tables alone.

    They see `seen` tokens `[B, q]`, `max_length` at most (host), and `pruned` ones among them `[B, q]`.
    """
    lists, sizes = [], (store.kept_keys.shape[2], store.window_keys.shape[2])
    tables = (store.page_table, None), (store.window_table, sink_size)  # which may be one tensor
    for (table, sink), size in zip(tables, sizes, strict=True):
        number = torch.arange(min(-(-max_length // size), table.shape[1]), device=seen.device)
        token = (number[:, None] * size + torch.arange(size, device=seen.device))[None, None]
        used = ~hidden_tokens(token, seen, pruned, sink)
        # Elsewhere tables may hold anything.
        pages = torch.where(used.any(3).any(1), table[:, : len(number)].long(), 0)
        lists.append(PageList(pages.numel(), pages.flatten()))
    numbers = torch.arange(lists[1].count // len(seen), device=seen.device)[None]
    return make_view(lists[0], lists[1], numbers, sizes, seen, pruned, sink_size)


def attend_densely(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally; the last query `[q, H, D]` is the last token's, of keys and values `[n, H_kv, D]`.

    Sinks are logits of the heads `[H]`, None without any; what comes out is `[q, H, D]`.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    # Repeated here, as not every of torch's kernels for such a mask takes fewer heads of K and V.
    repeated = (states.repeat_interleave(num_heads // num_kv_heads, dim=1) for states in (keys, values))
    query, keys, values = (states.transpose(0, 1)[None] for states in (query, *repeated))
    if sinks is not None:
        query, keys, values = add_sink_token(query, keys, values, sinks[None, :, None], softmax_scale)
    mask = causal_lower_right(num_queries, keys.shape[2])
    output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=softmax_scale)
    return output[0, ..., :head_dim].transpose(0, 1)
