"""A layer's memory as append and attention take it: tokens written to its pages, and rows read densely."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .codec_leank import Codec
from .constants_leank import Constants, centre
from .fp8_leank import as_bytes, reread
from .layout_leank import ChunkLayout, Heads, gather_lanes, head_index

POOLS = ("kept_keys", "values"), ("window_keys", "window_values")
"""Pools of all tokens, and those of the window; of each the first is of chunks of keys."""


class StoreTensors(NamedTuple):
    """The memory of one layer and what says how to read it, as append and attention take them.

    Token i of a row lies in page i // P of it, at place i % P. The first dimension of the four pools may be
    strided. `key_mean` and the scales are those of `Constants`.
    """

    kept_keys: torch.Tensor  # kept channels of every token `[pages, C, P, E]`
    values: torch.Tensor  # kept channels of V of every token `[pages, C_values, P, F]`
    window_keys: torch.Tensor  # dropped channels of whole tokens `[window_pages, C_dropped, P_window, E]`
    window_values: torch.Tensor  # those of V `[window_pages, C_dropped_values, P_window, F]`
    chunk_index: torch.Tensor  # channel of every lane, `ChunkLayout.chunk_index` `[1 or B, C + C_dropped, E]`
    head_table: torch.Tensor  # where every head's chunks lie, `ChunkLayout.head_table`, int32
    page_table: torch.Tensor  # page of every row's tokens, P at a time, in the first pool `[B, n]`, int32
    window_table: torch.Tensor  # the same in the window `[B, n_window]`; of meaning where a token is whole
    key_mean: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    codecs: Mapping[str, Codec] | None = None  # of the pools by name; None: numbers as they come, or FP8

    @property
    def constants(self) -> Constants:
        """What keys and values are stored by."""
        return Constants(self.key_mean, self.key_scale, self.value_scale)

    def codec(self, name: str) -> Codec:
        """Return a pool's codec, by the pool's name."""
        return Codec(getattr(self, name).dtype) if self.codecs is None else self.codecs[name]

    def read(self, name: str, pick: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what `pick` takes of a pool: its numbers, without scales per channel.

        It takes `[pages, chunks, P, n]`, FP8 as bytes; chunks stay the second dimension.
        """
        return self.codec(name).read(pick(as_bytes(getattr(self, name))))

    def encode(
        self, name: str, states: torch.Tensor, layout: ChunkLayout, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return what a pool is to hold of tokens `[N, S, chunks, n]`, FP8 as bytes.

        Keys or values `[N, S, H_kv, D]` are of N rows, or of pages of these `rows`.
        """
        codec, num_kept = self.codec(name), layout.num_kept_chunks
        constants = self.constants if rows is None else self.constants.take(rows)
        key_mean, *scales = (None if own is None else own[:, None] for own in constants)
        if name.endswith("keys"):
            index = self.chunk_index[:, slice(num_kept) if name == "kept_keys" else slice(num_kept, None)]
            if rows is not None and len(index) > 1:
                index = index[rows]
            gather = codec.gather if layout.has_padded_lanes else gather_lanes
            numbers = gather(codec.round(centre(states, key_mean), scales[0]).flatten(2), index)
        else:
            rounded = codec.round(states, scales[1])
            per_head = layout.head_dim // layout.value_chunk
            chunks = rounded.reshape(*rounded.shape[:3], per_head, layout.value_chunk).flatten(2, 3)
            numbers = chunks[:, :, value_index(name, layout)]
        return codec.pack(numbers)

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: ChunkLayout,
        places: tuple[torch.Tensor, torch.Tensor],
        window_places: tuple[torch.Tensor, torch.Tensor],
        entering: Any = ...,
    ) -> None:
        """Write keys and values of N rows, `[N, S, H_kv, D]` each, to pages, in place.

        `places` are the page of every token, and its place there, each `[N, S]`; `window_places` the same in
        the window, of the tokens that enter it, which `entering` selects.
        """
        regions = zip(POOLS, (places, window_places), (..., entering), strict=True)
        for names, (page, place), which in regions:
            for name, states in zip(names, (keys, values), strict=True):
                pool = as_bytes(getattr(self, name))
                if pool.numel():
                    pool[page, :, place] = self.encode(name, states, layout)[which]

    def rounded(
        self, keys: torch.Tensor, values: torch.Tensor, layout: ChunkLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens' keys and values `[N, H_kv, S, D]` as they will be read once they are stored."""
        if self.codecs is None:  # every number is rounded by itself, wherever it will lie
            key_mean, *scales = (None if own is None else own[:, :, None] for own in self.constants)
            return reread(centre(keys, key_mean), scales[0]), reread(values, scales[1])
        (num_rows, _, num_tokens, _), device = keys.shape, keys.device
        # A page for every row's tokens.
        page, place = torch.meshgrid(
            torch.arange(num_rows, device=device), torch.arange(num_tokens, device=device), indexing="ij"
        )
        store = self.map_memory(
            lambda pool: pool.new_zeros(num_rows, pool.shape[1], num_tokens, pool.shape[3])
        )
        store = store._replace(page_table=page[:, :1], window_table=page[:, :1])
        store.write(keys.transpose(1, 2), values.transpose(1, 2), layout, (page, place), (page, place))
        rows = (StoredRow(store, layout, row, num_tokens, 0, 0).dense(keys.dtype) for row in range(num_rows))
        read_keys, read_values = zip(*rows, strict=True)
        return torch.stack(read_keys).transpose(1, 2), torch.stack(read_values).transpose(1, 2)

    def map_memory(self, change: Callable[[torch.Tensor], torch.Tensor]) -> StoreTensors:
        """Return the same layout with `change` made to K and V of all regions."""
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in self._fields[:4]}
        return self._replace(**changed)


