"""What `benchmark train` measures, in tokens and steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from leank_convert.errors import LeanKError

PARTS = ("step", "peer", "memory", "schedule")


@dataclass(frozen=True)
class QuestionSize:
    """Tokens of one question on a context.

    Attributes:
        question: Tokens of the prompt that follow what all questions share.
        answer: Tokens of the answer.
    """

    question: int
    answer: int

    @property
    def total(self) -> int:
        """Both."""
        return self.question + self.answer


@dataclass(frozen=True)
class Sizes:
    """What is measured. Defaults are for one large GPU and take it some eight minutes.

    Attributes:
        length: Context, one question and its answer in the step that is timed.
        num_questions: Questions on one context, beside a single one.
        question: Of each question; an answer is about as long as the training tasks'.
        peer_lengths: Where full sequences run beside ours.
        memory_length: Where peak memory is read.
        lengths: The schedule's shortest and longest sample.
        schedule_steps: Steps of the schedule that are run with one question; with several, half as many.
        rounds: Measurements of each figure.
        skip: Among `PARTS`.
    """

    length: int = 65536
    num_questions: int = 8
    question: QuestionSize = QuestionSize(24, 40)
    peer_lengths: tuple[int, ...] = (16384, 65536)
    memory_length: int = 98304
    lengths: tuple[int, int] = (16384, 98304)
    schedule_steps: int = 30
    rounds: int = 3
    skip: frozenset[str] = frozenset()

    @property
    def counts(self) -> list[int]:
        """One question, and as many as were asked for."""
        return sorted({1, self.num_questions})

    def shortest_of(self, windows: Mapping[str, int]) -> int:
        """Tokens of the shortest sample with something to prune before its question."""
        return windows["sink_size"] + windows["recent_size"] + self.question.total + 1

    def check(self, windows: Mapping[str, int]) -> None:
        """Refuse lengths at which nothing would be learned.

        Args:
            windows: `sink_size` and `recent_size`.

        Raises:
            LeanKError: If there are any.
        """
        shortest, longest = self.lengths
        if shortest > longest:
            raise LeanKError(
                f"the schedule's range ends at {longest}, before its start {shortest}",
                hint="name the shortest length first, such as `--schedule-range 16kx96k`",
            )
        least = self.shortest_of(windows)
        asked = {
            "--length": self.length,
            "--peer-length": min(self.peer_lengths),
            "--memory-length": self.memory_length,
            "--schedule-range": shortest,
        }
        for option, length in asked.items():
            if length < least:
                raise LeanKError(
                    f"`{option}` {length} leaves nothing to prune between sink {windows['sink_size']} and "
                    f"recent window {windows['recent_size']} of a sample with a question of "
                    f"{self.question.total} tokens",
                    hint=f"ask for {least} or more",
                )


_TOY: Mapping[str, Any] = {
    "length": 96,
    "num_questions": 3,
    "question": QuestionSize(4, 6),
    "peer_lengths": (48, 96),
    "memory_length": 128,
    "lengths": (48, 128),
    "schedule_steps": 4,
    "rounds": 1,
}


def choose_sizes(given: Mapping[str, Any], skip: Collection[str], *, toy: bool) -> Sizes:
    """Fill up what was given with defaults, for the CPU with those of a toy.

    Args:
        given: Attributes of `Sizes`; None for the default.
        skip: Parts to leave out.
        toy: Whether this is a test of the command.
    """
    chosen = {key: value for key, value in given.items() if value is not None}
    return Sizes(**{**(_TOY if toy else {}), **chosen, "skip": frozenset(skip)})
