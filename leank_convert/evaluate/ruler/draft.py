"""What one prompt asks, before it is known how much filler its length has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from leank_convert.evaluate.prompt import Scoring

NOISE = "The shop is shut. The street is wet. A cart rolls by. Then all is quiet. Nobody else comes."
"""One line of filler that says nothing, repeated."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Draft:
    """A question with everything but the amount of filler decided.

    Attributes:
        render: The user's message with this many pieces of filler; with more it grows and is otherwise alike.
        answer_prefix: How the model's answer begins; follows the chat template.
        references: What the answer should hold.
        max_new_tokens: RULER's `tokens_to_generate` of the task.
        scoring: Whether all references count, or any one.
    """

    render: Callable[[int], str]
    answer_prefix: str
    references: tuple[str, ...]
    max_new_tokens: int
    scoring: Scoring = "all"


class Filler(Generic[_T]):
    """The beginning of an endless sequence, drawn no further than was asked for.

    Args:
        pieces: The sequence.
    """

    def __init__(self, pieces: Iterator[_T]) -> None:
        self._pieces = pieces
        self._taken: list[_T] = []

    def first(self, count: int) -> list[_T]:
        """The first so many pieces, the same at every call."""
        while len(self._taken) < count:
            self._taken.append(next(self._pieces))
        return self._taken[:count]


def draw_distinct(draw: Callable[[], str], count: int) -> list[str]:
    """Draw until there are as many different strings."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)
