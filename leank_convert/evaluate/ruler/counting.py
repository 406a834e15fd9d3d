"""RULER's counting tasks: the words that come up most often, in a numbered list and in a coded text."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator, Sequence

from leank_convert.evaluate.ruler.draft import Draft, Filler, draw_distinct
from leank_convert.evaluate.ruler.words import ADJECTIVES, NOUNS, VERBS

_WORDS = ADJECTIVES + NOUNS + VERBS

_COMMON_MAX_NEW_TOKENS = 120
_NUM_COMMON = 10
# RULER counts to less, and gives a smaller example, below this length: `freq_cw` and `freq_ucw`, then the
# example's words and their frequencies.
_FULL_LENGTH = 4096
_FREQUENCIES, _SHORT_FREQUENCIES = (30, 3), (6, 1)
_EXAMPLE, _SHORT_EXAMPLE = (40, 10, 3), (20, 3, 1)

_FREQUENT_MAX_NEW_TOKENS = 50
_ALPHA = 2.0
_ZETA_OF_ALPHA = math.pi**2 / 6
_NUM_FREQUENT = 3
_CODED_LENGTH = 6
_TOKENS_PER_CODED_WORD = 50
# From here on the third answer comes up more often than the word after it, rounded down as both are.
_FEWEST_CODED = 80


def draft_common_words(rng: random.Random, length: int) -> Draft:
    """Draw common and rarer words, and before them a solved example of other words."""
    short = length < _FULL_LENGTH
    common_frequency, rare_frequency = _SHORT_FREQUENCIES if short else _FREQUENCIES
    num_words, *example_frequencies = _SHORT_EXAMPLE if short else _EXAMPLE
    drawn = rng.sample(_WORDS, len(_WORDS))
    common, rest = drawn[:_NUM_COMMON], drawn[_NUM_COMMON:]
    shown = rest[:num_words]
    filler = Filler(_go_on(rest[num_words:], rest, random.Random(rng.getrandbits(64))))
    order, example_order = rng.getrandbits(64), rng.getrandbits(64)
    example = _shuffle(
        shown[:_NUM_COMMON] * example_frequencies[0] + shown[_NUM_COMMON:] * example_frequencies[1],
        example_order,
    )
    prefix = f"Answer: The {_NUM_COMMON} words that come up most often in this list are:"
    solved = f"{_ask_common(example)}\n{prefix} {_number(shown[:_NUM_COMMON])}"

    def render(num_rare: int) -> str:
        words = common * common_frequency + filler.first(num_rare) * rare_frequency
        return f"{solved}\n\n{_ask_common(_shuffle(words, order))}"

    return Draft(render, prefix, tuple(common), _COMMON_MAX_NEW_TOKENS)


def draft_frequent_words(rng: random.Random, length: int) -> Draft:
    """Draw coded words whose frequencies fall as a zeta distribution's; the most frequent is dots."""
    num_coded = max((length - _FREQUENT_MAX_NEW_TOKENS) // _TOKENS_PER_CODED_WORD, _NUM_FREQUENT + 2)

    def draw_word() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=_CODED_LENGTH))

    coded = draw_distinct(draw_word, num_coded - 1)
    vocabulary = ["...", *coded]
    order = rng.getrandbits(64)

    def render(num_more: int) -> str:
        total = _FEWEST_CODED + num_more
        words = [
            word
            for rank, word in enumerate(vocabulary, start=1)
            for _ in range(int(total * rank**-_ALPHA / _ZETA_OF_ALPHA))
        ]
        return (
            "The text below is written in code. Keep count of its code words.\n\n"
            f"{' '.join(_shuffle(words, order))}\n\n"
            "Question: Which three code words come up most often in this text? "
            "Dots are no code word. Do not explain your answer."
        )

    prefix = "Answer: The three code words that come up most often in this text are:"
    return Draft(render, prefix, tuple(coded[:_NUM_FREQUENT]), _FREQUENT_MAX_NEW_TOKENS)


def _go_on(words: Sequence[str], parts: Sequence[str], rng: random.Random) -> Iterator[str]:
    """The words, then pairs of `parts` for ever, all different until most pairs were drawn."""
    yield from words
    seen: set[str] = set()
    while True:
        pair = "-".join(rng.sample(parts, 2))
        if pair not in seen or len(seen) > len(parts) ** 2 // 2:
            seen.add(pair)
            yield pair


def _shuffle(words: Sequence[str], seed: int) -> list[str]:
    return random.Random(seed).sample(words, len(words))


def _number(words: Sequence[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))


def _ask_common(words: Sequence[str]) -> str:
    return (
        "Below is a numbered list in which some words come up more often than others. Keep count of them."
        f"\n\n{_number(words)}\n\n"
        f"Question: Which {_NUM_COMMON} words come up most often in this list?"
    )