def value_index(name: str, layout: ChunkLayout) -> Heads:
    """Return what selects a pool's chunks of V among all, `[H_kv * D / F]`."""
    chunks = layout.kept_value_index if name == "values" else layout.dropped_value_index
    return head_index(chunks)


@dataclass(frozen=True, eq=False)
class StoredRow:
    """One row of a store, to be read densely: `length` tokens, `pruned` ones behind the sink among them."""

    store: StoreTensors
    layout: ChunkLayout
    row: int
    length: int
    pruned: int
    sink_size: int

    @cached_property
    def whole(self) -> torch.Tensor:
        """Numbers of whole tokens `[w]`."""
        device, recent = self.store.window_keys.device, self.sink_size + self.pruned
        sink = torch.arange(min(self.length, self.sink_size), device=device)
        return torch.cat([sink, torch.arange(min(recent, self.length), self.length, device=device)])

    def dense(self, dtype: torch.dtype, *, window_alone: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all heads, each `[tokens, H_kv, D]`: zeros in the place of what is pruned.

        With `window_alone` what the window holds of whole tokens, all that heads of width 0 see.
        """
        layout, store, device = self.layout, self.store, self.whole.device
        tokens = torch.arange(len(self.whole) if window_alone else self.length, device=device)
        size, num_lanes = (len(layout.widths), layout.head_dim), layout.num_kept_chunks * layout.chunk_size
        num_channels = math.prod(size)
        channels = self._own(store.chunk_index).flatten().long()
        channels = torch.where(channels < 0, num_channels, channels)
        # One channel more takes lanes of padding.
        keys = store.values.new_zeros(len(tokens), num_channels + layout.has_padded_lanes, dtype=dtype)
        values = keys.new_zeros(len(tokens), num_channels // layout.value_chunk, layout.value_chunk)
        if not window_alone:
            keys.index_copy_(1, channels[:num_lanes], self._take("kept_keys", tokens).flatten(1).to(dtype))
            values[:, value_index("values", layout)] = self._take("values", tokens).to(dtype)
        place = (tokens if window_alone else self.whole)[:, None]
        keys[place, channels[num_lanes:]] = self._take("window_keys", self.whole).flatten(1).to(dtype)
        dropped = torch.tensor(layout.dropped_value_index, dtype=torch.long, device=device)
        values[place, dropped] = self._take("window_values", self.whole).to(dtype)
        keys, values = (part.view(len(tokens), *size) for part in (keys[:, :num_channels], values))
        for states, scale in ((keys, store.key_scale), (values, store.value_scale)):
            if scale is not None:
                states.mul_(self._own(scale))
        return keys, values

    def _take(self, name: str, tokens: torch.Tensor) -> torch.Tensor:
        """Copy tokens of the row as a pool holds them `[n, chunks, E or F]`."""
        table = self.store.page_table if name in POOLS[0] else self.store.window_table
        page_size = getattr(self.store, name).shape[2]
        pages = table[self.row].long()[tokens // page_size]
        return self.store.read(name, lambda pool: pool[pages, :, tokens % page_size])

    def _own(self, states: torch.Tensor) -> torch.Tensor:
        """Return the row's of what is `[1 or B, …]`."""
        return states[self.row if len(states) > 1 else 0]
