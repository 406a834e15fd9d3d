"""Self-check of the decode kernels: on first use one append and one attention must equal the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .layout_leank import ChunkLayout, StoreTensors, order_channels
from .reference_leank import decode_attention
from .step_leank import window_tokens

if TYPE_CHECKING:
    from .decode_kernels_leank import DecodeKernels

# Tokens and pruned ones among them: one token, a ring with room, a ring that has gone round.
_ROWS = ((1, 0), (90, 15), (333, 260))
_SINK_SIZE, _NUM_SLOTS = 8, 80
_SCALE = 0.3


@dataclass(frozen=True)
class DecodeCase:
    """One decode step on random data: a cache that lacks every row's last token, and that token.

    Attributes:
        layout: How channels are cut into chunks.
        sink_size: Sink slots of the window.
        query: `[B, H, 1, D]`.
        keys: The last token of each row `[B, H_kv, 1, D]`.
        values: `[B, H_kv, 1, D]`.
        store: K and V, NaN where no token lies.
        lengths: Tokens per row, the last one counted `[B]`, int32.
        pruned_lengths: Pruned ones among them `[B]`, int32.
    """

    layout: ChunkLayout
    sink_size: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    store: StoreTensors
    lengths: torch.Tensor
    pruned_lengths: torch.Tensor

    def appended(self) -> StoreTensors:
        """Return the store with the last tokens in it, by plain indexing."""
        store = self.store.map_memory(torch.clone)
        kept, ring_size, index = (
            self.layout.num_kept_chunks,
            store.num_slots - self.sink_size,
            store.chunk_index[0],
        )
        lanes = self.keys.flatten(1)[:, index.clamp(min=0)].masked_fill(index < 0, 0)  # [B, chunks, E]
        heads = (list(self.layout.value_heads), list(self.layout.window_heads))
        for row, place in enumerate((self.lengths - 1).tolist()):
            if place < 0:
                continue
            slot = place if place < self.sink_size else self.sink_size + (place - self.sink_size) % ring_size
            store.kept_keys[row, :, place] = lanes[row, :kept]
            store.window_keys[row, :, slot] = lanes[row, kept:]
            store.values[row, :, place] = self.values[row, heads[0], 0]
            store.window_values[row, :, slot] = self.values[row, heads[1], 0]
        return store

    def expected(self, softmax_scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return what the reference gives after the append, computed in `dtype` `[B, H, 1, D]`."""
        # The reference needs finite memory.
        store = self.appended().map_memory(lambda tensor: tensor.to(dtype).nan_to_num(nan=0.0))
        return decode_attention(
            self.query.to(dtype),
            store,
            self.lengths,
            self.pruned_lengths,
            layout=self.layout,
            sink_size=self.sink_size,
            max_length=store.kept_keys.shape[2],
            softmax_scale=softmax_scale,
        )


def make_case(
    channel_mask: torch.Tensor,
    rows: Sequence[tuple[int, int]],
    *,
    chunk_size: int,
    num_groups: int,
    sink_size: int,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> DecodeCase:
    """Make a decode step on random data.

    Args:
        channel_mask: Kept channels `[H_kv, D]`, bool.
        rows: Tokens and pruned ones among them, per row; what is not pruned must fit in the window.
        chunk_size: E.
        num_groups: Query heads per KV head, G.
        sink_size: Sink slots of the window.
        num_slots: All its slots.
        dtype: Of queries and cache.
        device: Where everything lies.
        seed: Of the random data.
    """
    num_heads, head_dim = channel_mask.shape
    batch_size = len(rows)
    widths = tuple(int(width) for width in channel_mask.sum(-1))
    layout = ChunkLayout(widths, head_dim, chunk_size)
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    lengths = torch.tensor([length for length, _ in rows], dtype=torch.int32, device=device)
    pruned_lengths = torch.tensor([pruned for _, pruned in rows], dtype=torch.int32, device=device)
    index = layout.chunk_index(order_channels(channel_mask.to(device))[None])
    capacity = max(int(lengths.max()), 1) + 7
    num_kept = layout.num_kept_chunks
    store = StoreTensors(
        random(batch_size, num_kept, capacity, chunk_size),
        random(batch_size, len(layout.value_heads), capacity, head_dim),
        random(batch_size, layout.num_dropped_chunks, num_slots, chunk_size),
        random(batch_size, len(layout.window_heads), num_slots, head_dim),
        index,
        torch.tensor(layout.head_table, dtype=torch.int32, device=device),
    )
    store.kept_keys.masked_fill_((index[0, :num_kept] < 0)[None, :, None, :], 0)
    store.window_keys.masked_fill_((index[0, num_kept:] < 0)[None, :, None, :], 0)
    before = (lengths - 1)[:, None]
    free = torch.arange(capacity, device=device) >= before
    tokens = window_tokens(lengths - 1, sink_size, num_slots)
    in_window = (tokens >= 0) & ((tokens < sink_size) | (tokens >= sink_size + pruned_lengths[:, None]))
    for tensor, unused in zip(store[:4], (free, free, ~in_window, ~in_window), strict=True):
        tensor.masked_fill_(unused[:, None, :, None], torch.nan)
    return DecodeCase(
        layout=layout,
        sink_size=sink_size,
        query=random(batch_size, num_heads * num_groups, 1, head_dim),
        keys=random(batch_size, num_heads, 1, head_dim),
        values=random(batch_size, num_heads, 1, head_dim),
        store=store,
        lengths=lengths,
        pruned_lengths=pruned_lengths,
    )


def run_case(kernels: DecodeKernels, case: DecodeCase, softmax_scale: float) -> torch.Tensor:
    """Append and attend by kernel; return the output `[B, H, 1, D]`. The case's store is left as it is."""
    store, sink_size = case.store.map_memory(torch.clone), case.sink_size
    kernels.append(case.keys, case.values, store, case.lengths, None, sink_size)
    plan = kernels.plan(case.lengths, case.pruned_lengths, sink_size, store.num_slots)
    return kernels.attend(
        case.query,
        store,
        case.lengths,
        case.pruned_lengths,
        plan,
        sink_size=sink_size,
        softmax_scale=softmax_scale,
    )


def disagreement(kernels: DecodeKernels) -> float:
    """Return the error of kernels on a small case, relative to the output of the reference; inf for NaN."""
    key = kernels.key
    spare = 3 if key.max_chunks > key.head_dim // key.chunk_size else 0
    half = key.head_dim // 2 // key.chunk_size * key.chunk_size
    widths = (0, key.chunk_size - spare, half + spare, key.head_dim)
    mask = torch.arange(key.head_dim).flip(0)[None] < torch.tensor(widths)[:, None]
    case = make_case(
        mask,
        _ROWS,
        chunk_size=key.chunk_size,
        num_groups=key.num_groups,
        sink_size=_SINK_SIZE,
        num_slots=_NUM_SLOTS,
        dtype=key.dtype,
        device=key.device,
    )
    # Neither TF32 nor autocast, which a caller may have on, touches fp64.
    expected = case.expected(_SCALE, torch.float64)
    error = float((run_case(kernels, case, _SCALE) - expected).norm() / expected.norm())
    return error if error == error else float("inf")
