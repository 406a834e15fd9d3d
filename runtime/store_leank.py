"""Memory of one layer: an append-only store for kept channels, a window for dropped ones, byte counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from .layout_leank import ChunkLayout, StoreTensors, gather_lanes
from .rows_leank import is_writable, new_address
from .step_leank import Append, Split

_CAPACITY_STEP = 64
# A prompt is brought into chunk order so many numbers at a time (32 MB in half precision).
_BLOCK_SIZE = 1 << 24
_BUFFERS = ("kept_keys", "values", "window_keys", "window_values")


def capacity_for(num_tokens: int, num_reserved: int = 0) -> int:
    """Return how many tokens to allocate for `num_tokens`, in steps of 64.

    As many as will be needed where that is known. Else a sixteenth more: growth by a constant factor keeps
    the copying per token constant, and a sixteenth keeps what is allocated within an eighth of what is used
    beyond 4096 tokens.

    Args:
        num_tokens: Tokens that are there.
        num_reserved: Tokens that there will be; fewer than `num_tokens` if unknown.
    """
    wanted = num_reserved if num_reserved >= num_tokens else num_tokens + num_tokens // 16
    return max(-(-wanted // _CAPACITY_STEP), 1) * _CAPACITY_STEP


class ChunkStore:
    """K and V of one layer, after its prompt was split.

    Nothing moves when tokens are pruned: kept channels of every token lie in `kept_keys` and `values` from
    the start, dropped channels lie in ring slots until later tokens overwrite them. Until the ring has gone
    round for the first time token i lies in slot i, so the window grows with the rest until it is whole.
    Memory that no token has reached is zero.

    Attributes:
        layout: How the channels are cut into chunks.
        num_slots: Slots of the window buffer once it is whole.
        kept_keys: As in `StoreTensors`, like the next five.
        values: V of heads that see pruned tokens.
        window_keys: Dropped channels.
        window_values: V of heads of width 0.
        chunk_index: Channel of every lane.
        head_table: Where every head's chunks lie.
        addresses: A new number whenever one of these becomes another tensor.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        index: torch.Tensor,
        num_slots: int,
        batch_size: int,
        capacity: int,
        like: torch.Tensor,
    ) -> None:
        """Allocate an empty store.

        Args:
            layout: How the channels are cut into chunks.
            index: Channel of every lane `[1 or B, C + C_dropped, E]`, int32.
            num_slots: Slots of the window buffer; no more are allocated than tokens.
            batch_size: Rows.
            capacity: Tokens per row.
            like: A tensor of the dtype and device to use.
        """
        self.layout = layout
        self.chunk_index = index
        self.num_slots = num_slots
        self._has_padded_lanes = any(
            width % layout.chunk_size or (layout.head_dim - width) % layout.chunk_size
            for width in layout.widths
        )
        device, size, head_dim = like.device, layout.chunk_size, layout.head_dim
        self.head_table = torch.tensor(layout.head_table, dtype=torch.int32, device=device)
        self._value_heads = torch.tensor(layout.value_heads, dtype=torch.long, device=device)
        self._window_heads = torch.tensor(layout.window_heads, dtype=torch.long, device=device)
        self.kept_keys = like.new_zeros(batch_size, layout.num_kept_chunks, capacity, size)
        self.values = like.new_zeros(batch_size, len(layout.value_heads), capacity, head_dim)
        slots = min(num_slots, capacity)
        self.window_keys = like.new_zeros(batch_size, layout.num_dropped_chunks, slots, size)
        self.window_values = like.new_zeros(batch_size, len(layout.window_heads), slots, head_dim)
        self.addresses = new_address()

    @property
    def capacity(self) -> int:
        """Tokens per row that there is room for."""
        return self.kept_keys.shape[2]

    @property
    def tensors(self) -> StoreTensors:
        """What append and attention take, as of now: growth makes others."""
        return StoreTensors(
            self.kept_keys,
            self.values,
            self.window_keys,
            self.window_values,
            self.chunk_index,
            self.head_table,
        )

    @property
    def is_writable(self) -> bool:
        """Whether it can be written: what `torch.inference_mode()` made cannot be written outside it."""
        # Growth makes the append-only part anew, and the window only until it is whole.
        return is_writable(self.kept_keys) and is_writable(self.window_keys)

    def copy_memory(self) -> None:
        """Go on with copies of all tensors; whoever holds the old ones keeps them as they are."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.clone())
        self.addresses = new_address()

    def make_room(self, num_tokens: int, num_reserved: int = 0) -> None:
        """Grow where there is no room for `num_tokens`, see `capacity_for`."""
        if num_tokens > self.capacity:
            capacity = capacity_for(num_tokens, num_reserved)
            self.kept_keys = _grown(self.kept_keys, capacity)
            self.values = _grown(self.values, capacity)
            slots = min(self.num_slots, capacity)
            if slots > self.window_keys.shape[2]:
                self.window_keys = _grown(self.window_keys, slots)
                self.window_values = _grown(self.window_values, slots)
            self.addresses = new_address()

    def write_prompt(self, keys: torch.Tensor, values: torch.Tensor, split: Split) -> None:
        """Fill the empty store with a prompt.

        Args:
            keys: Whole prompt `[B, H_kv, S, D]`.
            values: Whole prompt `[B, H_kv, S, D]`.
            split: Which columns are tokens, and which of them the window takes.
        """
        # Block by block, so that no second copy of a long prompt's keys exists.
        tokens_per_block = max(_BLOCK_SIZE // (keys.shape[0] * keys.shape[1] * keys.shape[3]), 1)
        for start in range(0, split.num_tokens, tokens_per_block):
            stop = min(start + tokens_per_block, split.num_tokens)
            block_keys, block_values = _tokens(keys, split, start, stop), _tokens(values, split, start, stop)
            self.kept_keys[:, :, start:stop] = self._to_chunks(block_keys, kept=True)
            self.values[:, :, start:stop] = block_values.index_select(1, self._value_heads)
        source = split.window_source.clamp(max=split.num_tokens - 1)
        if split.order is not None:
            source = split.order.gather(1, source)
        self._write_window(keys, values, source, split.window_fresh)

    def append(self, keys: torch.Tensor, values: torch.Tensor, append: Append) -> None:
        """Add tokens behind each row's last one; there must be room.

        Args:
            keys: `[B, H_kv, d, D]`, zero at padding.
            values: `[B, H_kv, d, D]`, zero at padding.
            append: Where every column goes.
        """
        kept, kept_values = self._to_chunks(keys, kept=True), values.index_select(1, self._value_heads)
        rows, columns = append.row_index, append.columns
        if columns is None:
            self.kept_keys[rows, :, append.position] = kept[:, :, 0]
            self.values[rows, :, append.position] = kept_values[:, :, 0]
            self._write_slot(self.window_keys, self._to_chunks(keys, kept=False), append)
            self._write_slot(self.window_values, values.index_select(1, self._window_heads), append)
        else:
            self.kept_keys[rows[:, None], :, columns.positions] = kept.transpose(1, 2)
            self.values[rows[:, None], :, columns.positions] = kept_values.transpose(1, 2)
            source = columns.window_source.clamp(max=keys.shape[2] - 1)
            self._write_window(keys, values, source, columns.window_fresh)

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed; in place if their number stays the same."""
        same_size = rows.shape[0] == self.kept_keys.shape[0]
        if not self.is_writable:
            self.copy_memory()
        per_row = ("chunk_index",) if self.chunk_index.shape[0] > 1 else ()
        for name in (*_BUFFERS, *per_row):
            tensor = getattr(self, name)
            selected = tensor.index_select(0, rows)
            if same_size:
                tensor.copy_(selected)
            else:
                setattr(self, name, selected)
        if not same_size:
            self.addresses = new_address()

    @classmethod
    def concatenate(cls, stores: Sequence[ChunkStore], index: torch.Tensor, capacity: int) -> ChunkStore:
        """Return a store with the rows of several, in order.

        Args:
            stores: Stores of one layout, window size, dtype and device.
            index: Channel of every lane of the result `[1 or B, C + C_dropped, E]`.
            capacity: Tokens per row of the result, enough for every row.
        """
        batch_size = sum(store.kept_keys.shape[0] for store in stores)
        first = stores[0]
        joined = cls(first.layout, index, first.num_slots, batch_size, capacity, first.kept_keys)
        row = 0
        for store in stores:
            stop = row + store.kept_keys.shape[0]
            for name in _BUFFERS:
                ours, theirs = getattr(joined, name), getattr(store, name)
                length = min(ours.shape[2], theirs.shape[2])
                ours[row:stop, :, :length] = theirs[:, :, :length]
            row = stop
        return joined

    def _to_chunks(self, keys: torch.Tensor, *, kept: bool) -> torch.Tensor:
        """Bring keys `[B, H_kv, S, D]` into the order of kept or dropped chunks `[B, chunks, S, E]`.

        Lanes of padding become zero.
        """
        num_kept = self.layout.num_kept_chunks
        index = self.chunk_index[:, :num_kept] if kept else self.chunk_index[:, num_kept:]
        lanes = gather_lanes(keys.transpose(1, 2).flatten(2), index)
        if self._has_padded_lanes:
            lanes = lanes.masked_fill((index < 0)[:, None], 0)
        return lanes.transpose(1, 2)

    def _write_slot(self, buffer: torch.Tensor, new: torch.Tensor, append: Append) -> None:
        rows, slot = append.row_index, append.window_slot
        token = new[:, :, 0]
        if append.valid is not None:
            token = torch.where(append.valid[:, :, None], token, buffer[rows, :, slot])
        buffer[rows, :, slot] = token

    def _write_window(
        self, keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, fresh: torch.Tensor
    ) -> None:
        """Put columns `source` `[B, slots]` of `[B, H_kv, S, D]` into the slots that are `fresh`."""
        taken_keys, taken_values = (_gather_columns(states, source) for states in (keys, values))
        for buffer, new in (
            (self.window_keys, self._to_chunks(taken_keys, kept=False)),
            (self.window_values, taken_values.index_select(1, self._window_heads)),
        ):
            reached = buffer[:, :, : fresh.shape[1]]
            reached.copy_(torch.where(fresh[:, None, :, None], new, reached))


