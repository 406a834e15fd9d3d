"""Memory of one layer: pages for kept channels of all tokens, a window for dropped ones, byte counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from .fp8_leank import FP8, Scales, as_bytes, quantise
from .layout_leank import ChunkLayout, StoreTensors, gather_lanes
from .pages_leank import PageTables, page_sources
from .rows_leank import is_writable, new_address
from .step_leank import Append, Split

# A prompt is brought into chunk order so many numbers at a time (32 MB in half precision).
_BLOCK_SIZE = 1 << 24
_POOLS = ("kept_keys", "values"), ("window_keys", "window_values")


class ChunkStore:
    """K and V of one layer, after its prompt was split.

    Nothing moves when tokens are pruned: kept channels of every token lie in `kept_keys` and `values` from
    the start, dropped channels lie in the window until later tokens overwrite them. Pages that no token has
    reached are finite.

    Attributes:
        layout: How the channels are cut into chunks.
        tables: Pages of the rows in the four pools.
        kept_keys: As in `StoreTensors`, like the next five.
        values: V of heads that see pruned tokens.
        window_keys: Dropped channels.
        window_values: V of heads of width 0.
        chunk_index: Channel of every lane.
        head_table: Where every head's chunks lie.
        scales: What keys and values are multiplied by, in a store of FP8; else None.
        dtype: Of keys and values as they come.
        addresses: A new number whenever one of these becomes another tensor.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        index: torch.Tensor,
        tables: PageTables,
        dtype: torch.dtype,
        scales: Scales | None = None,
    ) -> None:
        """Allocate an empty store.

        Args:
            layout: How the channels are cut into chunks.
            index: Channel of every lane `[1 or B, C + C_dropped, E]`, int32, on the device to use.
            tables: Pages of the rows.
            dtype: Of keys and values.
            scales: Given, they are stored in FP8.
        """
        self.layout = layout
        self.chunk_index = index
        self.tables = tables
        self.dtype = dtype
        self.scales = scales
        device, size, head_dim = index.device, layout.chunk_size, layout.head_dim
        self.head_table = torch.tensor(layout.head_table, dtype=torch.int32, device=device)
        self._value_heads = torch.tensor(layout.value_heads, dtype=torch.long, device=device)
        self._window_heads = torch.tensor(layout.window_heads, dtype=torch.long, device=device)
        pages, window_pages = map(sum, tables.pool_runs)
        page = tables.page_size

        def pool(num_pages: int, num_rows: int, width: int) -> torch.Tensor:
            shape = (num_pages, num_rows, page, width)
            return torch.zeros(shape, dtype=dtype if scales is None else FP8, device=device)

        self.kept_keys = pool(pages, layout.num_kept_chunks, size)
        self.values = pool(pages, len(layout.value_heads), head_dim)
        self.window_keys = pool(window_pages, layout.num_dropped_chunks, size)
        self.window_values = pool(window_pages, len(layout.window_heads), head_dim)
        self.addresses = new_address()
        tables.on(device)  # now, as it must not be while a step is captured

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
            *self.tables.on(self.kept_keys.device),
            *(self.scales or (None, None)),
        )

    @property
    def is_writable(self) -> bool:
        """Whether it can be written: what `torch.inference_mode()` made cannot be written outside it."""
        # Growth makes the pools anew, and nothing else.
        return is_writable(self.kept_keys) and is_writable(self.head_table)

    def copy_memory(self) -> None:
        """Go on with copies of all tensors; whoever holds the old ones keeps them as they are."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.clone())
            elif isinstance(value, Scales):
                setattr(self, name, value.map(torch.clone))
        self.addresses = new_address()

    def move_to(self, tables: PageTables, rows: torch.Tensor | None = None) -> None:
        """Lay pages out as other tables have it; in place where the tables stay and only rows change.

        Args:
            tables: The tables; rows have room in them for all tokens.
            rows: Which of the rows so far become the rows, as `page_sources` takes it; None: the same.
        """
        if rows is None and tables is self.tables:
            return
        in_place = tables is self.tables
        pools = [
            (name, _taken(getattr(self, name), source))
            for names, runs, old_runs in zip(_POOLS, tables.pool_runs, self.tables.pool_runs, strict=True)
            for source in (page_sources(runs, old_runs, rows),)
            for name in names
        ]
        for name, pool in pools:
            if in_place:
                as_bytes(getattr(self, name)).copy_(as_bytes(pool))
            else:
                setattr(self, name, pool)
        if not in_place:
            self.tables, self.addresses = tables, new_address()
            tables.on(self.kept_keys.device)

    def write_prompt(self, keys: torch.Tensor, values: torch.Tensor, split: Split) -> None:
        """Fill the empty store with a prompt.

        Args:
            keys: Whole prompt `[B, H_kv, S, D]`.
            values: Whole prompt `[B, H_kv, S, D]`.
            split: Which columns are tokens, and which pages they fill.
        """
        # Block by block, so that no second copy of a long prompt's keys exists.
        per_page = keys.shape[1] * keys.shape[3] * self.tables.page_size
        pages_per_block = max(_BLOCK_SIZE // per_page, 1)
        num_kept, kept_pages = self.layout.num_kept_chunks, split.kept_pages
        if split.order is None and self.tables.is_even:
            num_full = keys.shape[2] // self.tables.page_size
            step = max(_BLOCK_SIZE // (per_page * keys.shape[0]), 1)
            for start in range(0, num_full, step):
                self._write_full_pages(keys, values, start, min(start + step, num_full))
            kept_pages = kept_pages.view(3, keys.shape[0], -1)[:, :, num_full:].flatten(1)
        for names, filled, lanes, heads in (
            (_POOLS[0], kept_pages, slice(num_kept), self._value_heads),
            (_POOLS[1], split.window_pages, slice(num_kept, None), self._window_heads),
        ):
            stored_keys, stored_values = (as_bytes(getattr(self, name)) for name in names)
            for rows, numbers, pages in (block.unbind() for block in torch.split(filled, pages_per_block, 1)):
                if stored_keys.shape[1]:
                    new = self._stored_keys(self._page_tokens(keys, split, rows, numbers), rows)
                    new = self._to_chunks(new, lanes, rows)
                    stored_keys.index_copy_(0, pages, new.transpose(1, 2))
                if stored_values.shape[1]:
                    new = self._stored_values(self._page_tokens(values, split, rows, numbers), rows)
                    stored_values.index_copy_(0, pages, new.index_select(2, heads).transpose(1, 2))

    def _write_full_pages(self, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> None:
        """Fill pages `start` to `stop` of every row, where all rows have as many, and all tokens are real."""
        size, batch_size = self.tables.page_size, keys.shape[0]
        tokens = slice(start * size, stop * size)
        new_keys = self._stored_keys(keys[:, :, tokens].transpose(1, 2))
        new_keys = self._to_chunks(new_keys, slice(self.layout.num_kept_chunks))
        new_values = self._stored_values(values[:, :, tokens].transpose(1, 2))
        new_values = new_values.index_select(2, self._value_heads)
        for pool, new in ((self.kept_keys, new_keys), (self.values, new_values)):
            pages = as_bytes(pool).view(batch_size, self.tables.runs[0], *pool.shape[1:])[:, start:stop]
            pages.copy_(new.view(batch_size, stop - start, size, *new.shape[2:]).transpose(2, 3))

    def append(self, keys: torch.Tensor, values: torch.Tensor, append: Append) -> None:
        """Add tokens behind each row's last one; there must be room.

        Args:
            keys: `[B, H_kv, d, D]`, zero at padding.
            values: `[B, H_kv, d, D]`, zero at padding.
            append: Where every column goes.
        """
        num_kept = self.layout.num_kept_chunks
        lanes = self._to_chunks(self._stored_keys(keys.transpose(1, 2)), slice(None))
        tokens = self._stored_values(values.transpose(1, 2))
        page, window_page, place = append.places
        as_bytes(self.kept_keys)[page, :, place] = lanes[:, :, :num_kept]
        as_bytes(self.values)[page, :, place] = tokens.index_select(2, self._value_heads)
        lanes, tokens = lanes[:, :, num_kept:], tokens.index_select(2, self._window_heads)
        if append.columns is not None and append.columns.window_columns is not None:
            rows, columns = append.columns.window_columns
            lanes, tokens, window_page, place = (
                part[rows, columns] for part in (lanes, tokens, window_page, place)
            )
        as_bytes(self.window_keys)[window_page, :, place] = lanes
        as_bytes(self.window_values)[window_page, :, place] = tokens

    def rounded(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new tokens' keys and values `[B, H_kv, d, D]` as they will be read once they are stored."""
        if self.scales is None:
            return keys, values
        stored = (self._stored_keys(keys.transpose(1, 2)), self._stored_values(values.transpose(1, 2)))
        read = (
            (states.view(FP8).float() * scale[:, None]).transpose(1, 2)
            for states, scale in zip(stored, self.scales, strict=True)
        )
        new_keys, new_values = (states.to(keys.dtype) for states in read)
        return new_keys, new_values

    def select(self, rows: torch.Tensor, tables: PageTables) -> None:
        """Keep rows, see `RowState.select`; in place if the tables stay.

        Args:
            rows: Which rows, in which order, repeats allowed.
            tables: Their tables.
        """
        if not self.is_writable:
            self.copy_memory()
        self.move_to(tables, rows)
        if self.chunk_index.shape[0] > 1:
            selected = self.chunk_index.index_select(0, rows.to(self.chunk_index.device))
            if selected.shape == self.chunk_index.shape:
                self.chunk_index.copy_(selected)
            else:
                self.chunk_index = selected
        if self.scales is not None and len(self.scales.keys) > 1:
            own = rows.to(self.chunk_index.device)
            taken = self.scales.map(lambda scale: scale.index_select(0, own))
            if taken.keys.shape == self.scales.keys.shape:
                for scale, new in zip(self.scales, taken, strict=True):
                    scale.copy_(new)
            else:
                self.scales = taken

    @classmethod
    def concatenate(
        cls, stores: Sequence[ChunkStore], index: torch.Tensor, tables: PageTables, scales: Scales | None
    ) -> ChunkStore:
        """Return a store with the rows of several, in order.

        Args:
            stores: Stores of one layout, window size, dtype and device.
            index: Channel of every lane of the result `[1 or B, C + C_dropped, E]`.
            tables: Tables of the result.
            scales: Scales of the result.
        """
        joined = cls(stores[0].layout, index, tables, stores[0].dtype, scales)
        row, first = 0, [0, 0]
        for store in stores:
            stop = row + len(store.tables.runs)
            for pool, names in enumerate(_POOLS):
                runs = tables.pool_runs[pool][row:stop]
                source = page_sources(runs, store.tables.pool_runs[pool])
                pages = slice(first[pool], first[pool] + len(source))
                for name in names:
                    as_bytes(getattr(joined, name))[pages] = as_bytes(_taken(getattr(store, name), source))
                first[pool] = pages.stop
            row = stop
        return joined

    def _stored_keys(self, states: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return keys `[N, S, H_kv, D]` as they are stored, FP8 as bytes; N are rows, or pages of these."""
        return self._stored(states, None if self.scales is None else self.scales.keys, rows)

    def _stored_values(self, states: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The same of values."""
        return self._stored(states, None if self.scales is None else self.scales.values, rows)

    def _stored(
        self, states: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor | None
    ) -> torch.Tensor:
        if scale is None:
            return states.to(self.dtype)
        if rows is not None and len(scale) > 1:
            scale = scale[rows]
        return as_bytes(quantise(states, scale[:, None]))

    def _to_chunks(
        self, states: torch.Tensor, lanes: slice, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Bring keys `[N, S, H_kv, D]` into the order of some of the chunks `[N, S, chunks, E]`.

        N are the rows, or pages of these `rows`. Lanes of padding become zero.
        """
        index = self.chunk_index[:, lanes]
        if rows is not None and index.shape[0] > 1:
            index = index[rows]
        chunks = gather_lanes(states.flatten(2), index)
        return chunks.masked_fill((index < 0)[:, None], 0) if self.layout.has_padded_lanes else chunks

    def _page_tokens(
        self, states: torch.Tensor, split: Split, rows: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Take pages of a prompt `[B, H, S, D]` as `[pages, P, H, D]`, zeros behind a row's last token."""
        page_size = self.tables.page_size
        tokens = numbers[:, None] * page_size + torch.arange(page_size, device=numbers.device)
        unused = tokens >= split.lengths[rows, None]
        tokens = tokens.masked_fill(unused, 0)
        columns = tokens if split.order is None else split.order[rows[:, None], tokens]
        taken = states.transpose(1, 2)[rows[:, None], columns]
        # Padding may hold NaN (a row of nothing but padding attends to nothing), hence fill, not multiply.
        return taken.masked_fill_(unused[:, :, None, None], 0)


def _taken(pool: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return a pool of these pages of another one, zeros where a page is -1."""
    new = (source < 0).nonzero()[:, 0] if source.device.type == "cpu" else None
    taken = as_bytes(pool).index_select(0, source.clamp(min=0).to(pool.device, non_blocking=True))
    if new is not None and len(new):
        taken.index_fill_(0, new.to(pool.device, non_blocking=True), 0)
    return taken.view(pool.dtype)


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
        other_keys: K of layers that are not pruned.
        other_values: V of the same.
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
    other_keys: RegionBytes = RegionBytes(0, 0)
    other_values: RegionBytes = RegionBytes(0, 0)
    dense_keys: int = 0
    dense_values: int = 0

    @property
    def keys(self) -> RegionBytes:
        """K of all regions."""
        return self.kept_keys + self.window_keys + self.pending_keys + self.other_keys

    @property
    def values(self) -> RegionBytes:
        """V of all regions."""
        return self.kept_values + self.window_values + self.pending_values + self.other_values

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
        dense_keys=num_tokens * all_channels * store.dtype.itemsize,
        dense_values=num_tokens * all_channels * store.dtype.itemsize,
    )


def sum_memory(parts: Iterable[CacheMemory]) -> CacheMemory:
    """Add up layers."""
    total = CacheMemory()
    for part in parts:
        names = [entry.name for entry in fields(CacheMemory)]
        total = CacheMemory(**{name: getattr(total, name) + getattr(part, name) for name in names})
    return total
