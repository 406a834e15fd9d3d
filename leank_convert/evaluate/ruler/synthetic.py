"""RULER's needles, variable tracking and counting of words, before it is known how much filler fits."""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Literal, NamedTuple

from leank_convert.data.drafts import first_pieces, strew
from leank_convert.data.haystack import Haystack
from leank_convert.evaluate.ruler.words import ADJECTIVES, NOUNS, VERBS

NOISE = "The shop is shut. The street is wet. A cart rolls by. Then all is quiet. Nobody else comes."
"""One line of filler that says nothing, repeated."""

_Kind = Literal["words", "numbers", "uuids"]
_SINGULAR = {"numbers": "number", "uuids": "code"}
_NUM_DEPTHS = 40
_NUM_HOPS = 4
_NUM_COMMON = 10
_WORDS = ADJECTIVES + NOUNS + VERBS


class Draft(NamedTuple):
    """A question with everything but the amount of filler decided."""

    # The user's message with this many pieces of filler; with more it grows and is otherwise alike.
    render: Callable[[int], str]
    answer_prefix: str  # how the model's answer begins; follows the chat template
    references: tuple[str, ...]  # what the answer should hold
    max_new_tokens: int  # RULER's `tokens_to_generate`
    scoring: str = "all"  # a key of `SCORES`


class NeedleTask(NamedTuple):
    """A row of RULER's `synthetic.yaml`."""

    haystack: Literal["noise", "essay", "needle"]  # a line repeated, running text, or more needles
    keys: _Kind = "words"
    values: _Kind = "numbers"
    num_keys: int = 1  # `num_needle_k`
    num_values: int = 1  # of each key, `num_needle_v`
    num_queries: int = 1  # keys that are asked for, `num_needle_q`


NEEDLE_TASKS = {
    "niah_single_1": NeedleTask("noise"),
    "niah_single_2": NeedleTask("essay"),
    "niah_single_3": NeedleTask("essay", values="uuids"),
    "niah_multikey_1": NeedleTask("essay", num_keys=4),
    "niah_multikey_2": NeedleTask("needle"),
    "niah_multikey_3": NeedleTask("needle", keys="uuids", values="uuids"),
    "niah_multivalue": NeedleTask("essay", num_values=4),
    "niah_multiquery": NeedleTask("essay", num_keys=4, num_queries=4),
}


def draft_needles(task: NeedleTask, rng: random.Random, haystack: Haystack) -> Draft:
    """Keys with secret values somewhere in filler, and some of them asked for."""
    what = _SINGULAR[task.values]
    keys = _draw_distinct(lambda: _draw(task.keys, rng), task.num_keys)
    values = _draw_distinct(lambda: _draw(task.values, rng), task.num_keys * task.num_values)
    # Value v belongs to key v mod num_keys.
    pairs = [(keys[place % task.num_keys], value) for place, value in enumerate(values)]
    depths = rng.sample(range(_NUM_DEPTHS), len(pairs))
    needles = [
        (depth / (_NUM_DEPTHS - 1), _needle(what, *pair)) for depth, pair in zip(depths, pairs, strict=True)
    ]
    asked = rng.sample(keys, task.num_queries)
    references = tuple(value for key in asked for owner, value in pairs if owner == key)
    filler_rng = random.Random(rng.getrandbits(64))
    filler = first_pieces(
        repeat(NOISE)
        if task.haystack == "noise"
        else haystack.read(filler_rng)
        if task.haystack == "essay"
        else _draw_needles(task, filler_rng, taken={*keys, *values})
    )
    separator = " " if task.haystack == "essay" else "\n"

    listed = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    is_one = len(references) == 1
    some, secret = ("A", f"secret {what}") if is_one else ("Some", f"secret {what}s")
    verb, ending = ("is", "") if is_one else ("are", " Name all of them.")
    before = f"{some} {secret} {verb} stated in the text below"
    question = f"Which {secret} does the text state for {listed}?{ending}"

    def render(num_pieces: int) -> str:
        context = separator.join(strew(filler(num_pieces), needles))
        return (
            f"{before}, which you should read closely: a question on it follows.\n\n{context}\n\n{question}"
        )

    return Draft(render, f"The {secret} that the text states for {listed} {verb}", references, 128)


def draft_tracking(rng: random.Random) -> Draft:
    """A chain of assignments in noise, all names of which hold its number; before it a solved example."""
    number, example_number = map(str, rng.sample(range(10**4, 10**5), 2))
    names, places = _draw_chain(rng, 5)
    # Shorter names than the question's, as in RULER.
    example_names, example_places = _draw_chain(rng, 3)
    example = _ask_chain(example_number, example_names, example_places, 10)
    solved = f"{example}\n{_begin_chain(example_number)} {' '.join(example_names)}"

    def render(num_lines: int) -> str:
        return f"{solved}\n\n{_ask_chain(number, names, places, num_lines)}"

    return Draft(render, _begin_chain(number), tuple(names), 30)


