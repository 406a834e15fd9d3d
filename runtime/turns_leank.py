"""Attention of several new tokens without a kernel of ours: chunks of input, turns of a conversation.

A channel that is pruned adds nothing to a score. So K with zeros in its place, and the new tokens behind, are
all that dense attention needs to give what the pruned cache means: torch's flash attention does the work.
One row is copied at a time, so that no more than a row of a layer is held twice. Heads of width 0 see whole
tokens alone, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.attention.bias import causal_lower_right

from .layout_leank import ChunkLayout, StoreTensors, head_index

_Heads = slice | list[int]


def attend_turn(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    new_valid: torch.Tensor | None,
    store: StoreTensors,
    stored: Sequence[tuple[int, int]],
    *,
    layout: ChunkLayout,
    sink_size: int,
    softmax_scale: float,
) -> torch.Tensor:
    """Attend to what is stored, and causally to new tokens that are not stored yet.

    Args:
        query: `[B, H, d, D]`.
        new_keys: Keys of the query tokens themselves, all channels `[B, H_kv, d, D]`.
        new_values: Their V `[B, H_kv, d, D]`.
        new_valid: Real tokens among them `[B, d]`, bool; None if all are.
        store: What is stored; its `head_table` is not looked at.
        stored: Tokens of every row in the store, and pruned ones among them.
        layout: How the layer's channels are cut into chunks.
        sink_size: Tokens at the front that are never pruned.
        softmax_scale: Factor on the logits.

    Returns:
        `[B, H, d, D]` in the dtype of `query`; zeros for padding.
    """
    dtype = torch.promote_types(query.dtype, store.kept_keys.dtype)
    grouped = query.to(dtype).unflatten(1, (len(layout.widths), -1))  # [B, H_kv, G, d, D]
    rows = []
    for row, (length, pruned) in enumerate(stored):
        real = slice(None) if new_valid is None else new_valid[row].nonzero()[:, 0]
        columns, keys, values = (
            states[row].to(dtype)[..., real, :] for states in (grouped, new_keys, new_values)
        )
        attended = torch.zeros_like(columns)
        if columns.shape[2]:
            cached = _RowOfStore(store, layout, row, length, pruned, sink_size)
            for heads, dense_keys, dense_values in cached.with_new(keys, values):
                attended[heads] = _attend(columns[heads], dense_keys, dense_values, softmax_scale)
        if new_valid is not None:
            attended = torch.zeros_like(grouped[row]).index_copy(2, real, attended)
        rows.append(attended)
    return torch.stack(rows).flatten(1, 2).to(query.dtype)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Attend with the last tokens `[H_kv, G, d, D]` to tokens `[n, H_kv, D]`, causally."""
    num_new, num_tokens = query.shape[2], keys.shape[0]
    if query.is_cuda:  # a form that flash attention knows
        mask: torch.Tensor = causal_lower_right(num_new, num_tokens)  # type: ignore[assignment]
    else:
        mask = torch.ones(num_new, num_tokens, dtype=torch.bool).tril(num_tokens - num_new)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.flatten(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return attended.view(query.shape)


class _RowOfStore:
    """One row of a store, to be read densely."""

    def __init__(
        self,
        store: StoreTensors,
        layout: ChunkLayout,
        row: int,
        length: int,
        pruned: int,
        sink_size: int,
    ) -> None:
        self.store, self.layout, self.length = store, layout, length
        device = store.kept_keys.device
        page_size = store.window_keys.shape[2]
        self.pages = store.page_table[row, : -(-length // store.kept_keys.shape[2])].long()
        sink = torch.arange(min(length, sink_size), device=device)
        recent = torch.arange(min(sink_size + pruned, length), length, device=device)
        self.whole = torch.cat([sink, recent])
        self.window = store.window_table[row].long()[self.whole // page_size], self.whole % page_size
        # Channel of every lane; a lane of padding has none.
        self.channels = store.chunk_index[row if store.chunk_index.shape[0] > 1 else 0].long()

    def with_new(
        self, new_keys: torch.Tensor, new_values: torch.Tensor
    ) -> Iterator[tuple[_Heads, torch.Tensor, torch.Tensor]]:
        """Yield heads, and K and V of tokens that these see `[n, heads, D]`, new ones `[H_kv, d, D]` last."""
        num_heads, _, head_dim = new_keys.shape
        keys = new_keys.new_zeros(self.length, num_heads, head_dim)
        self._put(keys, slice(None), self._in_order(self.store.kept_keys), kept=True)
        pages, places = self.window
        self._put(keys, self.whole, self.store.window_keys[pages, :, places], kept=False)
        for heads, tokens, values in (
            (self.layout.value_heads, slice(None), lambda: self._in_order(self.store.values)),
            (self.layout.window_heads, self.whole, lambda: self.store.window_values[pages, :, places]),
        ):
            if heads:
                select = head_index(heads, num_heads)
                yield (
                    select,
                    torch.cat([keys[:, select][tokens], new_keys[select].transpose(0, 1)]),
                    torch.cat([values().to(keys.dtype), new_values[select].transpose(0, 1)]),
                )

    def _in_order(self, pool: torch.Tensor) -> torch.Tensor:
        """Copy the row's pages of a pool `[pages, m, P, n]`, token after token `[length, m, n]`."""
        taken = pool.index_select(0, self.pages).transpose(1, 2)
        return taken.flatten(0, 1)[: self.length]

    def _put(
        self, keys: torch.Tensor, tokens: torch.Tensor | slice, chunks: torch.Tensor, *, kept: bool
    ) -> None:
        """Put tokens' chunks `[tokens, chunks, E]` where their channels are in keys `[n, H_kv, D]`."""
        num_kept = self.layout.num_kept_chunks
        channels = (self.channels[:num_kept] if kept else self.channels[num_kept:]).flatten()
        lanes = chunks.flatten(1).to(keys.dtype)
        if self.layout.has_padded_lanes:
            real = (channels >= 0).nonzero()[:, 0]
            channels, lanes = channels[real], lanes.index_select(1, real)
        if isinstance(tokens, slice):
            keys.flatten(1).index_copy_(1, channels, lanes)
        else:
            keys.flatten(1)[tokens[:, None], channels] = lanes
