"""Attention of many new tokens at once: turns of a conversation, chunks of input.

A channel that is pruned adds nothing to a score. So K with zeros in its place, and the new tokens behind, are
all that dense attention needs to give what the pruned cache means: torch's flash attention does the work.
One row is copied at a time, so that no more than a row of a layer is held twice; by a kernel where there is
one. Heads of width 0 see whole tokens alone, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch.nn.attention.bias import causal_lower_right

from .decode_kernels_leank import DecodeKernels
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
    kernels: DecodeKernels | None = None,
) -> torch.Tensor:
    """Attend to what is stored, and causally to new tokens that are not stored yet.

    Args:
        query: `[B, H, d, D]`.
        new_keys: Keys of the query tokens themselves, all channels `[B, H_kv, d, D]`.
        new_values: Their V `[B, H_kv, d, D]`.
        new_valid: Real tokens among them `[B, d]`, bool; None if all are.
        store: What is stored.
        stored: Tokens of every row in the store, and pruned ones among them.
        layout: How the layer's channels are cut into chunks.
        sink_size: Tokens at the front that are never pruned.
        softmax_scale: Factor on the logits.
        kernels: What copies rows, of the store's and the query's dtype; None is plain torch.

    Returns:
        `[B, H, d, D]` in the dtype of `query`; zeros for padding.
    """
    dtype = torch.promote_types(query.dtype, store.kept_keys.dtype)
    batch_size, _, num_new, head_dim = query.shape
    num_heads = len(layout.widths)
    grouped = query.to(dtype).view(batch_size, num_heads, -1, num_new, head_dim)
    rows = []
    for row, span in enumerate(stored):
        real = None if new_valid is None else new_valid[row].nonzero()[:, 0]
        columns, keys, values = (
            states[row].to(dtype) if real is None else states[row].to(dtype).index_select(-2, real)
            for states in (grouped, new_keys, new_values)
        )
        attended = torch.zeros_like(columns)
        if columns.shape[2]:
            cached = StoredRow(store, layout, row, *span, sink_size)
            for heads, dense_keys, dense_values in cached.with_new(keys, values, kernels):
                attended[heads] = _attend(columns[heads], dense_keys, dense_values, softmax_scale)
        if real is not None:
            attended = torch.zeros_like(grouped[row]).index_copy(2, real, attended)
        rows.append(attended)
    return torch.stack(rows).flatten(1, 2).to(query.dtype)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Attend with the last tokens `[H_kv, G, d, D]` to tokens `[n, H_kv, D]`, causally."""
    num_new, num_tokens = query.shape[2], keys.shape[0]
    if query.is_cuda:  # a form that flash attention knows
        mask: torch.Tensor = causal_lower_right(num_new, num_tokens)
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


class StoredRow:
    """One row of a store, to be read densely: its tokens, and pruned ones among them."""

    def __init__(
        self,
        store: StoreTensors,
        layout: ChunkLayout,
        row: int,
        length: int,
        pruned: int,
        sink_size: int,
    ) -> None:
        self.store, self.layout = store, layout
        self.span, self.sink_size = (row, length, pruned), sink_size
        # Channel of every lane; a lane of padding has none.
        self.channels = store.chunk_index[row if store.chunk_index.shape[0] > 1 else 0].long()

    @cached_property
    def whole(self) -> torch.Tensor:
        """Numbers of whole tokens `[w]`."""
        (_, length, pruned), device = self.span, self.store.window_keys.device
        sink = torch.arange(min(length, self.sink_size), device=device)
        recent = torch.arange(min(self.sink_size + pruned, length), length, device=device)
        return torch.cat([sink, recent])

    @cached_property
    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of whole tokens in the window, and places in these, each `[w]`."""
        page_size = self.store.window_keys.shape[2]
        return self.store.window_table[self.span[0]].long()[self.whole // page_size], self.whole % page_size

    def with_new(
        self, new_keys: torch.Tensor, new_values: torch.Tensor, kernels: DecodeKernels | None
    ) -> Iterator[tuple[_Heads, torch.Tensor, torch.Tensor]]:
        """Yield heads, and K and V of tokens that these see `[n, heads, D]`, new ones `[H_kv, d, D]` last."""
        length = self.span[1]
        for heads in (self.layout.value_heads, self.layout.window_heads):
            if not heads:
                continue
            select = head_index(heads, len(self.layout.widths))
            added = new_keys[select].transpose(0, 1), new_values[select].transpose(0, 1)
            num_stored = length if heads is self.layout.value_heads else len(self.whole)
            keys, values = (new.new_empty(num_stored + len(new), *new.shape[1:]) for new in added)
            if heads is self.layout.window_heads:
                self._copy_whole_tokens(select, keys[:num_stored], values[:num_stored])
            elif kernels is not None:
                kernels.copy_row(self.store, self.span, self.sink_size, keys, values)
            else:
                self._copy_all_tokens(select, keys[:length], values[:length])
            keys[num_stored:], values[num_stored:] = added
            yield select, keys, values

    def _copy_all_tokens(self, select: _Heads, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy heads that see pruned tokens, into `[length, heads, D]`."""
        length, num_heads = self.span[1], len(self.layout.widths)
        dense = keys.new_zeros(length, num_heads, self.layout.head_dim)
        self._put(dense, slice(None), self._in_order(self.store.kept_keys), kept=True)
        pages, places = self.window
        self._put(dense, self.whole, self.store.window_keys[pages, :, places], kept=False)
        keys.copy_(dense[:, select])
        values.copy_(self._in_order(self.store.values))

    def _copy_whole_tokens(self, select: _Heads, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy heads of width 0, into `[whole tokens, heads, D]`."""
        pages, places = self.window
        dense = keys.new_zeros(len(self.whole), len(self.layout.widths), self.layout.head_dim)
        self._put(dense, slice(None), self.store.window_keys[pages, :, places], kept=False)
        keys.copy_(dense[:, select])
        values.copy_(self.store.window_values[pages, :, places])

    def _in_order(self, pool: torch.Tensor) -> torch.Tensor:
        """Copy the row's pages of a pool `[pages, m, P, n]`, token after token `[length, m, n]`."""
        row, length, _ = self.span
        pages = self.store.page_table[row, : -(-length // pool.shape[2])].long()
        return pool.index_select(0, pages).transpose(1, 2).flatten(0, 1)[:length]

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
