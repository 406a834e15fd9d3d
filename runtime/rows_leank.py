"""Row lengths and the append rule: how many tokens a row holds, and how many are pruned.

Of a row's n tokens, numbered without padding, p are pruned:

    tokens 0 … n-1 :  [ sink: min(n, sink_size) ][ pruned: p ][ recent: the rest ]

Splitting a prompt sets p so that recent holds recent_size tokens. A later token goes to the sink until it is
full; then, if recent holds recent_size + flush_size tokens, p first grows by flush_size. Nothing is moved, so
the rule is arithmetic on n and p, for any number of tokens at once.

All layers of a model share one `RowState`; the first layer that sees a forward pass works out its `Step`,
the others reuse it, so the integer work of a decode step is done once and never waits for the device. The two
counters stay where they are and are updated in place, so that a captured decode step finds them. Of each
row's length the host knows an upper bound, and gives the row pages for that before a step needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernel_key_leank import MAX_DRAFT
from .pages_leank import PageTables, pages_of, spread_pages
from .step_leank import Append, Columns, Split, Step
from .windows_leank import Windows

UNFINISHED = "an earlier forward pass did not reach every layer; call `reset()` on the cache and begin again"


def check_rows(given: int, held: int | None) -> None:
    """Raise a ValueError if the input has another number of rows than a cache that is not empty."""
    if held not in (None, given):
        raise ValueError(
            f"the input has {given} rows, the cache holds {held}; use `batch_repeat_interleave` or "
            "`batch_select_indices` on the cache, or a cache of its own"
        )


def is_writable(tensor: torch.Tensor) -> bool:
    """Return whether it can be written in place: what inference mode made cannot be outside it."""
    return torch.is_inference_mode_enabled() or not tensor.is_inference()


def pruned_after_prefill(lengths: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Return how many tokens a prefill of `lengths` tokens leaves pruned, per row."""
    return (lengths - (windows.sink_size + windows.recent_size)).clamp(min=0)


def pruned_after_append(new_lengths: torch.Tensor, pruned: torch.Tensor, windows: Windows) -> torch.Tensor:
    """Return how many tokens are pruned once a row has grown to `new_lengths`, one token at a time.

    As few flushes happen as leave at most recent_size + flush_size tokens in recent. Before the first of them
    their number is negative or 0, so p stays 0.
    """
    num_flushes = (new_lengths - pruned - (windows.sink_size + windows.recent_size + 1)) // windows.flush_size
    return torch.add(pruned, num_flushes.clamp(min=0), alpha=windows.flush_size)


