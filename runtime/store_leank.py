"""Storage of one layer: pages for the kept channels of all tokens, a window for the dropped ones."""

from __future__ import annotations

from typing import Any

import torch

from .codec_leank import Codec, int4_codecs
from .constants_leank import Constants
from .fp8_leank import FP8, as_bytes
from .layout_leank import ChunkLayout
from .memory_leank import CacheMemory, RegionBytes
from .pages_leank import PageTables, page_sources
from .rows_leank import is_writable
from .step_leank import Append, Split
from .stored_leank import POOLS, StoreTensors

# A prompt is brought into chunk order so many numbers at a time (32 MB in half precision).
_BLOCK_SIZE = 1 << 24


class ChunkStore:
    """K and V of one layer, after its prompt was split. Pages that no token has reached are finite."""

    def __init__(
        self,
        layout: ChunkLayout,
        index: torch.Tensor,
        tables: PageTables,
        dtype: torch.dtype,
        constants: Constants,
        kv_dtype: str = "auto",
    ) -> None:
        """Allocate an empty store by `index`, every lane's channel `[1 or B, C + C_dropped, E]`, int32."""
        self.layout = layout
        self.tables = tables  # pages of the rows in the four pools
        self.dtype = dtype  # of keys and values as they come
        self.kv_dtype = kv_dtype
        device = index.device
        table = torch.tensor(layout.head_table, dtype=torch.int32, device=device)
        codecs = int4_codecs(dtype, layout, device) if kv_dtype == "int4" else None
        plain = Codec(FP8 if kv_dtype == "fp8" else dtype)
        sizes = {
            "kept_keys": (layout.num_kept_chunks, layout.chunk_size),
            "values": (len(layout.kept_value_index), layout.value_chunk),
            "window_keys": (layout.num_dropped_chunks, layout.chunk_size),
            "window_values": (len(layout.dropped_value_index), layout.value_chunk),
        }
        pools = []
        for names, runs in zip(POOLS, tables.pool_runs, strict=True):
            for name in names:
                chunks, width, stored = (codecs[name] if codecs else plain).pool_of(*sizes[name])
                size = (sum(runs), chunks, tables.page_size, width)
                pools.append(torch.zeros(size, dtype=stored, device=device))
        # What append and attention take. Another one whenever a tensor becomes another, like `addresses`.
        self.tensors = StoreTensors._make([*pools, index, table, *tables.on(device), *constants, codecs])
        self.addresses = object()

    def copy_memory(self) -> None:
        """Go on with copies of all tensors; whoever holds the old ones keeps them as they are."""
        copies = (own.clone() if isinstance(own, torch.Tensor) else own for own in self.tensors)
        self.tensors, self.addresses = StoreTensors._make(copies), object()

    def move_to(self, tables: PageTables, rows: torch.Tensor | None = None) -> None:
        """Make writable what is stored, with its pages as these tables have them; in place if they stay.

        `rows` tells which of the rows so far become the rows, as `page_sources` takes it; None: the same.
        """
        # What inference mode made cannot be written outside it. Growth makes the pools anew, nothing else.
        if not (is_writable(self.tensors.kept_keys) and is_writable(self.tensors.head_table)):
            self.copy_memory()
        if rows is None and tables is self.tables:
            return
        pools: dict[str, Any] = {
            name: take_pages(getattr(self.tensors, name), source)
            for names, runs, old_runs in zip(POOLS, tables.pool_runs, self.tables.pool_runs, strict=True)
            for source in (page_sources(runs, old_runs, rows),)
            for name in names
        }
        if tables is self.tables:
            for name, pool in pools.items():
                as_bytes(getattr(self.tensors, name)).copy_(as_bytes(pool))
            return
        page_table, window_table = tables.on(self.tensors.kept_keys.device)
        self.tensors = self.tensors._replace(**pools, page_table=page_table, window_table=window_table)
        self.tables, self.addresses = tables, object()

    def write_prompt(self, keys: torch.Tensor, values: torch.Tensor, split: Split) -> None:
        """Fill the empty store with a prompt's keys and values, `[B, H_kv, S, D]` each."""
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
        store = self.tensors
        for names, filled in zip(POOLS, (kept_pages, split.window_pages), strict=True):
            for rows, numbers, pages in (block.unbind() for block in torch.split(filled, pages_per_block, 1)):
                for name, states in zip(names, (keys, values), strict=True):
                    pool = as_bytes(getattr(store, name))
                    if pool.numel():
                        tokens = self._page_tokens(states, split, rows, numbers)
                        part = store.encode(name, tokens, self.layout, rows)
                        pool.index_copy_(0, pages, part.transpose(1, 2))

    def _write_full_pages(self, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> None:
        """Fill pages `start` to `stop` of every row, where all rows have as many, and all tokens are real."""
        size, batch_size = self.tables.page_size, keys.shape[0]
        for name, states in zip(POOLS[0], (keys, values), strict=True):
            tokens = states[:, :, start * size : stop * size].transpose(1, 2)
            pool = as_bytes(getattr(self.tensors, name))
            if pool.numel():
                part = self.tensors.encode(name, tokens, self.layout)
                pages = pool.view(batch_size, self.tables.runs[0], *pool.shape[1:])[:, start:stop]
                pages.copy_(part.view(batch_size, stop - start, size, *part.shape[2:]).transpose(2, 3))

    def append(self, keys: torch.Tensor, values: torch.Tensor, append: Append) -> None:
        """Add tokens `[B, H_kv, d, D]`, zero at padding, behind each row's last one; there must be room."""
        page, window_page, place = append.places
        columns = None if append.columns is None else append.columns.window_columns
        entering = ... if columns is None else tuple(columns)
        window = window_page[entering], place[entering]
        tokens = keys.transpose(1, 2), values.transpose(1, 2)
        self.tensors.write(*tokens, self.layout, (page, place), window, entering)

    def select(self, rows: torch.Tensor, tables: PageTables) -> None:
        """Keep rows in this order, repeats allowed, see `RowState.select`; in place if the tables stay."""
        self.move_to(tables, rows)
        index, constants = self.tensors.chunk_index, self.tensors.constants
        if any(own is not None and len(own) > 1 for own in (index, *constants)):
            rows = rows.to(index.device)

        def take(own: torch.Tensor) -> torch.Tensor:
            if len(own) == 1:
                return own
            taken = own.index_select(0, rows)
            return own.copy_(taken) if taken.shape == own.shape else taken

        self.tensors = self.tensors._replace(chunk_index=take(index), **constants.map(take)._asdict())

    def memory(self, num_tokens: int, num_whole_tokens: int) -> CacheMemory:
        """Count bytes, given the tokens of all rows, and those among them in sink or recent."""
        layout = self.layout
        all_channels, num_kept = len(layout.widths) * layout.head_dim, sum(layout.widths)
        num_values = len(layout.kept_value_index) * layout.value_chunk

        def region(name: str, tokens: int, channels: int) -> RegionBytes:
            used = self.tensors.codec(name).count(tokens, channels)
            return RegionBytes(used, getattr(self.tensors, name).nbytes)

        dense = num_tokens * all_channels * self.dtype.itemsize
        return CacheMemory(
            kept_keys=region("kept_keys", num_tokens, num_kept),
            kept_values=region("values", num_tokens, num_values),
            window_keys=region("window_keys", num_whole_tokens, all_channels - num_kept),
            window_values=region("window_values", num_whole_tokens, all_channels - num_values),
            dense_keys=dense,
            dense_values=dense,
        )

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
