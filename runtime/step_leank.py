"""Plan of one forward pass: which columns are prompt, where new tokens go in the cache, what they see.

Integers known to the host and index tensors, worked out once for all layers of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch


def window_tokens(lengths: torch.Tensor, sink_size: int, num_slots: int, max_length: int) -> torch.Tensor:
    """Say which token every slot of the window buffer holds.

    Token i lies in slot i while i < sink_size, else in slot sink_size + (i - sink_size) mod ring size,
    so a slot holds the last token that maps to it. Slots that no row has reached need not be there.

    Args:
        lengths: Tokens per row `[B]`.
        sink_size: Slots at the front that are never overwritten.
        num_slots: Sink and ring slots together.
        max_length: Upper bound of `lengths` (host).

    Returns:
        Token numbers, -1 for a slot not written yet `[B, min(num_slots, max_length)]`.
    """
    ring_size = num_slots - sink_size
    slots = torch.arange(min(num_slots, max_length), device=lengths.device, dtype=lengths.dtype)
    last = lengths[:, None] - 1
    rounds = (last - slots).div(ring_size, rounding_mode="floor")
    tokens = torch.where(slots < sink_size, slots.expand_as(rounds), slots + rounds * ring_size)
    return torch.where(slots <= last, tokens, -1)


@dataclass(frozen=True)
class Split:
    """A prefill that becomes sink, pruned and recent.

    Attributes:
        order: Columns of each row's real tokens, in order, padding last `[B, n]`; None without padding.
        valid: Where `order` names a real token `[B, n]`; None without padding.
        num_tokens: n, the longest row (host).
        num_reserved: Tokens that the longest row will have; 0 if unknown (host).
        window_source: Token that every window slot takes `[B, slots]`, as far as tokens reach.
        window_fresh: Where a slot takes one `[B, slots]`.
    """

    order: torch.Tensor | None
    valid: torch.Tensor | None
    num_tokens: int
    num_reserved: int
    window_source: torch.Tensor
    window_fresh: torch.Tensor


@dataclass(frozen=True)
class StoredView:
    """Which stored tokens one query column sees, as masks; what the plain torch path needs of a step.

    Attributes:
        hidden_tokens: Tokens of the append-only store beyond a row's length `[B, 1, 1, n]`.
        hidden_slots: Window slots without a token in sink or recent `[B, 1, 1, slots]`.
        slot_tokens: The token of every other slot, 0 in hidden ones `[B, 1, 1, slots]`.
    """

    hidden_tokens: torch.Tensor
    hidden_slots: torch.Tensor
    slot_tokens: torch.Tensor


def stored_view(
    lengths: torch.Tensor, pruned_lengths: torch.Tensor, sink_size: int, num_slots: int, max_length: int
) -> StoredView:
    """Say what rows of `lengths` `[B]` tokens, `pruned_lengths` `[B]` of them pruned, show to a query."""
    tokens = window_tokens(lengths, sink_size, num_slots, max_length)
    whole = (tokens >= 0) & ((tokens < sink_size) | (tokens >= sink_size + pruned_lengths[:, None]))
    return StoredView(
        hidden_tokens=(torch.arange(max_length, device=lengths.device) >= lengths[:, None])[:, None, None],
        hidden_slots=~whole[:, None, None],
        slot_tokens=torch.where(whole, tokens, 0).long()[:, None, None],
    )


@dataclass(frozen=True)
class Columns:
    """Where several new columns go.

    Attributes:
        positions: Place of every column in the append-only store `[B, d]`. Padding goes beyond the row's
            length, where nothing is read and the next token overwrites it.
        window_source: New column that every window slot takes `[B, slots]`, as far as tokens reach.
        window_fresh: Where a slot takes one `[B, slots]`.
    """

    positions: torch.Tensor
    window_source: torch.Tensor
    window_fresh: torch.Tensor


@dataclass(frozen=True)
class Append:
    """Tokens that decoding adds, and what they attend to.

    Attributes:
        valid: Real tokens among the new columns `[B, d]`; None without padding.
        lengths: Stored tokens that are attended to, per row `[B]`: with one column the new token is among
            them, with several the new ones are not.
        pruned_lengths: Pruned ones among them `[B]`.
        max_length: Upper bound of `lengths` (host).
        capacity: Tokens the store must hold (host).
        num_reserved: Tokens that the longest row will have; 0 if unknown (host).
        sink_size: Sink slots of the window.
        num_slots: All its slots, once there are so many tokens.
        columns: Set for several columns; None for one.
    """

    valid: torch.Tensor | None
    lengths: torch.Tensor
    pruned_lengths: torch.Tensor
    max_length: int
    capacity: int
    num_reserved: int
    sink_size: int
    num_slots: int
    columns: Columns | None = None
    _plans: list[torch.Tensor] = field(default_factory=list, init=False, compare=False, repr=False)

    @cached_property
    def view(self) -> StoredView:
        """What the queries see of the stored tokens, worked out once for all layers."""
        return stored_view(self.lengths, self.pruned_lengths, self.sink_size, self.num_slots, self.max_length)

    @cached_property
    def row_index(self) -> torch.Tensor:
        """0 … B - 1 `[B]`."""
        return torch.arange(self.lengths.shape[0], device=self.lengths.device)

    @cached_property
    def position(self) -> torch.Tensor:
        """Place of the one new column in the append-only store `[B]`; padding goes behind the tokens."""
        return (self.lengths - (1 if self.valid is None else self.valid[:, 0].int())).long()

    @cached_property
    def window_slot(self) -> torch.Tensor:
        """Window slot of the one new column `[B]`."""
        ring_size = self.num_slots - self.sink_size
        in_ring = self.sink_size + (self.position - self.sink_size) % ring_size
        return torch.where(self.position < self.sink_size, self.position, in_ring)

    def plan(self, make: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]) -> torch.Tensor:
        """Return the kernel's plan of this step, made by the first layer that asks."""
        if not self._plans:
            self._plans.append(make(self.lengths, self.pruned_lengths, self.sink_size, self.num_slots))
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
        reference = self.append.lengths if self.append else self.split.window_source if self.split else None
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