class RowState:
    """Lengths of every row, shared by the layers of a cache."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.reset()

    def reset(self) -> None:
        """Forget every row; the windows stay."""
        # Columns, padding included, that count as prompt while the cache is empty or its input is pending.
        # None if unknown: then in `deferred` mode one column on pending input begins decoding, and in `eager`
        # mode the first input is the prompt.
        self.prefill_length: int | None = None
        self.num_columns = 0  # seen, padding included (host)
        self.num_reserved = 0  # columns that memory is to be allocated for; 0 if unknown (host)
        self.is_pending = False  # whether input is kept whole until decoding begins
        # Real and pruned tokens per row `[B]`, int32, updated in place; None while empty or pending.
        self.lengths: torch.Tensor | None = None
        self.pruned_lengths: torch.Tensor | None = None
        # Another one whenever these two become other tensors, also in a copy of the cache.
        self.addresses = object()
        self.bounds: list[int] = []  # upper bound of each row's length (host)
        self.tables: PageTables | None = None  # pages of the rows, with room for `bounds`
        # Real columns `[B, columns]`, bool; those beyond its last one are real in all rows. None where
        # there was no padding.
        self.padding: torch.Tensor | None = None
        # Which of the next columns are real `[B, d]`, bool, for a decode step that is given no mask and has
        # room already; None if all are.
        self.next_valid: torch.Tensor | None = None
        self.begins_turn = False  # whether the next pass is the first of a `generate` call
        self._step: Step | None = None  # that the layers are making

    @property
    def max_length(self) -> int:
        """Upper bound of the longest row's length, at least 1 (host)."""
        return max([*self.bounds, 1])

    @property
    def ring_size(self) -> int:
        """Most tokens behind the sink that are whole at a time, a draft's among them."""
        return self.windows.recent_size + self.windows.flush_size + MAX_DRAFT

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

        `start` is the columns that the calling layer held before, `attention_mask` the real columns
        `[B, start + num_columns]`, or the causal mask made of them
        `[B, 1, num_columns, start + num_columns]`, None without padding. A mask of fewer columns or of
        another kind raises a ValueError, and so does another number of rows than the cache's.
        """
        if start < self.num_columns and self._step is not None and self._step.start == start:
            return self._step.to(device)
        if start != self.num_columns:
            raise RuntimeError(
                f"a layer holds {start} columns where the cache holds {self.num_columns}: {UNFINISHED}"
            )
        check_rows(batch_size, None if self.lengths is None else self.lengths.shape[0])
        num_prefill = self.num_prefill_columns(num_columns)
        num_decode = num_columns - num_prefill
        split = append = None
        if self.is_split and attention_mask is None:
            append = self._append(self.next_valid, num_columns, num_columns)
        else:
            padding = self.extended_padding(attention_mask, start + num_columns)
            if padding is not None and self.is_split:
                padding = self.padding_with(padding, num_columns)
            if not self.is_split and (num_decode or self.windows.prune == "eager"):
                split = self._split(batch_size, start + num_prefill, padding, device)
            self.padding = padding
            if num_decode:
                valid = None if padding is None else padding[:, start + num_prefill :]
                append = self._append(valid, num_decode, num_columns)
        self.num_columns = start + num_columns
        self.is_pending = not self.is_split
        step = Step(start, num_prefill, num_decode, split, append)
        self._step = step
        return step.to(device)

    def make_room(self, count: int, num_columns: int | None = None) -> PageTables:
        """Return tables with pages for `count` more tokens in every row, the present ones if they have them.

        `num_columns` are the columns that the cache will hold then, so many more than now if None.
        """
        lengths = [length + count for length in self.bounds]
        if self.tables is None or not self.tables.fits(lengths):
            if count > 1 and self.padding is not None and self.lengths is not None:
                # Drafts of many rows hold much padding, which was counted; so long a step may wait for once.
                self.bounds = self.lengths.tolist()
                lengths = [length + count for length in self.bounds]
            to_come = self.num_reserved - (self.num_columns + count if num_columns is None else num_columns)
            self.tables = self.lay_out(lengths, to_come if self.num_reserved else -1)
        return self.tables

    def lay_out(self, lengths: Sequence[int], to_come: int) -> PageTables:
        """Return tables for rows of `lengths` and `to_come` tokens; if that is negative, for some more."""
        sizes = self.windows.sink_size, self.ring_size
        if to_come < 0:
            return PageTables(spread_pages(lengths, *sizes), *sizes)
        return PageTables(pages_of([length + to_come for length in lengths]), *sizes)

    def advance(self, num_columns: int) -> None:
        """Count columns that a replayed decode step has added; its tensors were advanced on the device."""
        self.num_columns += num_columns
        self.bounds = [length + num_columns for length in self.bounds]
        self.forget_step()

    def forget_step(self) -> None:
        """Let go of the last step's tensors; every layer has made it."""
        self._step = None

    def extended_padding(self, attention_mask: torch.Tensor | None, total: int) -> torch.Tensor | None:
        """Return which of so many columns are real `[B, total]`, as given or known; None without padding.

        A mask that is not one of padding, or of fewer columns, raises a ValueError.
        """
        if attention_mask is not None:  # of an inner model that is called directly, too
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
            return padding[:, :total].clone()  # the caller's may change
        if self.padding is None:
            return None
        padding = self.padding
        new = padding.new_ones(padding.shape[0], total - padding.shape[1])
        return torch.cat([padding, new], dim=1)

    def padding_with(self, attention_mask: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Return which columns are real, the last `num_columns` by a mask, those before as known."""
        new = attention_mask[:, -num_columns:].to(torch.bool)
        known = self.extended_padding(None, self.num_columns)
        known = new.new_ones(len(new), self.num_columns) if known is None else known.to(new.device)
        return torch.cat([known, new], dim=1)

    def _split(
        self, batch_size: int, num_columns: int, padding: torch.Tensor | None, device: torch.device
    ) -> Split:
        real = order = None
        if padding is None:
            self.bounds = [num_columns] * batch_size
            lengths = torch.full((batch_size,), num_columns, dtype=torch.int32, device=device)
        else:
            real = padding[:, :num_columns].to(device)
            lengths = real.sum(1, dtype=torch.int32)
            self.bounds = lengths.tolist()
            order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)[:, : self.max_length]
        self.lengths = lengths
        self.pruned_lengths = pruned_after_prefill(lengths, self.windows)
        self.addresses = object()
        tables = self.make_room(0, num_columns)
        kept, window = (pages.to(device, non_blocking=True) for pages in tables.prompt_pages(self.bounds))
        return Split(real, order, lengths.clone(), kept, window, tables)

    def counters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return lengths and pruned lengths of split rows, as tensors that can be written."""
        assert self.lengths is not None and self.pruned_lengths is not None
        if not is_writable(self.lengths):
            self.lengths, self.pruned_lengths = self.lengths.clone(), self.pruned_lengths.clone()
            self.addresses = object()
        return self.lengths, self.pruned_lengths

    def _append_one(self, valid: torch.Tensor | None, num_columns: int) -> Append:
        """Append one column, the last of `num_columns`, which then attends to the cache with itself in it.

        No host number but `bounds` and `num_columns` changes, and the counters are written in place: this is
        what a captured step replays.
        """
        lengths, pruned = self.counters()
        tables = self.make_room(1, self.num_columns + num_columns)
        begins = None
        if self.padding is not None and self.windows.sink_size + self.windows.recent_size == 0:
            begins = lengths == 0
        if valid is not None:
            valid = valid.to(lengths.device)
        lengths += 1 if valid is None else valid[:, 0]
        new_pruned = pruned_after_append(lengths, pruned, self.windows)
        attended = pruned
        if begins is not None:
            # A row whose input so far was padding alone has its prefill now: it sees its token whole, and
            # keeps it pruned.
            attended = torch.where(begins, 0, new_pruned)
            new_pruned = torch.where(begins, lengths, new_pruned)
        pruned.copy_(new_pruned)
        self.bounds = [length + 1 for length in self.bounds]
        return Append(valid, lengths[:, None], attended[:, None], self.bounds, self.windows.sink_size, tables)

    def _append(self, valid: torch.Tensor | None, count: int, num_columns: int) -> Append:
        """Append the last `count` of `num_columns` columns, `valid` ones `[B, count]` alone.

        Several attend to the cache as it was, and causally to one another. First where each column goes in
        its row (`positions`: real tokens in order behind the row's last one, padding behind those), then
        which of them the window takes, then the counters. In a decode step it asks the device nothing: that
        is what a captured step replays.
        """
        if count == 1:
            return self._append_one(valid, num_columns)
        lengths, pruned_lengths = self.counters()
        if self.next_valid is None:
            self.make_room(count, self.num_columns + num_columns)
        tables = self.tables
        assert tables is not None
        # What the columns attend to; the counters go on.
        old, pruned, device = lengths.clone(), pruned_lengths.clone(), lengths.device
        columns = torch.arange(count, dtype=torch.int32, device=device)
        attended = pruned
        if valid is None:
            new = old + count
            positions = old[:, None] + columns
            seen = positions + 1
        else:
            valid = valid.to(device)
            rank = valid.cumsum(1, dtype=torch.int32)
            counts = rank[:, -1]
            new = old + counts
            seen = old[:, None] + rank
            # Padding takes the positions after the row's real tokens, each its own.
            positions = torch.where(valid, seen - 1, new[:, None] + columns - rank)
        # A row whose input so far was padding alone has its prefill now.
        new_pruned = torch.where(
            old == 0,
            pruned_after_prefill(new, self.windows),
            pruned_after_append(new, pruned, self.windows),
        )
        if valid is not None:
            # A row that gets one token decodes it as it would alone: its flush comes first.
            attended = torch.where((counts == 1) & (old > 0), new_pruned, pruned)
        window_columns = None
        if count > MAX_DRAFT:
            # No two tokens of the last pages share a place in the ring, and those before are pruned by now.
            number, last = positions // tables.page_size, (new[:, None] - 1) // tables.page_size
            taken = (number < tables.num_sink) | (number > last - tables.num_ring)
            taken = taken & (positions < new[:, None])
            # No decode step, so the device may be asked.
            window_columns = torch.stack(taken.nonzero(as_tuple=True))
        lengths.copy_(new)
        pruned_lengths.copy_(new_pruned)
        placed = Columns(positions.long(), torch.stack([old, attended]), window_columns)
        may_wait = valid is not None and self.next_valid is None
        self.bounds = new.tolist() if may_wait else [length + count for length in self.bounds]
        attended = attended[:, None].repeat(1, count)
        return Append(valid, seen, attended, self.bounds, self.windows.sink_size, tables, placed)

    def crop(self, num_columns: int) -> None:
        """Drop the last columns, or raise a ValueError if a token among them has been pruned."""
        kept = self.num_columns - num_columns
        padding = self.extended_padding(None, self.num_columns)
        if self.is_split:
            removed: torch.Tensor | int = num_columns
            if padding is not None:
                removed = padding[:, kept:].sum(1, dtype=torch.int32)
            self._take_back(removed, f"crop of {num_columns} tokens")
        self.num_columns = kept
        self.forget_step()
        self.padding = None if padding is None else padding[:, :kept]

    def hidden_by(self, attention_mask: torch.Tensor) -> torch.Tensor | None:
        """Return which columns so far `[B, columns]` a mask of them hides and earlier ones did not; or None.

        Raises a ValueError if these are not their rows' last tokens, or if padding is shown.
        """
        given = attention_mask.to(torch.bool)
        known = self.extended_padding(None, self.num_columns)
        known = torch.ones_like(given) if known is None else known.to(given.device)
        if torch.equal(given, known):
            return None
        hidden = known & ~given
        if bool((given & ~known).any()) or not torch.equal(hidden, known & (hidden.cumsum(1) > 0)):
            raise ValueError(
                "attention_mask differs in earlier columns from what they were run with, and not in the last "
                "tokens of rows alone: pass those columns as they were, or run all of them in a new cache"
            )
        return hidden

    def hide(self, hidden: torch.Tensor) -> None:
        """Take such tokens back: a row that ended before others goes on without what was fed to it since.

        Raises a ValueError if one has been pruned.
        """
        padding = self.extended_padding(None, self.num_columns)
        self._take_back(hidden.sum(1, dtype=torch.int32), "a mask of earlier tokens")
        self.forget_step()
        self.padding = ~hidden if padding is None else padding & ~hidden.to(padding.device)

    def _take_back(self, removed: torch.Tensor | int, what: str) -> None:
        """Shorten rows by so many tokens `[B]`, or raise a ValueError if one of them has been pruned."""
        old, pruned = self.counters()
        lengths = old - (removed if isinstance(removed, int) else removed.to(old.device))
        cut = (pruned > 0) & (lengths < self.windows.sink_size + pruned)
        if bool(cut.any()):
            size, recent = self.windows.recent_size, old - self.windows.sink_size - pruned
            whole = int(recent[pruned > 0].min())
            raise ValueError(
                f"{what} reaches into the pruned region: only the last {whole} tokens still have all "
                f"channels (recent_size {size}); crop fewer, use a larger `recent_size`, or run the prompt "
                f"again; drafts of assisted decoding must be at most recent_size + 1 tokens, here {size + 1}"
            )
        old.copy_(lengths)
        self.bounds = lengths.tolist()

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Keep the given rows, in that order, repeats allowed; return them as `page_sources` takes them.

        The tables stay where the number of rows does and each row has room for what becomes of it.
        """
        self.forget_step()
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows.to(self.padding.device))
        if self.lengths is None or self.pruned_lengths is None or self.tables is None:
            return rows
        moved = rows.to(self.lengths.device)
        selected = [tensor.index_select(0, moved) for tensor in (self.lengths, self.pruned_lengths)]
        if selected[0].shape == self.lengths.shape:
            for counter, values in zip(self.counters(), selected, strict=True):
                counter.copy_(values)
        else:
            self.lengths, self.pruned_lengths = selected
            self.addresses = object()
        is_same = len(rows) == len(self.bounds)
        if is_same and self.tables.is_even and min(self.bounds) == max(self.bounds):
            return rows  # whichever they are: beams need not wait for the device
        taken = rows.tolist()
        runs = [self.tables.runs[row] for row in taken]
        self.bounds = [self.bounds[row] for row in taken]
        if not is_same or not self.tables.fits(self.bounds):
            self.tables = PageTables(runs, self.windows.sink_size, self.ring_size)
        return torch.tensor(taken, device="cpu")
