"""Where running text comes from: a file or a dataset that the recipe names, or the built-in grammar."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Protocol

from leank_convert.data.grammar import draw_sentence
from leank_convert.recipe import HaystackSection


class Haystack(Protocol):
    """Running text without end.

    Attributes:
        digest: Of all text that can come out of it.
    """

    digest: str

    def read(self, rng: random.Random) -> Iterator[str]:
        """Sentences, from a random place on, for ever."""


class GrammarHaystack:
    """Sentences of the built-in grammar."""

    digest = "grammar"

    def read(self, rng: random.Random) -> Iterator[str]:
        """Sentences that are drawn one by one."""
        while True:
            yield draw_sentence(rng)


def open_haystack(section: HaystackSection) -> Haystack:
    """Read what the recipe names."""
    return GrammarHaystack()
