"""Where every row of the cache stands, and what one forward pass changes: the append rule in closed form.

A row's tokens are numbered without padding: token 0 is the row's first real token. Two counters describe
a row, its length n and its number of pruned tokens p:

    tokens 0 … n-1 :  [ sink: min(n, sink_size) ][ pruned: p ][ recent: the rest ]

All layers of a model share one `RowState`; the first layer that sees a forward pass works out its `Step`,
the others reuse it, so the integer work of a decode step is done once and never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch


def pruned_after_prefill(lengths: torch.Tensor, sink_size: int, recent_size: int) -> torch.Tensor:
    """Return how many tokens a prefill of `lengths` tokens leaves pruned, per row."""
    return (lengths - sink_size - recent_size).clamp(min=0)


def pruned_after_append(
    new_lengths: torch.Tensor, pruned: torch.Tensor, sink_size: int, recent_size: int, flush_size: int
) -> torch.Tensor:
    """Return how many tokens are pruned once a row has grown to `new_lengths`, one token at a time.

    A token that finds recent holding recent_size + flush_size tokens first moves the oldest flush_size
    of them to pruned; so as few flushes happen as leave at most that many.
    """
    overflow = (new_lengths - sink_size - pruned - recent_size - flush_size).clamp(min=0)
    return pruned + (overflow + flush_size - 1) // flush_size * flush_size


def window_tokens(lengths: torch.Tensor, sink_size: int, num_slots: int) -> torch.Tensor:
    """Say which token every slot of the window buffer holds.

    Token i lies in slot i while i < sink_size, else in slot sink_size + (i - sink_size) mod ring size,
    so a slot holds the last token that maps to it.

    Args:
        lengths: Tokens per row `[B]`.
        sink_size: Slots at the front that are never overwritten.
        num_slots: Sink and ring slots together.

    Returns:
        Token numbers, -1 for a slot not written yet `[B, num_slots]`.
    """
    ring_size = num_slots - sink_size
    slots = torch.arange(num_slots, device=lengths.device, dtype=lengths.dtype)
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
        window_source: Token that every window slot takes `[B, slots]`.
        window_fresh: Where a slot takes one `[B, slots]`.
    """

    order: torch.Tensor | None
    valid: torch.Tensor | None
    num_tokens: int
    window_source: torch.Tensor
    window_fresh: torch.Tensor


@dataclass(frozen=True)
class Append:
    """Tokens that decoding adds, and what they attend to.

    Attributes:
        valid: Real tokens among the new columns `[B, d]`; None without padding.
        positions: Where every column goes in the append-only store `[B, d]`. Padding goes beyond the
            row's length, where nothing is read and the next token overwrites it.
        capacity: Tokens the store must hold (host).
        lengths: Stored tokens that are attended to, per row `[B]`.
        pruned_lengths: Pruned ones among them `[B]`.
        max_length: Upper bound of `lengths` (host).
        window_slots: The slot of the new token `[B]`, for one column; None for several.
        window_source: New column that every slot takes `[B, slots]`, for several columns; None for one.
        window_fresh: Where a slot takes one `[B, slots]`; None for one column.
    """

    valid: torch.Tensor | None
    positions: torch.Tensor
    capacity: int
    lengths: torch.Tensor
    pruned_lengths: torch.Tensor
    max_length: int
    window_slots: torch.Tensor | None
    window_source: torch.Tensor | None
    window_fresh: torch.Tensor | None


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


_Part = TypeVar("_Part", Split, Append)


def _moved(part: _Part | None, device: torch.device) -> _Part | None:
    if part is None:
        return None
    values = {entry.name: getattr(part, entry.name) for entry in fields(part)}
    moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(part, **moved)


