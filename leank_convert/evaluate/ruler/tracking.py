"""RULER's variable tracking: a chain of assignments in noise, and all names that come to hold its number."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from leank_convert.data.drafts import strew
from leank_convert.evaluate.ruler.draft import NOISE, Draft, draw_distinct

_NUM_HOPS = 4
_MAX_NEW_TOKENS = 30
# The solved example has shorter names than the question, as RULER's has.
_NAME_LENGTH, _EXAMPLE_NAME_LENGTH = 5, 3
_EXAMPLE_LINES = 10


@dataclass(frozen=True)
class _Chain:
    """Names, each set to the one before; the first to the number.

    Attributes:
        names: In the order of their lines.
        number: Five digits.
        places: Of the lines, as fractions of the way through the noise, ascending.
    """

    names: tuple[str, ...]
    number: str
    places: tuple[float, ...]

    def ask(self, num_lines: int) -> str:
        """The question, with the chain hidden in this many lines of noise."""
        values = (self.number, *self.names)
        lines = [f"SET {name} = {value}" for name, value in zip(self.names, values, strict=False)]
        context = "\n".join(strew([NOISE] * num_lines, zip(self.places, lines, strict=True)))
        return (
            "The text below sets names to a number, or to what another name holds. Keep track of them.\n\n"
            f"{context}\n\nQuestion: Which names hold the number {self.number} at the end of the text?"
        )

    def begin_answer(self) -> str:
        """Up to the first name."""
        return f"Answer: {len(self.names)} names hold the number {self.number} at the end of the text:"


def draft_tracking(rng: random.Random) -> Draft:
    """Draw a chain, and before it a solved example with another number."""
    number, example_number = rng.sample(range(10**4, 10**5), 2)
    chain = _draw_chain(rng, _NAME_LENGTH, number)
    example = _draw_chain(rng, _EXAMPLE_NAME_LENGTH, example_number)
    solved = f"{example.ask(_EXAMPLE_LINES)}\n{example.begin_answer()} {' '.join(example.names)}"

    def render(num_lines: int) -> str:
        return f"{solved}\n\n{chain.ask(num_lines)}"

    return Draft(render, chain.begin_answer(), chain.names, _MAX_NEW_TOKENS)


def _draw_chain(rng: random.Random, name_length: int, number: int) -> _Chain:
    def draw_name() -> str:
        return "".join(rng.choices(string.ascii_uppercase, k=name_length))

    names = draw_distinct(draw_name, _NUM_HOPS + 1)
    return _Chain(tuple(names), str(number), tuple(sorted(rng.random() for _ in names)))
