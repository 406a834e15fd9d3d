"""What kernels are held to on first use: one append and one attention must equal the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .layout_leank import ChunkLayout, order_channels
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
        cache: `kept_keys`, `values`, `window_keys`, `window_values` of a store, NaN where no token lies.
        chunk_index: `[1, C + C_dropped, E]`, int32.
        head_table: As `ChunkLayout.head_table`, int32.
        lengths: Tokens per row, the last one counted `[B]`, int32.
        pruned_lengths: Pruned ones among them `[B]`, int32.
    """

    layout: ChunkLayout
    sink_size: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    chunk_index: torch.Tensor
    head_table: torch.Tensor
    lengths: torch.Tensor
    pruned_lengths: torch.Tensor

    def appended(self) -> tuple[torch.Tensor, ...]:
        """Return the cache with the last tokens in it, by plain indexing."""
        kept, slots = self.layout.num_kept_chunks, self.cache[2].shape[2]
        lanes = self.keys.flatten(1)[:, self.chunk_index[0].clamp(min=0).long()]  # [B, chunks, E]
        lanes = lanes.masked_fill(self.chunk_index[0] < 0, 0)
        heads = (list(self.layout.value_heads), list(self.layout.window_heads))
        cache = tuple(tensor.clone() for tensor in self.cache)
        for row, place in enumerate((self.lengths - 1).tolist()):
            if place < 0:
                continue
            ring_size = slots - self.sink_size
            slot = place if place < self.sink_size else self.sink_size + (place - self.sink_size) % ring_size
            cache[0][row, :, place], cache[2][row, :, slot] = lanes[row, :kept], lanes[row, kept:]
            cache[1][row, :, place] = self.values[row, heads[0], 0]
            cache[3][row, :, slot] = self.values[row, heads[1], 0]
        return cache

    def expected(self, softmax_scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return what the reference gives after the append, computed in `dtype` `[B, H, 1, D]`."""
        # The reference needs finite memory.
        kept, values, window, window_values = (
            tensor.to(dtype).nan_to_num(nan=0.0) for tensor in self.appended()
        )
        return decode_attention(
            self.query.to(dtype),
            kept,
            values,
            window,
            window_values,
            self.chunk_index.long(),
            self.lengths,
            self.pruned_lengths,
            layout=self.layout,
            sink_size=self.sink_size,
            max_length=kept.shape[2],
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
    index = layout.chunk_index(order_channels(channel_mask.to(device))[None]).to(torch.int32)
    capacity = max(int(lengths.max()), 1) + 7
    num_kept = layout.num_kept_chunks
    cache = (
        random(batch_size, num_kept, capacity, chunk_size),
        random(batch_size, len(layout.value_heads), capacity, head_dim),
        random(batch_size, layout.num_dropped_chunks, num_slots, chunk_size),
        random(batch_size, len(layout.window_heads), num_slots, head_dim),
    )
    for tensor, padding in ((cache[0], index[0, :num_kept] < 0), (cache[2], index[0, num_kept:] < 0)):
        tensor.masked_fill_(padding[None, :, None, :], 0)
    before = (lengths - 1)[:, None]
    free = torch.arange(capacity, device=device) >= before
    tokens = window_tokens(lengths - 1, sink_size, num_slots)
    in_window = (tokens >= 0) & ((tokens < sink_size) | (tokens >= sink_size + pruned_lengths[:, None]))
    for tensor, unused in zip(cache, (free, free, ~in_window, ~in_window), strict=True):
        tensor.masked_fill_(unused[:, None, :, None], torch.nan)
    return DecodeCase(
        layout=layout,
        sink_size=sink_size,
        query=random(batch_size, num_heads * num_groups, 1, head_dim),
        keys=random(batch_size, num_heads, 1, head_dim),
        values=random(batch_size, num_heads, 1, head_dim),
        cache=cache,
        chunk_index=index,
        head_table=torch.tensor(layout.head_table, dtype=torch.int32, device=device),
        lengths=lengths,
        pruned_lengths=pruned_lengths,
    )


def run_case(kernels: DecodeKernels, case: DecodeCase, softmax_scale: float) -> torch.Tensor:
    """Append and attend by kernel; return the output `[B, H, 1, D]`. The case's cache is left as it is."""
    kept, values, window, window_values = (tensor.clone() for tensor in case.cache)
    index, table, sink_size = case.chunk_index, case.head_table, case.sink_size
    kernels.append(
        case.keys,
        case.values,
        kept,
        values,
        window,
        window_values,
        index,
        table,
        case.lengths,
        None,
        sink_size,
    )
    return kernels.attend(
        case.query,
        kept,
        values,
        window,
        window_values,
        index,
        table,
        case.lengths,
        case.pruned_lengths,
        kernels.plan(case.lengths, case.pruned_lengths, sink_size, window.shape[2]),
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
