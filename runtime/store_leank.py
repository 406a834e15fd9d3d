"""The memory of one layer: an append-only store of kept channels, and a window buffer of dropped ones."""

from __future__ import annotations

import torch

from .layout_leank import ChunkLayout
from .rows_leank import Append, Split

_CAPACITY_STEP = 64


def capacity_for(num_tokens: int) -> int:
    """Return how many tokens to allocate for `num_tokens`: a sixteenth more, in steps of 64.

    Growth by a constant factor keeps the copying per token constant; a sixteenth keeps what is allocated
    within an eighth of what is used beyond 4096 tokens.
    """
    wanted = num_tokens + num_tokens // 16
    return max(-(-wanted // _CAPACITY_STEP), 1) * _CAPACITY_STEP


class ChunkStore:
    """K and V of one layer, after its prompt was split.

    Nothing moves when tokens are pruned: kept channels of every token lie in `kept_keys` and `values` from
    the start, dropped channels lie in ring slots until later tokens overwrite them. Memory that no token
    has reached is zero.

    Attributes:
        layout: How the channels are cut into chunks.
        chunk_index: Channel of every lane `[1 or B, C + C_dropped, E]`, see `ChunkLayout.chunk_index`.
        kept_keys: Kept channels of all tokens `[B, C, capacity, E]`.
        values: V of heads that see pruned tokens, all tokens `[B, H_values, capacity, D]`.
        window_keys: Dropped channels of sink and recent tokens `[B, C_dropped, slots, E]`.
        window_values: V of heads of width 0, sink and recent tokens `[B, H_window, slots, D]`.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        channel_order: torch.Tensor,
        num_slots: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        split: Split,
    ) -> None:
        """Split a prompt.

        Args:
            layout: How the channels are cut into chunks.
            channel_order: Channels of every head, kept ones first `[1 or B, H_kv, D]`.
            num_slots: Slots of the window buffer.
            keys: Whole prompt `[B, H_kv, S, D]`.
            values: Whole prompt `[B, H_kv, S, D]`.
            split: Which columns are tokens, and which of them the window takes.
        """
        self.layout = layout
        self.chunk_index = layout.chunk_index(channel_order)
        lanes_padded = (self.chunk_index < 0).any(0) if self._has_padded_lanes() else None
        self._padded_lanes = lanes_padded
        batch_size, _, _, head_dim = keys.shape
        self._value_heads = torch.tensor(layout.value_heads, dtype=torch.long, device=keys.device)
        self._window_heads = torch.tensor(layout.window_heads, dtype=torch.long, device=keys.device)

        if split.order is not None and split.valid is not None:
            keys = _compact(keys, split.order, split.valid)
            values = _compact(values, split.order, split.valid)
        capacity = capacity_for(split.num_tokens)
        chunks = self._to_chunks(keys)
        num_kept = layout.num_kept_chunks
        self.kept_keys = _grown(chunks[:, :num_kept], capacity)
        self.values = _grown(values.index_select(1, self._value_heads), capacity)
        self.window_keys = keys.new_zeros(batch_size, layout.num_dropped_chunks, num_slots, layout.chunk_size)
        self.window_values = keys.new_zeros(batch_size, len(layout.window_heads), num_slots, head_dim)
        self._write_window(chunks[:, num_kept:], values, split.window_source, split.window_fresh)

    @property
    def is_writable(self) -> bool:
        """Whether it can be written: what `torch.inference_mode()` made cannot be written outside it."""
        return torch.is_inference_mode_enabled() or not self.kept_keys.is_inference()

    def copy_memory(self) -> None:
        """Go on with copies of all tensors; whoever holds the old ones keeps them as they are."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.clone())

    def append(self, keys: torch.Tensor, values: torch.Tensor, append: Append) -> None:
        """Add tokens behind each row's last one.

        Args:
            keys: `[B, H_kv, d, D]`, zero at padding.
            values: `[B, H_kv, d, D]`, zero at padding.
            append: Where every column goes.
        """
        if append.capacity > self.kept_keys.shape[2]:
            capacity = capacity_for(append.capacity)
            self.kept_keys = _grown(self.kept_keys, capacity)
            self.values = _grown(self.values, capacity)
        chunks = self._to_chunks(keys)
        num_kept = self.layout.num_kept_chunks
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        self.kept_keys[rows, :, append.positions] = chunks[:, :num_kept].transpose(1, 2)
        self.values[rows, :, append.positions] = values.index_select(1, self._value_heads).transpose(1, 2)
        if append.window_slots is not None:
            self._write_slot(self.window_keys, chunks[:, num_kept:], append)
            self._write_slot(self.window_values, values.index_select(1, self._window_heads), append)
        elif append.window_source is not None and append.window_fresh is not None:
            self._write_window(chunks[:, num_kept:], values, append.window_source, append.window_fresh)

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed."""
        for name in ("kept_keys", "values", "window_keys", "window_values"):
            setattr(self, name, getattr(self, name).index_select(0, rows))
        if self.chunk_index.shape[0] > 1:
            self.chunk_index = self.chunk_index.index_select(0, rows)

    def _has_padded_lanes(self) -> bool:
        size, head_dim = self.layout.chunk_size, self.layout.head_dim
        return any(width % size or (head_dim - width) % size for width in self.layout.widths)

    def _to_chunks(self, keys: torch.Tensor) -> torch.Tensor:
        """Bring keys `[B, H_kv, S, D]` into chunk order `[B, C + C_dropped, S, E]`, padded lanes zero."""
        columns = keys.transpose(1, 2).flatten(2)  # [B, S, H_kv * D]
        index = self.chunk_index.clamp(min=0).flatten(1)
        if index.shape[0] == 1:
            lanes = columns.index_select(2, index[0])
        else:
            lanes = columns.gather(2, index[:, None].expand(-1, columns.shape[1], -1))
        lanes = lanes.view(*columns.shape[:2], *self.chunk_index.shape[1:])
        if self._padded_lanes is not None:
            lanes = lanes.masked_fill(self._padded_lanes, 0)
        return lanes.transpose(1, 2)

    def _write_slot(self, store: torch.Tensor, new: torch.Tensor, append: Append) -> None:
        rows = torch.arange(store.shape[0], device=store.device)
        token = new[:, :, 0]
        if append.valid is not None:
            token = torch.where(append.valid[:, :, None], token, store[rows, :, append.window_slots])
        store[rows, :, append.window_slots] = token

    def _write_window(
        self, dropped: torch.Tensor, values: torch.Tensor, source: torch.Tensor, fresh: torch.Tensor
    ) -> None:
        for store, new in (
            (self.window_keys, dropped),
            (self.window_values, values.index_select(1, self._window_heads)),
        ):
            source_columns = source.clamp(max=new.shape[2] - 1)[:, None, :, None]
            taken = new.gather(2, source_columns.expand(-1, new.shape[1], -1, new.shape[3]))
            store.copy_(torch.where(fresh[:, None, :, None], taken, store))


def _compact(states: torch.Tensor, order: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Bring each row's real tokens to the front, zeros behind: `[B, H, S, D]` to `[B, H, n, D]`."""
    index = order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    # Padding may hold NaN (a row of nothing but padding attends to nothing), hence fill, not multiply.
    return states.gather(2, index).masked_fill(~valid[:, None, :, None], 0)


def _grown(store: torch.Tensor, capacity: int) -> torch.Tensor:
    grown = store.new_zeros(*store.shape[:2], capacity, store.shape[3])
    grown[:, :, : store.shape[2]] = store
    return grown
