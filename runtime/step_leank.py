"""Forward-pass plan: which columns are prompt, where new tokens are stored, what they attend to.

Integers known to the host and index tensors, worked out once for all layers of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from .pages_leank import PageList, PageTables


@dataclass(frozen=True)
class Split:
    """A prefill that becomes sink, pruned and recent."""

    real: torch.Tensor | None  # columns of the prompt that are no padding `[B, S]`, bool; None if all are
    order: torch.Tensor | None  # columns of each row's tokens, in order, padding last `[B, n]`; None without
    lengths: torch.Tensor  # tokens of every row `[B]`
    kept_pages: torch.Tensor  # row, number in the row and page of every page that is filled `[3, pages]`
    window_pages: torch.Tensor  # the same in the window `[3, window_pages]`
    tables: PageTables  # pages of all rows


@dataclass(frozen=True)
class StoredView:
    """Where stored tokens lie and which of them query columns see: what plain torch needs of a step."""

    kept: PageList  # pages of every row
    window: PageList  # its window pages
    hidden_tokens: torch.Tensor  # tokens of `kept` that a column does not see `[B, 1, 1, q or 1, n * P]`
    hidden_places: torch.Tensor  # places of `window` without a whole token for it `[B, 1, 1, q or 1, m * P]`
    place_tokens: torch.Tensor  # the token of every other place, any token in others `[B, 1, 1, m * P]`


def make_view(
    kept: PageList,
    window: PageList,
    numbers: torch.Tensor,
    page_sizes: tuple[int, int],
    seen: torch.Tensor,
    pruned: torch.Tensor,
    sink_size: int,
) -> StoredView:
    """Say what columns that see `seen` tokens, `pruned` ones among them `[B, q]`, see of these pages.

    `numbers` says which page of its row every window page holds `[B or 1, m]`, -1 for none; `page_sizes` are
    the tokens of a page of both pools.
    """
    num_tokens = kept.most(len(seen)) * page_sizes[0]
    place = torch.arange(page_sizes[1], device=seen.device)
    tokens = (numbers[:, :, None] * page_sizes[1] + place).flatten(1)  # [B or 1, m * P]
    token = torch.arange(num_tokens, device=seen.device)
    return StoredView(
        kept=kept,
        window=window,
        hidden_tokens=hidden_tokens(token[None, None], seen, pruned)[:, None, None],
        hidden_places=hidden_tokens(tokens[:, None], seen, pruned, sink_size)[:, None, None],
        place_tokens=tokens.clamp(0, num_tokens - 1).long()[:, None, None],
    )


def hidden_tokens(
    tokens: torch.Tensor, seen: torch.Tensor, pruned: torch.Tensor, sink_size: int | None = None
) -> torch.Tensor:
    """Say which tokens `[B or 1, 1, …]` a column does not see, or given `sink_size` not whole `[B, q, …]`."""
    end, behind = (counts.view(*counts.shape, *(1,) * (tokens.ndim - 2)) for counts in (seen, pruned))
    hidden = tokens >= end
    if sink_size is None:
        return hidden
    return hidden | (tokens < 0) | ((tokens >= sink_size) & (tokens < sink_size + behind))


@dataclass(frozen=True)
class Columns:
    """Where several new columns go, and what they attend to where they are not stored yet."""

    # Place of every column in its row `[B, d]`. Padding goes behind the row's tokens, where nothing is read
    # and the next token overwrites it.
    positions: torch.Tensor
    stored: torch.Tensor  # tokens of every row that are stored, and pruned ones that columns see `[2, B]`
    window_columns: torch.Tensor | None  # rows and columns that enter the window `[2, m]`; None: all

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """`stored`, row by row; the device is asked once for all layers."""
        lengths, pruned = self.stored.tolist()
        return list(zip(lengths, pruned, strict=True))


@dataclass(frozen=True)
class Append:
    """Tokens that decoding adds, and what they attend to."""

    valid: torch.Tensor | None  # real tokens among the new columns `[B, d]`; None without padding
    # Tokens of its row that a column sees once all are stored, itself among them; in a column of padding
    # those of the column before `[B, d]`, int32.
    seen: torch.Tensor
    pruned: torch.Tensor  # pruned ones among them `[B, d]`, int32
    bounds: Sequence[int]  # upper bound of `seen` in every row (host)
    sink_size: int
    tables: PageTables  # pages of all rows
    columns: Columns | None = None  # set for several columns
    _plans: list[torch.Tensor] = field(default_factory=list, init=False, compare=False, repr=False)

    @cached_property
    def view(self) -> StoredView:
        """Where what a column sees lies, worked out once for all layers."""
        kept, window = self.tables.lists(self.bounds, self.seen.device)
        numbers = self.tables.window_numbers(self.seen[:, -1])[:, : window.most(len(self.seen))]
        sizes = (self.tables.page_size,) * 2
        return make_view(kept, window, numbers, sizes, self.seen, self.pruned, self.sink_size)

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
    """One forward pass: `num_prefill` columns attend densely, then `num_decode` columns decode."""

    start: int  # columns that the cache held before
    num_prefill: int
    num_decode: int
    split: Split | None  # set where the prompt is split in this pass, between the two
    append: Append | None  # set where `num_decode` is not 0
    _copies: dict[torch.device, Step] = field(default_factory=dict, compare=False, repr=False)

    def to(self, device: torch.device) -> Step:
        """Return the step with its tensors on `device`; copied once per device."""
        reference = self.append.seen if self.append else self.split.lengths if self.split else None
        if reference is None or reference.device == device:
            return self
        if device not in self._copies:
            split, append = _moved(self.split, device), _moved(self.append, device)
            self._copies[device] = replace(self, split=split, append=append, _copies={})
        return self._copies[device]


def _moved(part: Any, device: torch.device) -> Any:
    """Return a tensor, or what holds tensors, on a device; anything else as it is."""
    if isinstance(part, torch.Tensor):
        return part.to(device)
    if not isinstance(part, Split | Append | Columns):
        return part
    held = {entry.name: getattr(part, entry.name) for entry in fields(part) if entry.init}
    return type(part)(**{name: _moved(value, device) for name, value in held.items()})
