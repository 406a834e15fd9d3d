"""Plan of one forward pass: which columns are prompt, where new tokens go in the cache, what they see.

Integers known to the host and index tensors, worked out once for all layers of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from .layout_leank import StoreTensors
from .pages_leank import PageTables


@dataclass(frozen=True)
class Split:
    """A prefill that becomes sink, pruned and recent.

    Attributes:
        order: Columns of each row's real tokens, in order, padding last `[B, n]`; None without padding.
        lengths: Tokens of every row `[B]`.
        kept_pages: Row, number in the row and page of every page that is filled `[3, pages]`.
        window_pages: The same in the window `[3, window_pages]`.
        tables: Pages of all rows.
    """

    order: torch.Tensor | None
    lengths: torch.Tensor
    kept_pages: torch.Tensor
    window_pages: torch.Tensor
    tables: PageTables


@dataclass(frozen=True)
class StoredView:
    """Where stored tokens lie and which of them query columns see; what the plain torch path needs of a step.

    Masks are `[B, 1, 1, q, …]`, q being 1 where all columns see the same.

    Attributes:
        pages: Pages of every row `[B, n]`; None where a pool is `[B, n]` of them as it lies, or begins so.
        num_pages: n (host).
        hidden_tokens: Tokens that a column does not see `[B, 1, 1, q, n * P]`.
        window_pages: Window pages of every row `[B, m]`; None as with `pages`.
        num_window_pages: m (host).
        hidden_places: Places of those that hold no whole token `[B, 1, 1, q, m * P]`.
        place_tokens: The token of every other place, any token in others `[B, 1, 1, 1, m * P]`.
    """

    pages: torch.Tensor | None
    num_pages: int
    hidden_tokens: torch.Tensor
    window_pages: torch.Tensor | None
    num_window_pages: int
    hidden_places: torch.Tensor
    place_tokens: torch.Tensor


def view_tables(
    store: StoreTensors, seen: torch.Tensor, pruned: torch.Tensor, sink_size: int, max_length: int
) -> StoredView:
    """Say what columns see of a store, from its tables alone.

    Args:
        store: The store.
        seen: Tokens that a column sees `[B, q]`.
        pruned: Pruned ones among them `[B, q]`.
        sink_size: Tokens at the front that are never pruned.
        max_length: Upper bound of `seen` (host).
    """
    page_size, window_size = store.kept_keys.shape[2], store.window_keys.shape[2]
    count, num_window = -(-max_length // page_size), -(-max_length // window_size)
    pages = store.page_table[:, :count].long()
    windows = store.window_table[:, :num_window].long()
    count, num_window = pages.shape[1], windows.shape[1]  # a loose bound may be beyond the tables
    numbers = torch.arange(num_window, device=seen.device).expand_as(windows)
    view = _stored_view(seen, pruned, sink_size, pages, count, page_size, windows, numbers, window_size)
    # Elsewhere tables may hold anything.
    used = ~view.hidden_tokens.all(3).view(len(seen), count, page_size).all(-1)
    held = ~view.hidden_places.all(3).view(len(seen), num_window, window_size).all(-1)
    return replace(view, pages=torch.where(used, pages, 0), window_pages=torch.where(held, windows, 0))


def view_runs(
    tables: PageTables, seen: torch.Tensor, pruned: torch.Tensor, sink_size: int, max_length: int
) -> StoredView:
    """Say what columns see of a store with these tables, of whose window it is known what it holds.

    Args:
        tables: Tables of the store.
        seen: As in `view_tables`, like the rest.
        pruned: `[B, q]`.
        sink_size: Sink.
        max_length: Upper bound.
    """
    count = -(-max_length // tables.page_size)
    numbers = tables.window_numbers(seen[:, -1])
    pages = windows = None
    run = tables.runs[0]
    if len(tables.runs) > 1 and tables.is_even and 4 * run <= 5 * count:
        count = run  # what is beyond is less than what a copy of the rest would cost
    elif len(tables.runs) > 1:
        pages, window = (table.long() for table in tables.on(seen.device))
        pages, windows = pages[:, :count], window.gather(1, numbers.clamp(min=0).long())
    size = tables.page_size
    return _stored_view(seen, pruned, sink_size, pages, count, size, windows, numbers, size)


def _stored_view(
    seen: torch.Tensor,
    pruned: torch.Tensor,
    sink_size: int,
    pages: torch.Tensor | None,
    num_pages: int,
    page_size: int,
    window_pages: torch.Tensor | None,
    numbers: torch.Tensor,
    window_size: int,
) -> StoredView:
    device, num_tokens = seen.device, num_pages * page_size
    end, first = seen[..., None], sink_size + pruned[..., None]  # [B, q, 1]
    place = torch.arange(window_size, device=device)
    tokens = (numbers[:, None, :, None] * window_size + place).flatten(2)  # [B, 1, m * P]
    hidden = (tokens < 0) | (tokens >= end) | ((tokens >= sink_size) & (tokens < first))
    return StoredView(
        pages=pages,
        num_pages=num_pages,
        hidden_tokens=(torch.arange(num_tokens, device=device) >= end)[:, None, None],
        window_pages=window_pages,
        num_window_pages=numbers.shape[1],
        hidden_places=hidden[:, None, None],
        place_tokens=tokens.clamp(0, num_tokens - 1).long()[:, None, None],
    )


@dataclass(frozen=True)
class Columns:
    """Where several new columns go, and what they attend to where they are not stored yet.

    Attributes:
        positions: Place of every column in its row `[B, d]`. Padding goes behind the row's tokens, where
            nothing is read and the next token overwrites it.
        stored: Tokens of every row that are stored already, and pruned ones among them, as the columns see it
            `[2, B]`.
        window_columns: Rows and columns that enter the window, each `[m]`; None: all.
    """

    positions: torch.Tensor
    stored: torch.Tensor
    window_columns: torch.Tensor | None

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """`stored`, row by row; the device is asked once for all layers."""
        lengths, pruned = self.stored.tolist()
        return list(zip(lengths, pruned, strict=True))


@dataclass(frozen=True)
class Append:
    """Tokens that decoding adds, and what they attend to.

    Attributes:
        valid: Real tokens among the new columns `[B, d]`; None without padding.
        seen: Tokens of its row that a column sees once all are stored, itself among them; in a column of
            padding those of the column before `[B, d]`, int32.
        pruned: Pruned ones among them `[B, d]`, int32.
        max_length: Upper bound of `seen` (host).
        sink_size: Sink.
        tables: Pages of all rows.
        columns: Set for several columns; None for one.
    """

    valid: torch.Tensor | None
    seen: torch.Tensor
    pruned: torch.Tensor
    max_length: int
    sink_size: int
    tables: PageTables
    columns: Columns | None = None
    _plans: list[torch.Tensor] = field(default_factory=list, init=False, compare=False, repr=False)

    @cached_property
    def view(self) -> StoredView:
        """Where what a column sees lies, worked out once for all layers."""
        return view_runs(self.tables, self.seen, self.pruned, self.sink_size, self.max_length)

    @cached_property
    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Page, window page, and place in both of every new column, each `[B, d]`."""
        if self.columns is not None:
            position = self.columns.positions
        else:
            position = (self.seen - (1 if self.valid is None else self.valid.int())).long()
        number = position // self.tables.page_size
        page, window_page = (table.gather(1, number).long() for table in self.tables.on(self.seen.device))
        return page, window_page, position % self.tables.page_size

    def plan(self, make: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """Return the kernel's plan of this step, made by the first layer that asks."""
        if not self._plans:
            self._plans.append(make(self.seen, self.pruned, self.sink_size))
        return self._plans[0]


@dataclass(frozen=True)
class Step:
    """One forward pass: `num_prefill` columns attend densely, then `num_decode` columns decode.

    Attributes:
        start: Columns the cache held before.
        num_prefill: Columns that belong to the prompt.
        num_decode: Columns after them.
        split: Set where the prompt is split in this pass, between the two.
        append: Set where `num_decode` is not 0.
    """

    start: int
    num_prefill: int
    num_decode: int
    split: Split | None
    append: Append | None
    _copies: dict[torch.device, Step] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_columns(self) -> int:
        """Columns of the forward pass."""
        return self.num_prefill + self.num_decode

    def to(self, device: torch.device) -> Step:
        """Return the step with its tensors on `device`; copied once per device."""
        reference = self.append.seen if self.append else self.split.lengths if self.split else None
        if reference is None or reference.device == device:
            return self
        if device not in self._copies:
            self._copies[device] = replace(
                self, split=_moved(self.split, device), append=_moved(self.append, device), _copies={}
            )
        return self._copies[device]


_Part = TypeVar("_Part", Split, Append, Columns)


def _moved(part: _Part | None, device: torch.device) -> _Part | None:
    if part is None:
        return None
    values = {entry.name: getattr(part, entry.name) for entry in fields(part)}
    moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)}
    if isinstance(part, Append):
        moved["columns"] = _moved(part.columns, device)
    return replace(part, **moved)
