"""Channel layout of a layer: kept channels first, cut into chunks, so that one kernel serves every mask.

q·k does not change when q and k of a head share one channel order, so every head puts its kept channels
first. A head's kept channels fill whole chunks of `chunk_size` lanes (the last one padded with zeros),
its dropped channels fill chunks of their own, and which head a chunk belongs to is data:

    head_dim 128, chunk_size 32    head 0, width 0   head 1, width 32   head 2, width 64
    kept chunks                                      [0]                [1][2]
    dropped chunks                 [0][1][2][3]      [4][5][6]          [7][8]

V lies the same way. A checkpoint that prunes V has it rotated, best directions first, so a head keeps its
first ones and their order is V's own; where V is whole, a head's D channels are one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

Heads = slice | list[int]

INT4_GROUP_SIZE = 32  # numbers of a token and head that have one least number and one step


@dataclass(frozen=True)
class ChunkLayout:
    """How the channels of one layer's KV heads are cut into chunks. Pure integers."""

    widths: tuple[int, ...]  # kept channels per KV head
    head_dim: int  # channels of a key before pruning, D
    chunk_size: int  # channels of a chunk, E
    # Kept channels of V per KV head, multiples of F, 0 where a head keeps none of K; None: all that can be.
    value_widths: tuple[int, ...] | None = None
    value_chunk_size: int | None = None  # channels of a chunk of V, F, which divide D; None: D

    @cached_property
    def kept_chunks(self) -> tuple[int, ...]:
        """Kept chunks of every head."""
        return tuple(-(-width // self.chunk_size) for width in self.widths)

    @cached_property
    def dropped_chunks(self) -> tuple[int, ...]:
        """Dropped chunks of every head."""
        return tuple(-(-(self.head_dim - width) // self.chunk_size) for width in self.widths)

    @cached_property
    def num_kept_chunks(self) -> int:
        """Kept chunks of the layer, C."""
        return sum(self.kept_chunks)

    @cached_property
    def num_dropped_chunks(self) -> int:
        """Dropped chunks of the layer, C_dropped."""
        return sum(self.dropped_chunks)

    @cached_property
    def max_chunks(self) -> int:
        """Most chunks of a head, kept and dropped: D / E, one more where a width is no multiple of E."""
        return max(
            kept + dropped for kept, dropped in zip(self.kept_chunks, self.dropped_chunks, strict=True)
        )

    @cached_property
    def value_chunk(self) -> int:
        """Channels of a chunk of V, F."""
        return self.value_chunk_size or self.head_dim

    @cached_property
    def kept_values(self) -> tuple[int, ...]:
        """Kept chunks of V of every head."""
        widths = self.value_widths or [self.head_dim if width else 0 for width in self.widths]
        return tuple(width // self.value_chunk for width in widths)

    @cached_property
    def dropped_values(self) -> tuple[int, ...]:
        """Dropped chunks of V of every head."""
        return tuple(self.head_dim // self.value_chunk - kept for kept in self.kept_values)

    @cached_property
    def kept_value_index(self) -> tuple[int, ...]:
        """Which of all chunks of V `[H_kv * D / F]` are kept, C_values of them."""
        per_head = self.head_dim // self.value_chunk
        return tuple(
            head * per_head + place for head, kept in enumerate(self.kept_values) for place in range(kept)
        )

    @cached_property
    def dropped_value_index(self) -> tuple[int, ...]:
        """Which of them are dropped, C_dropped_values of them."""
        kept = set(self.kept_value_index)
        total = len(self.widths) * self.head_dim // self.value_chunk
        return tuple(chunk for chunk in range(total) if chunk not in kept)

    @cached_property
    def value_heads(self) -> tuple[int, ...]:
        """Heads that see pruned tokens."""
        return tuple(head for head, width in enumerate(self.widths) if width)

    @cached_property
    def window_heads(self) -> tuple[int, ...]:
        """Heads of width 0, which see whole tokens alone."""
        return tuple(head for head, width in enumerate(self.widths) if not width)

    @cached_property
    def has_padded_lanes(self) -> bool:
        """Whether some lanes of chunks hold no channel."""
        return any(
            width % self.chunk_size or (self.head_dim - width) % self.chunk_size for width in self.widths
        )

    @cached_property
    def head_table(self) -> tuple[tuple[int, ...], ...]:
        """What the kernels know of every head, one row each, and a row of totals.

        Columns: first kept chunk, kept chunks, first kept chunk of V (-1 without any), first dropped chunk,
        dropped chunks, first dropped chunk of V (-1 without any), cost of a tile of pruned tokens, that cost
        summed over earlier heads, kept chunks of V, place among `value_heads` (-1 for width 0). The last row:
        kept chunks, 0, kept chunks of V, dropped chunks, 0, dropped chunks of V, cost of a tile of whole
        tokens, the summed cost of pruned tiles, 0, the number of `value_heads`. A cost is a time: half of a
        whole tile's is the same for every tile, the other half follows the bytes. The unit is a chunk's.
        """
        rows: list[tuple[int, ...]] = []
        kept = dropped = value = window_value = cost = place = 0
        any_tile = 2 * -(-self.head_dim // self.chunk_size)
        counts = (self.kept_chunks, self.dropped_chunks, self.kept_values, self.dropped_values)
        for num_kept, num_dropped, num_values, num_window in zip(*counts, strict=True):
            of_values = -(-num_values * self.value_chunk // self.chunk_size)
            tile = any_tile + num_kept + of_values if num_kept else 0
            first_value, first_window = value if num_values else -1, window_value if num_window else -1
            row = (kept, num_kept, first_value, dropped, num_dropped, first_window, tile, cost, num_values)
            rows.append((*row, place if num_kept else -1))
            kept, dropped, cost = kept + num_kept, dropped + num_dropped, cost + tile
            value, window_value, place = value + num_values, window_value + num_window, place + bool(num_kept)
        return (*rows, (kept, 0, value, dropped, 0, window_value, 2 * any_tile, cost, 0, place))

    def chunk_index(self, channel_order: torch.Tensor) -> torch.Tensor:
        """Say which channel every lane of every chunk holds, given those of each head, kept ones first.

        Takes `[R, H_kv, D]` (R is 1 or the batch), returns `[R, C + C_dropped, E]`, int32, kept chunks first:
        `head * D + channel`, or -1 for a lane of padding.
        """
        head_dim, size = self.head_dim, self.chunk_size
        lanes: list[list[int]] = []
        for first, counts, spans in (
            (0, self.kept_chunks, self.widths),
            (1, self.dropped_chunks, tuple(head_dim - width for width in self.widths)),
        ):
            for head, (count, span) in enumerate(zip(counts, spans, strict=True)):
                start = head * head_dim + first * self.widths[head]
                for chunk in range(count):
                    offsets = range(chunk * size, (chunk + 1) * size)
                    lanes.append([start + offset if offset < span else -1 for offset in offsets])
        device = channel_order.device
        lane = torch.tensor(lanes, dtype=torch.long, device=device).view(-1, size)
        heads = torch.arange(len(self.widths), device=device)[:, None] * head_dim
        flat = (channel_order + heads).flatten(1)
        index = flat[:, lane.clamp(min=0)]
        return index.masked_fill(lane < 0, -1).to(torch.int32)


def order_channels(channel_mask: torch.Tensor) -> torch.Tensor:
    """Return channels `[..., D]`, int64: those that the mask keeps, ascending, then the others, ascending."""
    return torch.argsort((~channel_mask).to(torch.int8), dim=-1, stable=True)


def head_index(heads: tuple[int, ...]) -> Heads:
    """Return what selects these heads, without a copy where that is possible."""
    first = heads[0] if heads else 0
    if heads == tuple(range(first, first + len(heads))):
        return slice(first, first + len(heads))
    return list(heads)


def gather_lanes(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Bring channels `[B, n, H_kv * D]` into the order of chunks `[B, n, chunks, E]`.

    `index` is the channel of every lane `[1 or B, chunks, E]`, -1 in lanes of padding, which hold whatever
    channel 0 does.
    """
    lanes = index.clamp(min=0).flatten(1)
    if index.shape[0] == 1:
        taken = states.index_select(2, lanes[0])
    else:
        taken = states.gather(2, lanes.long()[:, None].expand(-1, states.shape[1], -1))
    return taken.view(*states.shape[:2], *index.shape[1:])


def cut_layers(
    widths: Sequence[Sequence[int]], value_widths: Sequence[Sequence[int]] | None, head_dim: int
) -> tuple[ChunkLayout, ...]:
    """Cut all layers of a model into chunks of one size of K, E, and one of V, F: one kernel can serve them.

    F divides all widths of V (None: whole in heads that keep some of K), and is half a head at most where
    some of it may be dropped. E is 32 where every width of K is a multiple of 32, else 16, but no larger than
    F. Heads of fewer than 64 channels take a quarter of a head instead, so that a toy model still stores less
    than a dense one.
    """
    value_chunk = head_dim
    if value_widths is not None:
        divisor = math.gcd(head_dim, *(width for layer in value_widths for width in layer))
        value_chunk = min(divisor, head_dim // 2)
    aligned = all(width % 32 == 0 for layer in widths for width in layer)
    largest = min(32 if aligned and head_dim >= 64 else min(16, max(1, head_dim // 4)), value_chunk)
    chunk_size = next(size for size in (32, 16, 8, 4, 2, 1) if size <= largest and head_dim % size == 0)
    every: Sequence[Sequence[int] | None] = value_widths or [None] * len(widths)
    return tuple(
        ChunkLayout(tuple(own), head_dim, chunk_size, None if values is None else tuple(values), value_chunk)
        for own, values in zip(widths, every, strict=True)
    )
