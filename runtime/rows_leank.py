"""Row lengths of the cache and the append rule: how many tokens a row holds, and how many are pruned.

A row's tokens are numbered without padding: token 0 is the row's first real token. Two counters describe
a row, its length n and its number of pruned tokens p:

    tokens 0 … n-1 :  [ sink: min(n, sink_size) ][ pruned: p ][ recent: the rest ]

Splitting a prompt sets p so that recent holds recent_size tokens. Every token after it is appended by one
rule: while the sink is not full it goes there; else, if recent holds recent_size + flush_size tokens, p grows
by flush_size first. Nothing is moved, so the rule is arithmetic on n and p, for any number of tokens at once.

All layers of a model share one `RowState`; the first layer that sees a forward pass works out its `Step`,
the others reuse it, so the integer work of a decode step is done once and never waits for the device. The two
counters stay where they are and are updated in place, so that a captured decode step finds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from .step_leank import Append, Columns, Split, Step, window_tokens

# Numbers for tensors that were allocated: none is given twice, so an old one never looks current.
_ADDRESSES = itertools.count(1)


def new_address() -> int:
    """Return a number that no other allocation has."""
    return next(_ADDRESSES)


def is_writable(tensor: torch.Tensor) -> bool:
    """Return whether it can be written in place: what inference mode made cannot be outside it."""
    return torch.is_inference_mode_enabled() or not tensor.is_inference()


def pruned_after_prefill(lengths: torch.Tensor, sink_size: int, recent_size: int) -> torch.Tensor:
    """Return how many tokens a prefill of `lengths` tokens leaves pruned, per row."""
    return (lengths - sink_size - recent_size).clamp(min=0)


def pruned_after_append(
    new_lengths: torch.Tensor, pruned: torch.Tensor, sink_size: int, recent_size: int, flush_size: int
) -> torch.Tensor:
    """Return how many tokens are pruned once a row has grown to `new_lengths`, one token at a time.

    A token that finds recent holding recent_size + flush_size tokens first moves the oldest flush_size
    of them to pruned; so as few flushes happen as leave at most that many. A sink that is not full makes
    `overflow` negative, so p stays 0.
    """
    overflow = (new_lengths - sink_size - pruned - recent_size - flush_size).clamp(min=0)
    return pruned + (overflow + flush_size - 1) // flush_size * flush_size


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
        num_reserved: Columns, padding included, that memory is to be allocated for; 0 if unknown (host).
        is_pending: Whether input is kept whole until decoding begins.
        lengths: Real tokens per row `[B]`, int32, updated in place; None while empty or pending.
        pruned_lengths: Pruned tokens per row `[B]`, int32, updated in place; None while empty or pending.
        addresses: A new number whenever these two become other tensors.
        max_length: Upper bound of `lengths` (host).
        padding: Real columns `[B, columns]`, any dtype, true where real; columns beyond its last one are
            real in all rows. None where there was no padding.
        next_valid: Which rows' next column is real `[B, 1]`, bool, for a pass of one column that is given no
            mask; None if all are.
    """

    def __init__(self, sink_size: int, recent_size: int, flush_size: int, prune: str) -> None:
        self.sink_size = sink_size
        self.recent_size = recent_size
        self.flush_size = flush_size
        self.prune = prune
        self.reset()

    def reset(self) -> None:
        """Forget every row; window sizes and `prune` stay."""
        self.prefill_length: int | None = None
        self.num_columns = 0
        self.num_reserved = 0
        self.is_pending = False
        self.lengths: torch.Tensor | None = None
        self.pruned_lengths: torch.Tensor | None = None
        self.addresses = new_address()
        self.max_length = 0
        self.padding: torch.Tensor | None = None
        self.next_valid: torch.Tensor | None = None
        # The step that the layers are making, and the one whose last column attends.
        self._step: Step | None = None
        self._attended: Step | None = None

    @property
    def num_slots(self) -> int:
        """Slots of a full window buffer: sink, then a ring of recent_size + flush_size."""
        return self.sink_size + self.recent_size + self.flush_size

    @property
    def is_split(self) -> bool:
        """Whether the prompt has been split into sink, pruned and recent."""
        return self.lengths is not None

    @property
    def batch_size(self) -> int | None:
        """Rows, None until the prompt is split."""
        return None if self.lengths is None else self.lengths.shape[0]

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
        *,
        split_now: bool = False,
    ) -> Step:
        """Return what a forward pass changes; the first layer's call works it out and advances the rows.

        Args:
            start: Columns that the calling layer held before this pass.
            batch_size: Rows.
            num_columns: New columns.
            attention_mask: Real columns `[B, start + num_columns]`, or the causal mask made of them
                `[B, 1, num_columns, start + num_columns]`; None without padding.
            device: The calling layer's device.
            split_now: Whether a prompt is split in this pass, whatever `prune` says.

        Raises:
            ValueError: If the mask covers fewer columns than the cache holds, or the cache has fewer or more
                rows than the input.
        """
        if start < self.num_columns and self._step is not None and self._step.start == start:
            return self._step.to(device)
        if start != self.num_columns:
            raise RuntimeError(
                f"a layer holds {start} columns where the cache holds {self.num_columns}: an earlier forward "
                "pass did not reach every layer; call `reset()` on the cache and begin again"
            )
        if self.lengths is not None and self.lengths.shape[0] != batch_size:
            raise ValueError(
                f"the input has {batch_size} rows, the cache holds {self.lengths.shape[0]}; use "
                "`batch_repeat_interleave` or `batch_select_indices` on the cache, or a cache of its own"
            )
        num_prefill = self.num_prefill_columns(num_columns)
        num_decode = num_columns - num_prefill
        split = append = None
        if num_columns == 1 and self.is_split and attention_mask is None:
            append = self._append_one(self.next_valid, start + 1)
        else:
            padding = self._extended_padding(attention_mask, start + num_columns)
            if not self.is_split and (num_decode or split_now or self.prune == "eager"):
                split = self._split(batch_size, start + num_prefill, padding, device)
            self.padding = padding
            if num_decode == 1:
                append = self._append_one(None if padding is None else padding[:, -1:], start + num_columns)
            elif num_decode:
                append = self._append(start + num_prefill, num_decode, padding)
        self.num_columns = start + num_columns
        self.is_pending = not self.is_split
        step = Step(start, num_prefill, num_decode, split, append)
        self._remember(step)
        return step.to(device)

    def reserved_tokens(self, num_columns: int) -> int:
        """Return the tokens that the longest of rows of `num_columns` columns will have, 0 if unknown."""
        to_come = self.num_reserved - num_columns
        return self.max_length + to_come if to_come >= 0 and self.num_reserved else 0

    def advance(self) -> None:
        """Count one column that a replayed decode step has added; its tensors were advanced on the device."""
        self.num_columns += 1
        self.max_length += 1
        self.forget_step()

    def forget_step(self) -> None:
        """Let go of the last step's tensors; every layer has made it."""
        self._remember(None)

    def attended(self, device: torch.device) -> Append:
        """Return what the last column attends to, or attended to if it was decoded; nothing is appended.

        Made once per step, so a caller that attends again and again pays for it once.
        """
        if self._attended is None:
            assert self.lengths is not None and self.pruned_lengths is not None
            append = self._make_append(
                None, self.lengths, self.pruned_lengths, self.max_length, self.num_columns
            )
            self._attended = Step(self.num_columns, 0, 1, None, append)
        moved = self._attended.to(device).append
        assert moved is not None
        return moved

    def _remember(self, step: Step | None) -> None:
        """Keep the step that other layers are about to make, and what its last column attends to."""
        self._step = step
        is_one_column = step is not None and step.append is not None and step.append.columns is None
        self._attended = step if is_one_column else None

    def _extended_padding(self, attention_mask: torch.Tensor | None, total: int) -> torch.Tensor | None:
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
        padding = self.padding.to(torch.bool)
        new = padding.new_ones(padding.shape[0], total - padding.shape[1])
        return torch.cat([padding, new], dim=1)

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
        tokens = window_tokens(lengths, self.sink_size, self.num_slots, num_tokens)
        self.lengths = lengths
        self.pruned_lengths = pruned_after_prefill(lengths, self.sink_size, self.recent_size)
        self.addresses = new_address()
        self.max_length = num_tokens
        reserved = self.reserved_tokens(num_columns)
        return Split(order, valid, num_tokens, reserved, tokens.clamp(min=0).long(), tokens >= 0)

    def counters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return lengths and pruned lengths of split rows, as tensors that can be written."""
        assert self.lengths is not None and self.pruned_lengths is not None
        if not is_writable(self.lengths):
            self.lengths, self.pruned_lengths = self.lengths.clone(), self.pruned_lengths.clone()
            self.addresses = new_address()
        return self.lengths, self.pruned_lengths

    def _append_one(self, valid: torch.Tensor | None, num_columns: int) -> Append:
        """Append one column, which then attends to the cache with itself in it: a decode step.

        No host number but `max_length` and `num_columns` changes, and the counters are written in place: this
        is what a captured step replays.
        """
        lengths, pruned = self.counters()
        if valid is None:
            new = lengths + 1
        else:
            valid = valid.to(lengths.device)
            new = lengths + valid[:, 0]
        new_pruned = self._pruned_after_append(new, pruned)
        attended = pruned
        if self.padding is not None and self.sink_size + self.recent_size == 0:
            # A row whose input so far was padding alone has its prefill now: it sees its token whole, and
            # keeps it pruned.
            begins = lengths == 0
            attended = torch.where(begins, 0, new_pruned)
            new_pruned = torch.where(begins, new, new_pruned)
        lengths.copy_(new)
        pruned.copy_(new_pruned)
        self.max_length += 1
        return self._make_append(valid, lengths, attended, self.max_length, num_columns)

    def _append(self, start: int, num_columns: int, padding: torch.Tensor | None) -> Append:
        """Append several columns, which attend to the cache as it was, and causally to one another.

        First where each column goes in the append-only store (`positions`: real tokens in order behind the
        row's last one, padding behind those), then which of them every window slot takes, then the counters.
        """
        lengths, pruned_lengths = self.counters()
        # What the columns attend to; the counters go on.
        old, pruned, device = lengths.clone(), pruned_lengths.clone(), lengths.device
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
        max_length, capacity = self.max_length, self.max_length + num_columns
        # A slot takes a new token where the one that it must hold in the end was not there before.
        tokens = window_tokens(new, self.sink_size, self.num_slots, capacity)
        source = (tokens - old[:, None]).clamp(min=0).long()
        attended = pruned
        if valid is not None:
            # From a row's n-th new token to the column that it lies in.
            source = torch.argsort((~valid).to(torch.int8), dim=1, stable=True).gather(1, source)
            # A row that gets one token decodes it as it would alone: its flush comes first.
            attended = torch.where((counts == 1) & (old > 0), new_pruned, pruned)
        placed = Columns(positions.long(), source, tokens >= old[:, None])
        lengths.copy_(new)
        pruned_lengths.copy_(new_pruned)
        # Several padded columns at once are no decode step, so the device may be asked for the exact bound.
        self.max_length = capacity if valid is None else max(int(new.max()), 1)
        append = self._make_append(valid, old, attended, max_length, start + num_columns)
        return replace(append, capacity=capacity, columns=placed)

    def _make_append(
        self,
        valid: torch.Tensor | None,
        lengths: torch.Tensor,
        pruned_lengths: torch.Tensor,
        max_length: int,
        num_columns: int,
    ) -> Append:
        return Append(
            valid=valid,
            lengths=lengths,
            pruned_lengths=pruned_lengths,
            max_length=max_length,
            capacity=max_length,
            num_reserved=self.reserved_tokens(num_columns),
            sink_size=self.sink_size,
            num_slots=self.num_slots,
        )

    def _pruned_after_append(self, new: torch.Tensor, pruned: torch.Tensor) -> torch.Tensor:
        return pruned_after_append(new, pruned, self.sink_size, self.recent_size, self.flush_size)

    def crop(self, num_columns: int) -> None:
        """Drop the last `num_columns` columns.

        Raises:
            ValueError: If a token among them has been pruned: its dropped channels are gone.
        """
        kept = self.num_columns - num_columns
        padding = self._extended_padding(None, self.num_columns)
        if self.is_split:
            old, pruned = self.counters()
            removed: torch.Tensor | int = num_columns
            if padding is not None:
                removed = padding[:, kept:].sum(1, dtype=torch.int32).to(old.device)
            lengths = old - removed
            cut = (pruned > 0) & (lengths < self.sink_size + pruned)
            if bool(cut.any()):
                recent = old - self.sink_size - pruned
                whole = int(recent[pruned > 0].min())
                raise ValueError(
                    f"crop of {num_columns} tokens reaches into the pruned region: only the last {whole} "
                    f"tokens still have all channels (recent_size {self.recent_size}); crop fewer, use a "
                    "larger `recent_size`, or run the prompt again; drafts of assisted decoding must be at "
                    f"most recent_size + 1 tokens, here {self.recent_size + 1}"
                )
            old.copy_(lengths)
            self.max_length = max(int(lengths.max()), 1)
        self.num_columns = kept
        self.forget_step()
        self.padding = None if padding is None else padding[:, :kept]

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows, in that order, repeats allowed."""
        self.forget_step()
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows.to(self.padding.device))
        if self.lengths is not None and self.pruned_lengths is not None:
            rows = rows.to(self.lengths.device)
            selected = [tensor.index_select(0, rows) for tensor in (self.lengths, self.pruned_lengths)]
            if selected[0].shape == self.lengths.shape:
                for counter, values in zip(self.counters(), selected, strict=True):
                    counter.copy_(values)
            else:
                self.lengths, self.pruned_lengths = selected
                self.addresses = new_address()

    @classmethod
    def concatenate(
        cls, parts: Sequence[RowState], batch_sizes: Sequence[int], device: torch.device
    ) -> RowState:
        """Return the rows of several states in order; fewer columns than others become left padding.

        Args:
            parts: States of which all are split, or all pending.
            batch_sizes: Rows of each.
            device: Where lengths and padding of the result lie.
        """
        first = parts[0]
        joined = cls(first.sink_size, first.recent_size, first.flush_size, first.prune)
        joined.is_pending = first.is_pending
        if first.is_split:
            lengths = [part.counters() for part in parts]
            joined.lengths = torch.cat([counters[0].to(device) for counters in lengths])
            joined.pruned_lengths = torch.cat([counters[1].to(device) for counters in lengths])
        joined.max_length = max(part.max_length for part in parts)
        joined.num_columns = max(part.num_columns for part in parts)
        if any(part.padding is not None or part.num_columns != joined.num_columns for part in parts):
            joined.padding = torch.cat(
                [
                    part._left_padded(joined.num_columns, batch_size, device)
                    for part, batch_size in zip(parts, batch_sizes, strict=True)
                ]
            )
        return joined

    def _left_padded(self, num_columns: int, batch_size: int, device: torch.device) -> torch.Tensor:
        padding = self._extended_padding(None, self.num_columns)
        if padding is None:
            padding = torch.ones(batch_size, self.num_columns, dtype=torch.bool)
        return torch.nn.functional.pad(padding.to(device), (num_columns - self.num_columns, 0))
