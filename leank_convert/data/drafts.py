"""Tasks as text: drafts, which can be written out at any length, and how much filler fills a length."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from leank_convert.data.grammar import CODE_WORDS, FIRST_NAMES, LAST_NAMES
from leank_convert.data.haystack import Haystack
from leank_convert.errors import LeanKError

_VALUES_PER_NAME = 4
_NUM_OTHER_NAMES = 3
_NUM_TELEGRAMS = 10
_WORDS_PER_TELEGRAM = (16, 32)


@dataclass(frozen=True)
class Text:
    """A document with independent questions on it.

    Attributes:
        document: What every prompt begins with.
        questions: What follows it, each in a prompt of its own.
        answers: One a question.
    """

    document: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]

    def prompts(self) -> list[str]:
        """One a question, each with the whole document."""
        return [self.document + question for question in self.questions]


class Draft(Protocol):
    """Facts, questions and answers; how much stands between the facts is open."""

    def render(self, num_lines: int) -> Text:
        """Write it out with this many lines, or sentences, beside the facts."""


class RetrievalDraft:
    """Lines of lockers and codes; some lockers are asked for."""

    def __init__(self, rng: random.Random, num_questions: int) -> None:
        self._rng = random.Random(rng.getrandbits(64))
        self._asked = [(self._draw_pair(), self._rng.random()) for _ in range(num_questions)]
        self._others: list[str] = []

    def _draw_pair(self) -> tuple[str, str]:
        digits = f"{self._rng.getrandbits(144):036x}"
        key = "-".join(digits[i : i + 4] for i in (0, 4, 8))
        return key, "-".join(digits[i : i + 6] for i in (12, 18, 24, 30))

    def render(self, num_lines: int) -> Text:
        """Write it out with this many lines beside the asked ones."""
        while len(self._others) < num_lines:
            self._others.append(self._line(*self._draw_pair()))
        lines = strew(self._others[:num_lines], [(place, self._line(*pair)) for pair, place in self._asked])
        return Text(
            "Here is the register of a storage hall. Each line names a locker and the code that opens it.\n\n"
            + "\n".join(lines),
            tuple(
                f"\n\nWhich code opens locker {key}? Answer with the code alone."
                for (key, _), _ in self._asked
            ),
            tuple(value for (_, value), _ in self._asked),
        )

    @staticmethod
    def _line(key: str, value: str) -> str:
        return f"Locker {key} opens with code {value}."


class _RunningTextDraft:
    """Facts that are strewn over running text."""

    def __init__(self, sentences: Iterator[str]) -> None:
        self._sentences = sentences
        self._taken: list[str] = []

    def _hide(self, facts: Iterable[tuple[float, str]], num_sentences: int) -> str:
        while len(self._taken) < num_sentences:
            self._taken.append(next(self._sentences))
        return " ".join(strew(self._taken[:num_sentences], facts))


class MultiValueDraft(_RunningTextDraft):
    """A text that mentions, here and there, a parcel for somebody; all parcels of one are asked for."""

    def __init__(self, rng: random.Random, num_questions: int, haystack: Haystack) -> None:
        rng = random.Random(rng.getrandbits(64))
        people = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
        if num_questions + _NUM_OTHER_NAMES > len(people):
            raise LeanKError(
                f"`multi_value` has {len(people)} names, too few for {num_questions} questions a context",
                hint=f"set `data.questions_per_context` to {len(people) - _NUM_OTHER_NAMES} or less",
            )
        names = rng.sample(people, num_questions + _NUM_OTHER_NAMES)
        self._asked, others = names[:num_questions], names[num_questions:]
        counts = [_VALUES_PER_NAME] * num_questions + [rng.randint(1, _VALUES_PER_NAME) for _ in others]
        parcels = iter(rng.sample(range(10**6, 10**7), sum(counts)))
        self._facts = sorted(
            (rng.random(), name, next(parcels))
            for name, count in zip(names, counts, strict=True)
            for _ in range(count)
        )
        super().__init__(haystack.read(rng))

    def render(self, num_lines: int) -> Text:
        """Write it out with this many sentences beside those that mention parcels."""
        mentions = [
            (place, f"That day the courier left parcel {parcel} for {name}.")
            for place, name, parcel in self._facts
        ]
        return Text(
            "Read the following text with care.\n\n" + self._hide(mentions, num_lines),
            tuple(
                f"\n\nWhich parcels did the courier leave for {asked}? Give the numbers of all of them "
                "in the order of the text, separated by commas, and nothing else."
                for asked in self._asked
            ),
            tuple(
                ", ".join(str(parcel) for _, name, parcel in self._facts if name == asked)
                for asked in self._asked
            ),
        )


class PasskeyDraft(_RunningTextDraft):
    """DuoAttention's task: long sequences of words hidden in a text, and all words of one are asked for."""

    def __init__(self, rng: random.Random, num_questions: int, haystack: Haystack) -> None:
        rng = random.Random(rng.getrandbits(64))
        self._telegrams = [
            (rng.random(), number, " ".join(rng.choices(CODE_WORDS, k=rng.randint(*_WORDS_PER_TELEGRAM))))
            for number in range(1, max(_NUM_TELEGRAMS, num_questions) + 1)
        ]
        self._asked = rng.sample(self._telegrams, num_questions)
        super().__init__(haystack.read(rng))

    def render(self, num_lines: int) -> Text:
        """Write it out with this many sentences beside the telegrams."""
        telegrams = [
            (place, f"Telegram number {number} read: {words}.") for place, number, words in self._telegrams
        ]
        return Text(
            "Several telegrams are hidden in the following text. Remember their words.\n\n"
            + self._hide(telegrams, num_lines),
            tuple(
                f"\n\nWhat did telegram number {number} read? Answer with its words alone, in their order."
                for _, number, _ in self._asked
            ),
            tuple(words for _, _, words in self._asked),
        )


def draw_draft(task: str, rng: random.Random, num_questions: int, haystack: Haystack) -> Draft:
    """Draw the facts and questions of one sample.

    Raises:
        LeanKError: If the task has not as many questions.
    """
    if task == "retrieval":
        return RetrievalDraft(rng, num_questions)
    if task == "multi_value":
        return MultiValueDraft(rng, num_questions, haystack)
    return PasskeyDraft(rng, num_questions, haystack)


def strew(filler: Sequence[str], facts: Iterable[tuple[float, str]]) -> list[str]:
    """Put each fact at its place, given as a fraction of the way through the filler."""
    lines = list(filler)
    for offset, (place, fact) in enumerate(sorted(facts)):
        lines.insert(int(place * (len(filler) + 1)) + offset, fact)
    return lines


def fit(render: Callable[[int], list[int]], shortest: list[int], budget: int) -> tuple[int, list[int]]:
    """Find the number of context lines whose prompt fills the budget to within about one line.

    Tokens grow almost linearly with lines, so interpolation needs a few renderings where counting up would
    need one per line.

    Args:
        render: The prompt with as many lines.
        shortest: The prompt without lines, no longer than `budget`.
        budget: Tokens of the longest prompt that fits.

    Returns:
        The number of lines and the prompt.
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