def _gather_columns(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Take columns `[B, n]` of `[B, H, S, D]`, each row its own: `[B, H, n, D]`."""
    return states.gather(2, columns[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def _tokens(states: torch.Tensor, split: Split, start: int, stop: int) -> torch.Tensor:
    """Take tokens `start` to `stop` of each row of a prompt `[B, H, S, D]`, zeros behind a row's last."""
    if split.order is None or split.valid is None:
        return states[:, :, start:stop]
    taken = _gather_columns(states, split.order[:, start:stop])
    # Padding may hold NaN (a row of nothing but padding attends to nothing), hence fill, not multiply.
    return taken.masked_fill(~split.valid[:, None, start:stop, None], 0)


def _grown(store: torch.Tensor, capacity: int) -> torch.Tensor:
    grown = store.new_zeros(*store.shape[:2], capacity, store.shape[3])
    grown[:, :, : store.shape[2]] = store
    return grown


@dataclass(frozen=True)
class RegionBytes:
    """Bytes of one region of the cache.

    Attributes:
        used: Channels of tokens that are there, without padding and free capacity.
        allocated: Everything held.
    """

    used: int
    allocated: int

    def __add__(self, other: RegionBytes) -> RegionBytes:
        return RegionBytes(self.used + other.used, self.allocated + other.allocated)


@dataclass(frozen=True)
class CacheMemory:
    """What a cache, or one layer of it, holds, by region.

    Attributes:
        kept_keys: Kept channels of all tokens.
        kept_values: V of heads that see pruned tokens, all tokens.
        window_keys: Dropped channels of sink and recent tokens.
        window_values: V of heads of width 0, sink and recent tokens.
        pending_keys: Whole K that waits to be split (`prune="deferred"`).
        pending_values: Whole V that waits to be split.
        dense_keys: K bytes that a dense cache uses for the same tokens. Padding is left out, except in input
            that waits to be split: how much of that is padding is not known yet.
        dense_values: V bytes of the same.
    """

    kept_keys: RegionBytes = RegionBytes(0, 0)
    kept_values: RegionBytes = RegionBytes(0, 0)
    window_keys: RegionBytes = RegionBytes(0, 0)
    window_values: RegionBytes = RegionBytes(0, 0)
    pending_keys: RegionBytes = RegionBytes(0, 0)
    pending_values: RegionBytes = RegionBytes(0, 0)
    dense_keys: int = 0
    dense_values: int = 0

    @property
    def keys(self) -> RegionBytes:
        """K of all regions."""
        return self.kept_keys + self.window_keys + self.pending_keys

    @property
    def values(self) -> RegionBytes:
        """V of all regions."""
        return self.kept_values + self.window_values + self.pending_values

    @property
    def total(self) -> RegionBytes:
        """All regions."""
        return self.keys + self.values


def pending_memory(keys: torch.Tensor, values: torch.Tensor) -> CacheMemory:
    """Count whole input that waits to be split; its padding counts, as it is held."""
    key_bytes, value_bytes = (states.numel() * states.element_size() for states in (keys, values))
    return CacheMemory(
        pending_keys=RegionBytes(key_bytes, key_bytes),
        pending_values=RegionBytes(value_bytes, value_bytes),
        dense_keys=key_bytes,
        dense_values=value_bytes,
    )


def store_memory(store: ChunkStore, num_tokens: int, num_whole_tokens: int) -> CacheMemory:
    """Count a layer's store.

    Args:
        store: The store.
        num_tokens: Tokens of all rows.
        num_whole_tokens: Those among them in sink or recent.
    """
    layout = store.layout
    all_channels = len(layout.widths) * layout.head_dim
    kept_channels = sum(layout.widths)
    size = store.kept_keys.element_size()

    def region(tensor: torch.Tensor, used: int) -> RegionBytes:
        return RegionBytes(used * size, tensor.numel() * size)

    return CacheMemory(
        kept_keys=region(store.kept_keys, num_tokens * kept_channels),
        kept_values=region(store.values, num_tokens * len(layout.value_heads) * layout.head_dim),
        window_keys=region(store.window_keys, num_whole_tokens * (all_channels - kept_channels)),
        window_values=region(
            store.window_values, num_whole_tokens * len(layout.window_heads) * layout.head_dim
        ),
        dense_keys=num_tokens * all_channels * size,
        dense_values=num_tokens * all_channels * size,
    )


def sum_memory(parts: Iterable[CacheMemory]) -> CacheMemory:
    """Add up layers."""
    total = CacheMemory()
    for part in parts:
        names = [entry.name for entry in fields(CacheMemory)]
        total = CacheMemory(**{name: getattr(total, name) + getattr(part, name) for name in names})
    return total