class RowState:
    """Lengths of every row, shared by the layers of a cache.

    Attributes:
        sink_size: Tokens at the start of a row that stay whole.
        recent_size: Latest tokens that stay whole.
        flush_size: Tokens pruned at a time while decoding.
        prune: `eager` or `deferred`.
        prefill_length: Columns, padding included, that count as prompt while the cache is empty or its
            input is pending; None if unknown: then in `deferred` mode a one-column input on pending
            input begins decoding, and in `eager` mode the first input is the prompt.
        num_columns: Columns seen, padding included (host).
        is_pending: Whether input is kept whole until decoding begins.
        lengths: Real tokens per row `[B]`, int32; None while empty or pending.
        pruned_lengths: Pruned tokens per row `[B]`, int32; None while empty or pending.
        max_length: Upper bound of `lengths` (host).
        padding: Real columns `[B, num_columns]`, bool; None where there was no padding.
    """

    def __init__(self, sink_size: int, recent_size: int, flush_size: int, prune: str) -> None:
        self.sink_size = sink_size
        self.recent_size = recent_size
        self.flush_size = flush_size
        self.prune = prune
        self.prefill_length: int | None = None
        self.reset()

    def reset(self) -> None:
        """Forget every row; window sizes and `prune` stay."""
        self.prefill_length = None
        self.num_columns = 0
        self.is_pending = False
        self.lengths: torch.Tensor | None = None
        self.pruned_lengths: torch.Tensor | None = None
        self.max_length = 0
        self.padding: torch.Tensor | None = None
        self._step: Step | None = None

    @property
    def num_slots(self) -> int:
        """Slots of the window buffer: sink, then a ring of recent_size + flush_size."""
        return self.sink_size + self.recent_size + self.flush_size

    @property
    def is_split(self) -> bool:
        """Whether the prompt has been split into sink, pruned and recent."""
        return self.lengths is not None

    def num_prefill_columns(self, num_columns: int) -> int:
        """Return how many of the next `num_columns` columns belong to the prompt."""
        if self.is_split:
            return 0
        if self.prefill_length is not None:
            return min(max(self.prefill_length - self.num_columns, 0), num_columns)
        return 0 if self.is_pending and num_columns == 1 else num_columns

    def step(
        self,
        start: int,
        batch_size: int,
        num_columns: int,
        attention_mask: torch.Tensor | None,
        device: torch.device,
    ) -> Step:
        """Return what a forward pass changes; the first layer's call works it out and advances the rows.

        Args:
            start: Columns that the calling layer held before this pass.
            batch_size: Rows.
            num_columns: New columns.
            attention_mask: Real columns `[B, start + num_columns]`, or the causal mask made of them
                `[B, 1, num_columns, start + num_columns]`; None without padding.
            device: The calling layer's device.

        Raises:
            ValueError: If the mask covers fewer columns than the cache holds.
        """
        if start < self.num_columns and self._step is not None and self._step.start == start:
            return self._step.to(device)
        if start != self.num_columns:
            raise RuntimeError(
                f"a layer holds {start} columns where the cache holds {self.num_columns}: an earlier forward "
                "pass did not reach every layer; call `reset()` on the cache and begin again"
            )
        num_prefill = self.num_prefill_columns(num_columns)
        num_decode = num_columns - num_prefill
        padding = self._extend_padding(attention_mask, start + num_columns)
        split = None
        if not self.is_split and (num_decode or self.prune == "eager"):
            split = self._split(batch_size, start + num_prefill, padding, device)
        append = self._append(batch_size, start + num_prefill, num_decode, padding) if num_decode else None
        self.padding = padding
        self.num_columns = start + num_columns
        self.is_pending = not self.is_split
        self._step = Step(start, num_prefill, num_decode, split, append)
        return self._step

    def _extend_padding(self, attention_mask: torch.Tensor | None, total: int) -> torch.Tensor | None:
        if attention_mask is not None:
            if attention_mask.dtype != torch.bool or attention_mask.ndim not in (2, 4):
                raise ValueError(
                    f"attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}: the pruned "
                    "cache needs a 2-D padding mask [batch, tokens]; pass that, or `use_cache=False`"
                )
            # The last query of a causal mask sees every real column.
            padding = attention_mask if attention_mask.ndim == 2 else attention_mask[:, 0, -1]
            if padding.shape[1] < total:
                raise ValueError(
                    f"attention_mask covers {padding.shape[1]} tokens, the cache and the input hold {total}; "
                    "pass the mask of the whole conversation"
                )
            return padding[:, :total]
        if self.padding is None:
            return None
        new = self.padding.new_ones(self.padding.shape[0], total - self.padding.shape[1])
        return torch.cat([self.padding, new], dim=1)

    def _split(
        self, batch_size: int, num_columns: int, padding: torch.Tensor | None, device: torch.device
    ) -> Split:
        if padding is None:
            lengths = torch.full((batch_size,), num_columns, dtype=torch.int32, device=device)
            order = valid = None
            num_tokens = num_columns
        else:
            padding = padding[:, :num_columns].to(device)
            lengths = padding.sum(1, dtype=torch.int32)
            num_tokens = max(int(lengths.max()), 1)
            order = torch.argsort((~padding).to(torch.int8), dim=1, stable=True)[:, :num_tokens]
            valid = torch.arange(num_tokens, device=device) < lengths[:, None]
        tokens = window_tokens(lengths, self.sink_size, self.num_slots)
        self.lengths = lengths
        self.pruned_lengths = pruned_after_prefill(lengths, self.sink_size, self.recent_size)
        self.max_length = num_tokens
        return Split(order, valid, num_tokens, tokens.clamp(min=0).long(), tokens >= 0)

    def _append(self, batch_size: int, start: int, num_columns: int, padding: torch.Tensor | None) -> Append:
        assert self.lengths is not None and self.pruned_lengths is not None
        old, pruned, device = self.lengths, self.pruned_lengths, self.lengths.device
        columns = torch.arange(num_columns, dtype=torch.int32, device=device)
        if padding is None:
            valid = None
            new = old + num_columns
            positions = old[:, None] + columns
            new_pruned = self._pruned_after_append(new, pruned)
        else:
            valid = padding[:, start : start + num_columns].to(device)
            counts = valid.sum(1, dtype=torch.int32)
            new = old + counts
            rank = valid.cumsum(1, dtype=torch.int32) - 1
            # Padding takes the positions after the row's real tokens, each its own.
            positions = old[:, None] + torch.where(valid, rank, counts[:, None] + columns - rank - 1)
            # A row whose input so far was padding alone has its prefill now.
            new_pruned = torch.where(
                old == 0,
                pruned_after_prefill(new, self.sink_size, self.recent_size),
                self._pruned_after_append(new, pruned),
            )
        capacity = self.max_length + num_columns
        if num_columns == 1:
            ring_size = self.num_slots - self.sink_size
            slots = torch.where(
                old < self.sink_size, old, self.sink_size + (old - self.sink_size) % ring_size
            )
            append = Append(
                valid=valid,
                positions=positions.long(),
                capacity=capacity,
                lengths=new,
                pruned_lengths=new_pruned if valid is None else torch.where(old == 0, 0, new_pruned),
                max_length=capacity,
                window_slots=slots.long(),
                window_source=None,
                window_fresh=None,
            )
        else:
            tokens = window_tokens(new, self.sink_size, self.num_slots)
            source = (tokens - old[:, None]).clamp(min=0).long()
            attended = pruned
            if valid is not None:
                source = torch.argsort((~valid).to(torch.int8), dim=1, stable=True).gather(1, source)
                # A row that gets one token decodes it as it would alone: its flush comes first.
                attended = torch.where((counts == 1) & (old > 0), new_pruned, pruned)
            append = Append(
                valid=valid,
                positions=positions.long(),
                capacity=capacity,
                lengths=old,
                pruned_lengths=attended,
                max_length=self.max_length,
                window_slots=None,
                window_source=source,
                window_fresh=tokens >= old[:, None],
            )
        self.lengths, self.pruned_lengths = new, new_pruned
        # Several padded columns at once are no decode step, so the device may be asked for the exact bound.
        several_padded = valid is not None and num_columns > 1
        self.max_length = max(int(new.max()), 1) if several_padded else capacity
        return append

    def _pruned_after_append(self, new: torch.Tensor, pruned: torch.Tensor) -> torch.Tensor:
        return pruned_after_append(new, pruned, self.sink_size, self.recent_size, self.flush_size)

    def crop(self, num_columns: int) -> None:
        """Drop the last `num_columns` columns.

        Raises:
            ValueError: If a token among them has been pruned: its dropped channels are gone.
        """
        kept = self.num_columns - num_columns
        if self.lengths is not None and self.pruned_lengths is not None:
            removed: torch.Tensor | int = num_columns
            if self.padding is not None:
                removed = self.padding[:, kept:].sum(1, dtype=torch.int32).to(self.lengths.device)
            lengths = self.lengths - removed
            cut = (self.pruned_lengths > 0) & (lengths < self.sink_size + self.pruned_lengths)
            if bool(cut.any()):
                recent = self.lengths - self.sink_size - self.pruned_lengths
                whole = int(recent[self.pruned_lengths > 0].min())
                raise ValueError(
                    f"crop of {num_columns} tokens reaches into the pruned region: only the last {whole} "
                    f"tokens still have all channels (recent_size {self.recent_size}); crop fewer, use a "
                    "larger `recent_size`, or run the prompt again; drafts of assisted decoding must be at "
                    f"most recent_size + 1 tokens, here {self.recent_size + 1}"
                )
            self.lengths = lengths
            self.max_length = max(int(lengths.max()), 1)
        self.num_columns = kept
        self._step = None
        if self.padding is not None:
            self.padding = self.padding[:, :kept]

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed."""
        self._step = None
        for name in ("lengths", "pruned_lengths", "padding"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, value.index_select(0, rows.to(value.device)))
