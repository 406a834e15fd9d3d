"""RULER's eight needle tasks: keys with secret values somewhere in filler, and some of them asked for."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from leank_convert.data.drafts import strew
from leank_convert.data.haystack import Haystack
from leank_convert.evaluate.ruler.draft import NOISE, Draft, Filler, draw_distinct
from leank_convert.evaluate.ruler.words import ADJECTIVES, NOUNS

_Kind = Literal["words", "numbers", "uuids"]

_MAX_NEW_TOKENS = 128
_NUM_DEPTHS = 40
_SINGULAR = {"numbers": "number", "uuids": "code"}


@dataclass(frozen=True)
class NeedleTask:
    """A row of RULER's `synthetic.yaml`.

    Attributes:
        haystack: `noise` repeats one line, `essay` is running text, `needle` more needles.
        keys: What keys are.
        values: What values are.
        num_keys: Keys in the text (`num_needle_k`).
        num_values: Values of each (`num_needle_v`).
        num_queries: Keys that are asked for (`num_needle_q`).
    """

    haystack: Literal["noise", "essay", "needle"]
    keys: _Kind = "words"
    values: _Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


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
    """Draw keys, values, their depths and the question."""
    what = _SINGULAR[task.values]
    keys = draw_distinct(lambda: _draw(task.keys, rng), task.num_keys)
    values = draw_distinct(lambda: _draw(task.values, rng), task.num_keys * task.num_values)
    # Value v belongs to key v mod num_keys.
    pairs = [(keys[place % task.num_keys], value) for place, value in enumerate(values)]
    depths = rng.sample(range(_NUM_DEPTHS), len(pairs))
    needles = [
        (depth / (_NUM_DEPTHS - 1), _needle(what, *pair)) for depth, pair in zip(depths, pairs, strict=True)
    ]
    asked = rng.sample(keys, task.num_queries)
    references = tuple(value for key in asked for owner, value in pairs if owner == key)
    filler = Filler(_read_filler(task, random.Random(rng.getrandbits(64)), haystack, {*keys, *values}))
    separator = " " if task.haystack == "essay" else "\n"

    listed = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    if len(references) > 1:
        told, verb = f"secret {what}s", "are"
        before = f"Some secret {what}s are stated in the text below"
        question = f"Which secret {what}s does the text state for {listed}? Name all of them."
    else:
        told, verb = f"secret {what}", "is"
        before = f"A secret {what} is stated in the text below"
        question = f"Which secret {what} does the text state for {listed}?"

    def render(num_pieces: int) -> str:
        context = separator.join(strew(filler.first(num_pieces), needles))
        return (
            f"{before}, which you should read closely: a question on it follows.\n\n{context}\n\n{question}"
        )

    return Draft(render, f"The {told} that the text states for {listed} {verb}", references, _MAX_NEW_TOKENS)


def _read_filler(task: NeedleTask, rng: random.Random, haystack: Haystack, taken: set[str]) -> Iterator[str]:
    """Pieces of filler, for ever; no needle among them repeats a key or value that is `taken`."""
    if task.haystack == "noise":
        return repeat(NOISE)
    if task.haystack == "essay":
        return haystack.read(rng)
    return _draw_needles(task, rng, taken)


def _draw_needles(task: NeedleTask, rng: random.Random, taken: set[str]) -> Iterator[str]:
    while True:
        key, value = _draw(task.keys, rng), _draw(task.values, rng)
        if not taken & {key, value}:
            yield _needle(_SINGULAR[task.values], key, value)


def _draw(kind: _Kind, rng: random.Random) -> str:
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _needle(what: str, key: str, value: str) -> str:
    return f"Take note: the secret {what} for {key} is {value}."
