"""Storage of one layer: pages for the kept channels of all tokens, a window for the dropped ones."""

from __future__ import annotations

import torch

from .constants_leank import Constants, centre
from .fp8_leank import FP8, as_bytes
from .fp8_leank import quantise as quantise_fp8
from .int4_leank import Groups, group_chunks, group_heads, quantise, widen
from .layout_leank import ChunkLayout, StoreTensors, gather_lanes
from .memory_leank import CacheMemory, RegionBytes
from .pages_leank import PageTables, page_sources
from .rows_leank import is_writable, new_address
from .step_leank import Append, Split

# A prompt is brought into chunk order so many numbers at a time (32 MB in half precision).
_BLOCK_SIZE = 1 << 24
_POOLS = ("kept_keys", "values"), ("window_keys", "window_values")
_EXTREMES = "_extremes"  # of int4, beside each pool


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
        constants: What keys and values are stored by; with scales, in FP8.
        groups: In a store of int4, what of every pool has a least number and a step, which lie in pools of
            their own; else empty.
        dtype: Of keys and values as they come.
        pools: Names of the pools, those of the window apart.
        addresses: A new number whenever one of these becomes another tensor.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        index: torch.Tensor,
        tables: PageTables,
        dtype: torch.dtype,
        constants: Constants,
        in_int4: bool = False,
    ) -> None:
        """Allocate an empty store.

        Args:
            layout: How the channels are cut into chunks.
            index: Channel of every lane `[1 or B, C + C_dropped, E]`, int32, on the device to use.
            tables: Pages of the rows.
            dtype: Of keys and values.
            constants: What they are stored by; with scales, in FP8.
            in_int4: Whether they are stored in int4.
        """
        self.layout = layout
        self.chunk_index = index
        self.tables = tables
        self.dtype = dtype
        self.constants = constants
        device, size, head_dim = index.device, layout.chunk_size, layout.head_dim
        self.head_table = torch.tensor(layout.head_table, dtype=torch.int32, device=device)
        num_kept = layout.num_kept_chunks
        self._lanes = {"kept_keys": slice(num_kept), "window_keys": slice(num_kept, None)}
        self._heads = {
            name: torch.tensor(heads, dtype=torch.long, device=device)
            for name, heads in (("values", layout.value_heads), ("window_values", layout.window_heads))
        }
        pages, window_pages = map(sum, tables.pool_runs)

        stored, per_element = dtype if constants.key_scale is None else FP8, 1
        if in_int4:
            stored, per_element = torch.uint8, 2

        def pool(num_pages: int, num_rows: int, width: int) -> torch.Tensor:
            shape = (num_pages, num_rows, tables.page_size, -(-width // per_element))
            return torch.zeros(shape, dtype=stored, device=device)

        self.kept_keys = pool(pages, layout.num_kept_chunks, size)
        self.values = pool(pages, len(layout.value_heads), head_dim)
        self.window_keys = pool(window_pages, layout.num_dropped_chunks, size)
        self.window_values = pool(window_pages, len(layout.window_heads), head_dim)
        self.pools: tuple[tuple[str, ...], ...] = _POOLS
        self.groups: dict[str, Groups] = {}
        if in_int4:
            self.pools = tuple((*names, *(name + _EXTREMES for name in names)) for names in _POOLS)
            self.groups = {
                "kept_keys": group_chunks(layout.kept_chunks, size, device),
                "values": group_heads(len(layout.value_heads), head_dim, device),
                "window_keys": group_chunks(layout.dropped_chunks, size, device),
                "window_values": group_heads(len(layout.window_heads), head_dim, device),
            }
            for name, groups in self.groups.items():
                shape = (len(getattr(self, name)), groups.count, tables.page_size, 2)
                setattr(self, name + _EXTREMES, torch.zeros(shape, dtype=dtype, device=device))
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
            *self.constants,
            {name: (getattr(self, name + _EXTREMES), groups) for name, groups in self.groups.items()} or None,
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
            elif isinstance(value, Constants):
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
            (name, take_pages(getattr(self, name), source))
            for names, runs, old_runs in zip(self.pools, tables.pool_runs, self.tables.pool_runs, strict=True)
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
        kept_pages = split.kept_pages
        if split.order is None and self.tables.is_even:
            num_full = keys.shape[2] // self.tables.page_size
            step = max(_BLOCK_SIZE // (per_page * keys.shape[0]), 1)
            for start in range(0, num_full, step):
                self._write_full_pages(keys, values, start, min(start + step, num_full))
            kept_pages = kept_pages.view(3, keys.shape[0], -1)[:, :, num_full:].flatten(1)
        for names, filled in zip(_POOLS, (kept_pages, split.window_pages), strict=True):
            for rows, numbers, pages in (block.unbind() for block in torch.split(filled, pages_per_block, 1)):
                for name, states in zip(names, (keys, values), strict=True):
                    if getattr(self, name).shape[1]:
                        tokens = self._page_tokens(states, split, rows, numbers)
                        for pool, part in self._stored(name, tokens, rows):
                            pool.index_copy_(0, pages, part.transpose(1, 2))

    def _write_full_pages(self, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> None:
        """Fill pages `start` to `stop` of every row, where all rows have as many, and all tokens are real."""
        size, batch_size = self.tables.page_size, keys.shape[0]
        for name, states in zip(_POOLS[0], (keys, values), strict=True):
            tokens = states[:, :, start * size : stop * size].transpose(1, 2)
            for pool, part in self._stored(name, tokens):
                pages = pool.view(batch_size, self.tables.runs[0], *pool.shape[1:])[:, start:stop]
                pages.copy_(part.view(batch_size, stop - start, size, *part.shape[2:]).transpose(2, 3))

    def append(self, keys: torch.Tensor, values: torch.Tensor, append: Append) -> None:
        """Add tokens behind each row's last one; there must be room.

        Args:
            keys: `[B, H_kv, d, D]`, zero at padding.
            values: `[B, H_kv, d, D]`, zero at padding.
            append: Where every column goes.
        """
        tokens = keys.transpose(1, 2), values.transpose(1, 2)
        page, window_page, place = append.places
        for name, states in zip(_POOLS[0], tokens, strict=True):
            for pool, part in self._stored(name, states):
                pool[page, :, place] = part
        in_window = None if append.columns is None else append.columns.window_columns
        chosen = ... if in_window is None else tuple(in_window)
        for name, states in zip(_POOLS[1], tokens, strict=True):
            for pool, part in self._stored(name, states):
                pool[window_page[chosen], :, place[chosen]] = part[chosen]

    def rounded(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new tokens' keys and values `[B, H_kv, d, D]` as they will be read once they are stored."""
        key_mean, *scales = (None if own is None else own[:, :, None] for own in self.constants)
        if not self.groups:
            keys = centre(keys, key_mean)
            if scales[0] is None or scales[1] is None:
                return keys, values
            return (
                (quantise_fp8(keys, scales[0]).float() * scales[0]).to(keys.dtype),
                (quantise_fp8(values, scales[1]).float() * scales[1]).to(values.dtype),
            )
        tokens = keys.transpose(1, 2), values.transpose(1, 2)
        read = [states.new_empty(states.shape) for states in tokens]
        for name, groups in self.groups.items():
            place = 0 if name in self._lanes else 1
            codes, extremes = (part.flatten(0, 1) for _, part in self._stored(name, tokens[place]))
            numbers = widen(codes, extremes, groups)
            numbers = numbers.view(*tokens[0].shape[:2], *numbers.shape[1:])
            if place:
                read[1].index_copy_(2, self._heads[name], numbers)
            else:
                channels = self._channels(name).flatten(1).long()[:, None]
                channels = channels.expand(*numbers.shape[:2], -1)
                read[0].flatten(2).scatter_(2, channels, numbers.flatten(2))
        return read[0].transpose(1, 2), read[1].transpose(1, 2)

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
        if self.constants.is_per_row:
            taken = self.constants.take(rows.to(self.chunk_index.device))
            for constant, new in zip(self.constants, taken, strict=True):
                if constant is not None and new is not None and constant.shape == new.shape:
                    constant.copy_(new)
                elif constant is not None:
                    self.constants = taken
                    break

    def count(self, name: str, num_tokens: int, num_channels: int) -> RegionBytes:
        """Count the bytes of a pool, in which so many tokens have so many channels each."""
        pool = getattr(self, name)
        if not self.groups:
            return RegionBytes(num_tokens * num_channels * pool.itemsize, pool.nbytes)
        extremes = getattr(self, name + _EXTREMES)
        used = (
            -(-num_tokens * num_channels // 2) + num_tokens * self.groups[name].count * 2 * extremes.itemsize
        )
        return RegionBytes(used, pool.nbytes + extremes.nbytes)

    def _stored(
        self, name: str, states: torch.Tensor, rows: torch.Tensor | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys or values `[N, S, H_kv, D]` as a pool takes them, beside the tensors it is made of.

        Args:
            name: The pool's.
            states: Of N rows, or of pages of these `rows`.
            rows: See `states`.

        Returns:
            Pages of bytes or numbers `[pages, m, P, n]`, and what they are to hold `[N, S, m, n]`.
        """
        of_rows = self.constants if rows is None else self.constants.take(rows)
        key_mean, *scales = (None if own is None else own[:, None] for own in of_rows)
        is_key = name in self._lanes
        states = centre(states, key_mean) if is_key else states
        scale = scales[0 if is_key else 1]
        states = states.to(self.dtype) if scale is None else as_bytes(quantise_fp8(states, scale))
        if name in self._heads:
            states = states.index_select(2, self._heads[name])
        else:
            states = self._to_chunks(states, name, rows)
        pool = as_bytes(getattr(self, name))
        if not self.groups:
            return [(pool, states)]
        codes, extremes = quantise(states, self.groups[name])
        return [(pool, codes), (getattr(self, name + _EXTREMES), extremes)]

    def _to_chunks(self, states: torch.Tensor, name: str, rows: torch.Tensor | None) -> torch.Tensor:
        """Bring keys `[N, S, H_kv, D]` into the order of a pool's chunks `[N, S, chunks, E]`.

        N are the rows, or pages of these `rows`. Lanes of padding become zero, but for those of int4.
        """
        index = self._channels(name)
        if rows is not None and index.shape[0] > 1:
            index = index[rows]
        chunks = gather_lanes(states.flatten(2), index)
        if self.groups or not self.layout.has_padded_lanes:
            return chunks
        return chunks.masked_fill((index < 0)[:, None], 0)

    def _channels(self, name: str) -> torch.Tensor:
        """Return the channel of every lane of a pool `[1 or B, chunks, E]`, -1 of padding.

        In int4 that of its chunk's first lane instead: a zero would count among the numbers of its group.
        """
        index = self.chunk_index[:, self._lanes[name]]
        return torch.where(index < 0, index[..., :1], index) if self.groups else index

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


def take_pages(pool: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return a pool of these pages of another one, zeros where a page is -1."""
    new = (source < 0).nonzero()[:, 0] if source.device.type == "cpu" else None
    taken = as_bytes(pool).index_select(0, source.clamp(min=0).to(pool.device, non_blocking=True))
    if new is not None and len(new):
        taken.index_fill_(0, new.to(pool.device, non_blocking=True), 0)
    return taken.view(pool.dtype)


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
    value_channels, window_channels = (
        len(heads) * layout.head_dim for heads in (layout.value_heads, layout.window_heads)
    )
    return CacheMemory(
        kept_keys=store.count("kept_keys", num_tokens, kept_channels),
        kept_values=store.count("values", num_tokens, value_channels),
        window_keys=store.count("window_keys", num_whole_tokens, all_channels - kept_channels),
        window_values=store.count("window_values", num_whole_tokens, window_channels),
        dense_keys=num_tokens * all_channels * store.dtype.itemsize,
        dense_values=num_tokens * all_channels * store.dtype.itemsize,
    )
