"""Sample packing: one row of questions and answers behind their context.

Where passes are captured as graphs (`graphs`), samples are padded to few sizes. Padding changes nothing: it
stands behind the context and behind the questions and answers, belongs to no question and weighs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

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


class PackedSample:
    """A sample as one row of integers, which can be moved to its place in one piece, with views of it.

    The row holds context ids [P], ids, positions and owners of what follows [T] each, and how many context
    tokens are real: int64 [P + 3T + 1].
    """

    def __init__(self, row: Tensor, sizes: Sizes) -> None:
        self.row = row
        self.sizes = sizes  # where in it what is
        self.context_ids = row[: sizes.context]  # the context, int64 [P]
        # Of all questions, then all answers [T]: their tokens, where each stands, counted within context,
        # question and answer, and which question it belongs to; -1 for padding.
        self.input_ids, self.positions, self.owners = row[sizes.context : -1].view(3, -1).unbind()
        self.answer_owners = self.owners[sizes.questions :]  # those of answer tokens alone [R]
        # How many context tokens are no padding, a scalar; None where all are.
        self.num_real = None if sizes.least_context == sizes.context else row[-1]

    def to(self, device: torch.device) -> PackedSample:
        """The same on a device."""
        return PackedSample(self.row.to(device, non_blocking=True), self.sizes)


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
    sizes = sizes or _own_sizes(sample)
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
    own = _own_sizes(sample)
    octave = 1 << (own.context - 1).bit_length() >> 1  # the power of two below it
    step = max(_SHORTEST_STEP, octave // steps_per_octave)
    context = _round_up(own.context, step)
    return Sizes(
        context=min(context, longest),
        questions=_round_up(own.questions, _ROW_STEP),
        answers=_round_up(own.answers, _ROW_STEP),
        least_context=context - step + 1,
    )


def _own_sizes(sample: TrainingSample) -> Sizes:
    num_context, num_answers = len(sample.prefix_ids), sample.num_answer_tokens
    return Sizes(num_context, sample.num_tokens - num_context - num_answers, num_answers, num_context)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