def draft_common_words(rng: random.Random, length: int) -> Draft:
    """Common and rarer words in a numbered list, and before them a solved example of other words."""
    # RULER counts to less, and gives a smaller example, below 4096 tokens: `freq_cw` and `freq_ucw`, then the
    # example's words and their frequencies.
    if length < 4096:
        common_frequency, rare_frequency, num_words, shown_common, shown_rare = 6, 1, 20, 3, 1
    else:
        common_frequency, rare_frequency, num_words, shown_common, shown_rare = 30, 3, 40, 10, 3
    drawn = rng.sample(_WORDS, len(_WORDS))
    common, rest = drawn[:_NUM_COMMON], drawn[_NUM_COMMON:]
    shown = rest[:num_words]
    rare = first_pieces(_go_on(rest[num_words:], rest, random.Random(rng.getrandbits(64))))
    order, example_order = rng.getrandbits(64), rng.getrandbits(64)
    example = shown[:_NUM_COMMON] * shown_common + shown[_NUM_COMMON:] * shown_rare
    prefix = f"Answer: The {_NUM_COMMON} words that come up most often in this list are:"
    solved = f"{_ask_common(_shuffle(example, example_order))}\n{prefix} {_number(shown[:_NUM_COMMON])}"

    def render(num_rare: int) -> str:
        words = common * common_frequency + rare(num_rare) * rare_frequency
        return f"{solved}\n\n{_ask_common(_shuffle(words, order))}"

    return Draft(render, prefix, tuple(common), 120)


def draft_frequent_words(rng: random.Random, length: int) -> Draft:
    """Coded words whose frequencies fall as a zeta distribution's; the most frequent is dots."""
    max_new_tokens, num_asked = 50, 3
    num_coded = max((length - max_new_tokens) // 50, num_asked + 2)
    coded = _draw_distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=6)), num_coded - 1)
    order = rng.getrandbits(64)

    def render(num_more: int) -> str:
        # From 80 on the third answer comes up more often than the word after it, rounded down as both are.
        total = 80 + num_more
        words = [
            word
            for rank, word in enumerate(["...", *coded], start=1)
            for _ in range(int(total * rank**-2.0 / (math.pi**2 / 6)))
        ]
        return (
            "The text below is written in code. Keep count of its code words.\n\n"
            f"{' '.join(_shuffle(words, order))}\n\n"
            "Question: Which three code words come up most often in this text? "
            "Dots are no code word. Do not explain your answer."
        )

    prefix = "Answer: The three code words that come up most often in this text are:"
    return Draft(render, prefix, tuple(coded[:num_asked]), max_new_tokens)


def _draw_distinct(draw: Callable[[], str], count: int) -> list[str]:
    """Draw until there are as many different strings."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _draw(kind: _Kind, rng: random.Random) -> str:
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _needle(what: str, key: str, value: str) -> str:
    return f"Take note: the secret {what} for {key} is {value}."


def _draw_needles(task: NeedleTask, rng: random.Random, taken: set[str]) -> Iterator[str]:
    """Needles for ever, none of which repeats a key or value that is `taken`."""
    while True:
        key, value = _draw(task.keys, rng), _draw(task.values, rng)
        if not taken & {key, value}:
            yield _needle(_SINGULAR[task.values], key, value)


def _draw_chain(rng: random.Random, name_length: int) -> tuple[list[str], list[float]]:
    """Names, and where their lines stand as fractions of the way through the noise, ascending."""
    names = _draw_distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=name_length)), _NUM_HOPS + 1)
    return names, sorted(rng.random() for _ in names)


def _ask_chain(number: str, names: Sequence[str], places: Sequence[float], num_lines: int) -> str:
    """The question, with the chain hidden in this many lines of noise: each name is set to the one before."""
    lines = [f"SET {name} = {value}" for name, value in zip(names, (number, *names), strict=False)]
    context = "\n".join(strew([NOISE] * num_lines, zip(places, lines, strict=True)))
    return (
        "The text below sets names to a number, or to what another name holds. Keep track of them.\n\n"
        f"{context}\n\nQuestion: Which names hold the number {number} at the end of the text?"
    )


def _begin_chain(number: str) -> str:
    return f"Answer: {_NUM_HOPS + 1} names hold the number {number} at the end of the text:"


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
