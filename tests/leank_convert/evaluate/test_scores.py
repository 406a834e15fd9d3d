"""How benchmarks' answers are scored; the expected values are worked out by hand from their definitions."""

import sys

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.evaluate import scores
from leank_convert.evaluate.prompt import Prompt, score

CLASSES = ("city", "capital city", "person")


def prompt(scoring, *references, **options):
    return Prompt("task", 64, 0, torch.arange(3), references, scoring, 8, **options)


@pytest.mark.parametrize(
    ("scoring", "reference", "answer", "expected"),
    [
        ("words", "the Eiffel Tower", "It's an Eiffel tower.", 2 * 2 / (3 + 2)),
        ("words", "Paris", "Rome", 0),
        ("words", "Paris", "", 0),
        ("characters", "北京 大学", "北京。", 2 * 2 / (2 + 4)),
        ("rouge", "the cat sat on the mat", "The cat lay on a mat.", 4 / 6),
        ("rouge_characters", "北京大学", "北大", 2 * (1 * 0.5) / 1.5),
        ("numbers", "Paragraph 7", "Paragraph 7, not 17 or 8", 1 / 3),
        ("numbers", "12", "There are twelve", 0),
        ("numbers", "段落12", "段落12", 1),
        ("code", "x = 1", "\n# set x\n```python\nx = 1\ny = 2", 1),
        ("code", "return a", "return b", round(2 * 7 / 16, 2)),
        ("code", "return a", "// nothing", 0),
        ("final_number", "12", "First 3, then 4. Answer: 12.", 1),
        ("final_number", "12", "**Answer:** 12", 1),
        ("final_number", "12", "So it is 7, no: it is 12", 1),
        ("final_number", "-3", r"Thus \boxed{-3} is 4", 1),
        ("final_number", "12", "Answer: 120. It is 12", 0),
        ("final_number", "12", "12", 0),
        ("variables", "V1, V22", "V3 = 4\nThey are V22 and V1.", 1),
        ("variables", "V1, V22", "V1 and V2 are", 0),
        ("variables", "", "None of them.", 1),
    ],
)
def test_a_score_is_that_of_its_definition(scoring, reference, answer, expected):
    assert score(answer, prompt(scoring, reference)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"), [("a city", 1), ("a city or a person", 1 / 2), ("a person", 0), ("nothing", 0)]
)
def test_a_class_counts_by_how_many_are_named(answer, expected):
    assert score(answer, prompt("class", "city", classes=CLASSES)) == expected


def test_a_class_within_the_right_ones_name_does_not_count():
    assert score("a capital city", prompt("class", "capital city", classes=CLASSES)) == 1
    assert score("a capital city", prompt("class", "city", classes=CLASSES)) == 1 / 2


def test_the_best_reference_counts_and_only_the_first_line_where_that_is_the_answer():
    assert score("Lyon", prompt("words", "Paris", "Lyon")) == 1
    text = "\nLyon\nQuestion: what else?"
    assert score(text, prompt("words", "Lyon", first_line=True)) == 1
    assert score(text, prompt("words", "Lyon")) < 1


def test_what_a_score_depends_on_changes_the_prompts_digest():
    plain = prompt("class", "city")
    assert len({plain.digest, prompt("class", "city", classes=CLASSES).digest}) == 2
    assert len({plain.digest, prompt("class", "city", first_line=True).digest}) == 2


def test_without_rouge_score_summaries_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    scores._rouge_scorer.cache_clear()
    with pytest.raises(LeanKError, match="`rouge-score`, which is missing") as caught:
        score("a", prompt("rouge", "a"))
    assert "leank-convert[datasets]" in caught.value.hint
