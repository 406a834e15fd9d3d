"""Tasks as text: drafts, which can be written out at any length, and how much filler fills a length."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from leank_convert.data.grammar import CODE_WORDS, FIRST_NAMES, LAST_NAMES
from leank_convert.data.haystack import Haystack
from leank_convert.errors import LeanKError

_VALUES_PER_NAME = 4
_NUM_OTHER_NAMES = 3
_NUM_TELEGRAMS = 10
_WORDS_PER_TELEGRAM = (16, 32)


@dataclass(frozen=True)
class Draft:
    """Facts, independent questions on them, and answers; how much stands between the facts is open."""

    opening: str  # what the document begins with
    facts: Sequence[tuple[float, str]]  # each with its place, as a fraction of the way through the filler
    questions: Sequence[str]  # what follows the document, each in a prompt of its own
    answers: Sequence[str]  # one a question
    filler: Callable[[int], list[str]]  # the first lines or sentences, as many, to strew the facts over
    separator: str = " "  # what stands between these

    def prompts(self, num_lines: int) -> list[str]:
        """Write out a prompt for each question, with this many lines or sentences beside the facts."""
        document = self.opening + self.separator.join(strew(self.filler(num_lines), self.facts))
        return [document + question for question in self.questions]


def _draw_retrieval(rng: random.Random, num_questions: int) -> Draft:
    def draw_pair() -> tuple[str, str]:
        digits = f"{rng.getrandbits(144):036x}"
        key = "-".join(digits[i : i + 4] for i in (0, 4, 8))
        return key, "-".join(digits[i : i + 6] for i in (12, 18, 24, 30))

    def write(key: str, value: str) -> str:
        return f"Locker {key} opens with code {value}."

    asked = [(draw_pair(), rng.random()) for _ in range(num_questions)]
    return Draft(
        "Here is the register of a storage hall. Each line names a locker and the code that opens it.\n\n",
        [(place, write(*pair)) for pair, place in asked],
        [f"\n\nWhich code opens locker {key}? Answer with the code alone." for (key, _), _ in asked],
        [value for (_, value), _ in asked],
        first_pieces(write(*draw_pair()) for _ in count()),
        separator="\n",
    )


def _draw_multi_value(rng: random.Random, num_questions: int, haystack: Haystack) -> Draft:
    """A text that mentions, here and there, a parcel for somebody; all parcels of one are asked for."""
    people = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    if num_questions + _NUM_OTHER_NAMES > len(people):
        raise LeanKError(
            f"`multi_value` has {len(people)} names, too few for {num_questions} questions a context",
            hint=f"set `data.questions_per_context` to {len(people) - _NUM_OTHER_NAMES} or less",
        )
    names = rng.sample(people, num_questions + _NUM_OTHER_NAMES)
    asked, others = names[:num_questions], names[num_questions:]
    counts = [_VALUES_PER_NAME] * num_questions + [rng.randint(1, _VALUES_PER_NAME) for _ in others]
    parcels = iter(rng.sample(range(10**6, 10**7), sum(counts)))
    facts = sorted(
        (rng.random(), name, next(parcels))
        for name, number in zip(names, counts, strict=True)
        for _ in range(number)
    )
    return Draft(
        "Read the following text with care.\n\n",
        [(place, f"That day the courier left parcel {parcel} for {name}.") for place, name, parcel in facts],
        [
            f"\n\nWhich parcels did the courier leave for {name}? Give the numbers of all of them "
            "in the order of the text, separated by commas, and nothing else."
            for name in asked
        ],
        [", ".join(str(parcel) for _, owner, parcel in facts if owner == name) for name in asked],
        first_pieces(haystack.read(rng)),
    )


def _draw_passkey(rng: random.Random, num_questions: int, haystack: Haystack) -> Draft:
    """DuoAttention's task: long sequences of words hidden in a text, and all words of one are asked for."""
    telegrams = [
        (rng.random(), number, " ".join(rng.choices(CODE_WORDS, k=rng.randint(*_WORDS_PER_TELEGRAM))))
        for number in range(1, max(_NUM_TELEGRAMS, num_questions) + 1)
    ]
    asked = rng.sample(telegrams, num_questions)
    return Draft(
        "Several telegrams are hidden in the following text. Remember their words.\n\n",
        [(place, f"Telegram number {number} read: {words}.") for place, number, words in telegrams],
        [
            f"\n\nWhat did telegram number {number} read? Answer with its words alone, in their order."
            for _, number, _ in asked
        ],
        [words for _, _, words in asked],
        first_pieces(haystack.read(rng)),
    )


def draw_draft(task: str, rng: random.Random, num_questions: int, haystack: Haystack) -> Draft:
    """Draw the facts and questions of one sample; LeanKError if the task has not as many questions."""
    own = random.Random(rng.getrandbits(64))
    if task == "retrieval":
        return _draw_retrieval(own, num_questions)
    draw = _draw_multi_value if task == "multi_value" else _draw_passkey
    return draw(own, num_questions, haystack)


def first_pieces(pieces: Iterator[str]) -> Callable[[int], list[str]]:
    """A function of a count: as many first pieces of an endless sequence, the same ones at every call."""
    taken: list[str] = []

    def first(count: int) -> list[str]:
        taken.extend(islice(pieces, max(0, count - len(taken))))
        return taken[:count]

    return first


def strew(filler: Sequence[str], facts: Iterable[tuple[float, str]]) -> list[str]:
    """Put each fact at its place, given as a fraction of the way through the filler."""
    lines = list(filler)
    for offset, (place, fact) in enumerate(sorted(facts)):
        lines.insert(int(place * (len(filler) + 1)) + offset, fact)
    return lines


def fit(render: Callable[[int], list[int]], shortest: list[int], budget: int) -> tuple[int, list[int]]:
    """Find how many context lines' prompt fills the budget to within about one line, and that prompt.

    Tokens grow almost linearly with lines, so interpolation needs a few renderings where counting up would
    need one per line. `shortest` is the prompt without lines, no longer than `budget`, the tokens of the
    longest that fits.
    """
    fits, best = 0, shortest
    exceeds, exceeding = None, shortest
    guess = 16
    # Far more than it takes, and an end even for a tokenizer whose token count does not grow with the text.
    for _ in range(32):
        prompt = render(guess)
        low, low_length = fits, len(best)
        if len(prompt) <= budget:
            fits, best = guess, prompt
        else:
            exceeds, exceeding = guess, prompt
        if exceeds is None:
            per_line = max(1.0, (len(best) - low_length) / (fits - low))
        else:
            per_line = (len(exceeding) - len(best)) / (exceeds - fits)
        if budget - len(best) < per_line or exceeds == fits + 1:
            break
        guess = fits + max(1, int((budget - len(best)) / per_line))
        if exceeds is not None:
            guess = min(guess, exceeds - 1)
    return fits, best
