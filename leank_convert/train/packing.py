"""Sample packing: one row of questions and answers behind their context.

Where passes are captured as graphs (`graphs`), samples are padded to few sizes. Padding changes nothing: it
stands behind the context and behind the questions and answers, belongs to no question and weighs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from leank_convert.data import TrainingSample

_SHORTEST_STEP = 128
_ROW_STEP = 64
_NOBODY = -1  # whose padding is


@dataclass(frozen=True)
class Sizes:
    """What a packed sample takes, padding included."""

    context: int  # tokens of the context
    questions: int  # tokens of all questions
    answers: int  # tokens of all answers
    least_context: int  # no sample of this size has a shorter context; `context` where none is padded


@dataclass(frozen=True)
class PackedSample:
    """A sample as one row of integers, which can be moved to its place in one piece."""

    # Context ids [P], ids, positions and owners of what follows [T] each, and how many context tokens are
    # real: int64 [P + 3T + 1].
    row: Tensor
    sizes: Sizes  # where in it what is

    @property
    def context_ids(self) -> Tensor:
        """The context, int64 [P]."""
        return self.row[: self.sizes.context]

    @property
    def input_ids(self) -> Tensor:
        """All questions, then all answers [T]."""
        return self._following[0]

    @property
    def positions(self) -> Tensor:
        """Counted within context, question and answer [T]."""
        return self._following[1]

    @property
    def owners(self) -> Tensor:
        """Which question each token belongs to [T]; -1 for padding."""
        return self._following[2]

    @property
    def answer_owners(self) -> Tensor:
        """Which question each answer token belongs to [R]; -1 for padding."""
        return self.owners[self.sizes.questions :]

    @property
    def num_real(self) -> Tensor | None:
        """How many context tokens are no padding, a scalar; None where all are."""
        return None if self.sizes.least_context == self.sizes.context else self.row[-1]

    @property
    def _following(self) -> Tensor:
        return self.row[self.sizes.context : -1].view(3, -1)

    def to(self, device: torch.device) -> PackedSample:
        """The same on a device."""
        return replace(self, row=self.row.to(device, non_blocking=True))


@dataclass(frozen=True)
class Rows:
    """The T tokens that follow a context as Q rows, each a question and then its answer."""

    tokens: Tensor  # which of them stands where, int64 [Q, S]; T where none does
    places: Tensor  # where the last N of them stand, int64 [N], counted over all rows


def plan_rows(packed: PackedSample, num_queries: int) -> Rows:
    """Lay out as rows what follows a context, where nothing is padded; the pass runs the last N tokens."""
    owners = packed.owners
    own = [torch.nonzero(owners == owner)[:, 0] for owner in range(int(owners.max()) + 1)]
    tokens = pad_sequence(own, batch_first=True, padding_value=len(owners))
    # Rows of one token would take the kernels of decode steps, which have no backward pass.
    tokens = torch.nn.functional.pad(tokens, (0, 1), value=len(owners))
    return Rows(tokens, tokens.flatten().argsort()[: len(owners)][-num_queries:])


def pack_sample(sample: TrainingSample, sizes: Sizes | None = None) -> PackedSample:
    """Lay out on the CPU a context, all questions, then all answers, padded to sizes if these are given."""
    num_context = len(sample.prefix_ids)
    if sizes is None:
        num_answers = sample.num_answer_tokens
        num_questions = sample.num_tokens - num_context - num_answers
        sizes = Sizes(num_context, num_questions, num_answers, num_context)
    parts = []
    for is_answer, size in ((False, sizes.questions), (True, sizes.answers)):
        part = torch.zeros(3, size, dtype=torch.long)
        # Padding sees the context and itself, so that its rows are finite.
        part[1], part[2] = num_context, _NOBODY
        place = 0
        for owner, question in enumerate(sample.questions):
            length, border = len(question.input_ids), question.answer_start
            start, stop = (border, length) if is_answer else (0, border)
            filled = part[:, place : place + stop - start]
            filled[0] = question.input_ids[start:stop]
            filled[1] = torch.arange(num_context + start, num_context + stop)
            filled[2] = owner
            place += stop - start
        parts.append(part)
    context = torch.zeros(sizes.context, dtype=torch.long)
    context[:num_context] = sample.prefix_ids
    row = torch.cat([context, torch.cat(parts, dim=1).flatten(), torch.tensor([num_context])])
    return PackedSample(row, sizes)


def padded_sizes(sample: TrainingSample, longest: int, steps_per_octave: int = 4) -> Sizes:
    """The sizes that a sample is padded to, of which there are few whatever the samples' lengths.

    No context is padded beyond `longest`. With more steps between two powers of two, less is padded.
    """
    num_context, num_answers = len(sample.prefix_ids), sample.num_answer_tokens
    num_questions = sample.num_tokens - num_context - num_answers
    octave = 1 << (num_context - 1).bit_length() >> 1  # the power of two below it
    step = max(_SHORTEST_STEP, octave // steps_per_octave)
    context = _round_up(num_context, step)
    return Sizes(
        context=min(context, longest),
        questions=_round_up(num_questions, _ROW_STEP),
        answers=_round_up(num_answers, _ROW_STEP),
        least_context=context - step + 1,
    )


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
