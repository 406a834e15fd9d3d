"""Channel layout of a layer: kept channels first, cut into chunks, so that one kernel serves every mask.

q·k does not change when q and k of a head share one channel order, so every head puts its kept channels
first. A head's kept channels fill whole chunks of `chunk_size` lanes (the last one padded with zeros),
its dropped channels fill chunks of their own, and which head a chunk belongs to is data:

    head_dim 128, chunk_size 32    head 0, width 0   head 1, width 32   head 2, width 64
    kept chunks                                      [0]                [1][2]
    dropped chunks                 [0][1][2][3]      [4][5][6]          [7][8]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

Heads = slice | list[int]


@dataclass(frozen=True)
class ChunkLayout:
    """How the channels of one layer's KV heads are cut into chunks. Pure integers.

    Attributes:
        widths: Kept channels per KV head.
        head_dim: Channels of a key before pruning, D.
        chunk_size: Channels of a chunk, E.
    """

    widths: tuple[int, ...]
    head_dim: int
    chunk_size: int

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
    def value_heads(self) -> tuple[int, ...]:
        """Heads that see pruned tokens, whose V is kept for every token."""
        return tuple(head for head, width in enumerate(self.widths) if width)

    @cached_property
    def window_heads(self) -> tuple[int, ...]:
        """Heads of width 0, whose V is kept in the window alone."""
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

        Columns: first kept chunk, kept chunks, row of `values` (-1 for width 0), first dropped chunk, dropped
        chunks, row of `window_values` (-1 unless width 0), cost of a tile of pruned tokens, that cost summed
        over earlier heads. The last row: kept chunks, 0, rows of `values`, dropped chunks, 0, rows of
        `window_values`, cost of a tile of whole tokens, the summed cost of pruned tiles. Costs are bytes of K
        and V in units of a chunk, plus one for what any tile costs.
        """
        value_cost = -(-self.head_dim // self.chunk_size)
        rows: list[tuple[int, ...]] = []
        kept = dropped = value_row = window_row = cost = 0
        for num_kept, num_dropped in zip(self.kept_chunks, self.dropped_chunks, strict=True):
            tile = num_kept + value_cost + 1 if num_kept else 0
            rows.append(
                (
                    kept,
                    num_kept,
                    value_row if num_kept else -1,
                    dropped,
                    num_dropped,
                    -1 if num_kept else window_row,
                    tile,
                    cost,
                )
            )
            kept, dropped, cost = kept + num_kept, dropped + num_dropped, cost + tile
            value_row, window_row = value_row + bool(num_kept), window_row + (not num_kept)
        return (*rows, (kept, 0, value_row, dropped, 0, window_row, 2 * value_cost + 1, cost))

    def chunk_index(self, channel_order: torch.Tensor) -> torch.Tensor:
        """Say which channel every lane of every chunk holds.

        Args:
            channel_order: Channels of every head, kept ones first `[R, H_kv, D]` (R is 1 or the batch).

        Returns:
            `head * D + channel`, or -1 for a lane of padding `[R, C + C_dropped, E]`, int32; kept chunks
            first.
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
    """Put kept channels first, ascending, then dropped ones, ascending.

    Args:
        channel_mask: True where a channel is kept `[..., D]`.

    Returns:
        Channel indices `[..., D]`, int64.
    """
    return torch.argsort((~channel_mask).to(torch.int8), dim=-1, stable=True)


def head_index(heads: tuple[int, ...], num_heads: int) -> Heads:
    """Return what selects these heads of `num_heads`, without a copy where that is possible."""
    if len(heads) == num_heads:
        return slice(None)
    first = heads[0] if heads else 0
    if heads == tuple(range(first, first + len(heads))):
        return slice(first, first + len(heads))
    return list(heads)


def gather_lanes(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Bring channels into the order of chunks.

    Args:
        states: Channels of all heads `[B, n, H_kv * D]`.
        index: Channel of every lane, -1 in lanes of padding `[1 or B, chunks, E]`.

    Returns:
        `[B, n, chunks, E]`; a lane of padding holds whatever channel 0 does.
    """
    lanes = index.clamp(min=0).flatten(1)
    if index.shape[0] == 1:
        taken = states.index_select(2, lanes[0])
    else:
        taken = states.gather(2, lanes.long()[:, None].expand(-1, states.shape[1], -1))
    return taken.view(*states.shape[:2], *index.shape[1:])


def choose_chunk_size(widths: Iterable[Sequence[int]], head_dim: int) -> int:
    """Choose one chunk size for all layers of a model, so that one compiled kernel can serve them.

    32 where every width is a multiple of 32, else 16; heads of fewer than 64 channels take a quarter of
    a head instead, so that a toy model still stores less than a dense one.

    Args:
        widths: Kept channels per layer and head.
        head_dim: D.
    """
    aligned = all(width % 32 == 0 for layer in widths for width in layer)
    largest = 32 if aligned and head_dim >= 64 else min(16, max(1, head_dim // 4))
    return next(size for size in (32, 16, 8, 4, 2, 1) if size <= largest and head_dim % size == 0)
