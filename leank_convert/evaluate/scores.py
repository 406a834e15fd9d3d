"""Scores: an answer against one reference, from 0 to 1.

Those of LongBench (arXiv 2308.14508) and GSM-Infinite (arXiv 2502.05252) have differences, so that figures
are comparable between models here and not with published ones. Chinese is compared by its characters, not by
words that a segmenter finds. ROUGE-L is the package `rouge-score`'s. Final numbers may be bold or LaTeX, and
variables are read from the answer's last line, for which GSM-Infinite asks another model.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from difflib import SequenceMatcher
from functools import cache, partial
from typing import Any

from leank_convert.errors import LeanKError

# Of thousands, also as LaTeX has it, and a number with them.
_SEPARATOR = r"(?:,\\!|\{,\}|\\,|,)"
_SEPARATED = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})+(?!\d)")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_COMMENTS = ("`", "#", "//")
# Where a final number may stand, the surest first, and whether its first or its last mention counts.
_FINAL_NUMBERS = (
    (re.compile(r"(?:answer|solution)\**:[\s*$\\(]*(-?\d+)\b(?!\.\d)", re.IGNORECASE), 0),
    (re.compile(r"boxed\{\s*(-?\d+)\s*\}"), -1),
    (re.compile(r"\bis:?[\s*$\\(]+(-?\d+)\b(?!\.\d)", re.IGNORECASE), -1),
)


def score_exact(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Whether the answer is the reference, white space around it aside."""
    return float(answer.strip() == reference)


def score_held(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Whether the answer holds the reference, whatever their case."""
    return float(reference.lower() in answer.lower())


def score_words(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words of both, without case, punctuation and articles."""
    return _f1(*(_ARTICLES.sub(" ", _plain(text)).split() for text in (answer, reference)))


def score_characters(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the characters of both, without case, punctuation and white space."""
    return _f1(*("".join(_plain(text).split()) for text in (answer, reference)))


def score_rouge(
    answer: str, reference: str, classes: Sequence[str] = (), *, by_character: bool = False
) -> float:
    """ROUGE-L of words (F-measure), or characters, white space left out; LeanKError without `rouge-score`."""
    return float(_rouge_scorer(by_character=by_character).score(reference, answer)["rougeL"].fmeasure)


def score_class(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """One by the number of classes that the answer names, if the right one is among them.

    A class whose name is a part of the right one's does not count.
    """
    named = [name for name in classes if name in answer and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def score_numbers(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The share of the answer's numbers that are the reference's first one."""
    right = re.search(r"\d+", reference)
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right[0]) / len(numbers) if right and numbers else 0.0


def score_code(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the answer's first line of code, to a percent; lines with marks of comments are none."""
    lines = (line for line in answer.split("\n") if line.strip() and not any(m in line for m in _COMMENTS))
    # Else of 200 characters on frequent ones are passed over.
    return round(SequenceMatcher(None, next(lines, ""), reference, autojunk=False).ratio(), 2)


def score_final_number(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Whether the number that the answer ends up with is the reference."""
    answer = _SEPARATED.sub(lambda found: re.sub(_SEPARATOR, "", found[0]), answer)
    for pattern, place in _FINAL_NUMBERS:
        if found := pattern.findall(answer):
            # Of any number of digits, where `int` ends at 4300.
            return float(Decimal(found[place]) == Decimal(reference))
    return 0.0


def score_variables(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Whether the answer's last line names the reference's variables (`V1`, `V22`) and no other."""
    last = answer.strip().rpartition("\n")[2]
    given, right = (set(re.findall(r"\bV\d+\b", text)) for text in (last, reference))
    return float(given == right)


SCORES: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "exact": score_exact,
    "all": score_held,
    "any": score_held,  # RULER's `string_match_part`
    "words": score_words,
    "characters": score_characters,
    "rouge": score_rouge,
    "rouge_characters": partial(score_rouge, by_character=True),
    "class": score_class,
    "numbers": score_numbers,
    "code": score_code,
    "final_number": score_final_number,
    "variables": score_variables,
}
"""By the names that a prompt's `scoring` takes."""


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if unicodedata.category(letter)[0] not in "PS")


def _f1(given: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(given) & Counter(right)).values())
    return 2 * common / (len(given) + len(right)) if common else 0.0


@cache
def _rouge_scorer(*, by_character: bool) -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise LeanKError(
            "summaries are scored by the package `rouge-score`, which is missing",
            hint="install it: `pip install 'leank-convert[datasets]'`",
        ) from None
    return rouge_scorer.RougeScorer(["rougeL"], tokenizer=_Characters() if by_character else None)


class _Characters:
    """A tokenizer as `rouge-score` takes it."""

    def tokenize(self, text: str) -> list[str]:
        """Every character but white space."""
        return list("".join(text.split()))
