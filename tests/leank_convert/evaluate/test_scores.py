"""How answers are scored; the expected values are worked out by hand from their definitions."""

import pytest
import torch

from leank_convert.evaluate.prompt import Prompt, score

CLASSES = ("city", "capital city", "person")


def prompt(scoring, *references, classes=CLASSES, **options):
    return Prompt("task", 64, 0, torch.arange(3), references, scoring, 8, classes=classes, **options)


@pytest.mark.parametrize(
    ("scoring", "reference", "answer", "expected"),
    [
        ("exact", "goze 17", " goze 17\n", 1),
        ("exact", "goze 17", "goze 17 42", 0),
        ("all", "Amber-Fox", "AMBER-FOX", 1),
        ("all", "7", "", 0),
        ("words", "the Eiffel Tower", "It's an Eiffel tower.", 2 * 2 / (3 + 2)),
        ("words", "Paris", "", 0),
        ("characters", "北京 大学", "北京。", 2 * 2 / (2 + 4)),
        ("rouge", "the cat sat on the mat", "The cat lay on a mat.", 4 / 6),
        ("rouge_characters", "北京大学", "北大", 2 * (1 * 0.5) / 1.5),
        ("numbers", "Paragraph 7", "Paragraph 7, not 17 or 8", 1 / 3),
        ("numbers", "段落12", "段落12", 1),
        ("code", "x = 1", "\n# set x\n```python\nx = 1\ny = 2", 1),
        ("code", "return a", "return b", round(2 * 7 / 16, 2)),
        pytest.param("code", "x = [" + "aaab, " * 40, "x = [" + "aaac, " * 40, 0.84, id="a long line"),
        ("final_number", "12", "First 3, then 4. Answer: 12.", 1),
        ("final_number", "12", "**Answer:** 12", 1),
        ("final_number", "-3", r"Thus \boxed{-3} is 4", 1),
        ("final_number", "12", "Answer: 120. It is 12", 0),
        ("final_number", "12", r"**Answer**: \(12\)", 1),
        ("final_number", "12", "The final answer is: **12**.", 1),
        ("final_number", "12", "Answer: 12.5", 0),
        ("final_number", "12", "12", 0),
        ("final_number", "1234567", "Answer: 1,234,567", 1),
        ("final_number", "1", "Answer: 1,234", 0),
        ("final_number", "12000", r"The answer is: 12{,}000", 1),
        ("final_number", "1234", r"\boxed{1\,234}", 1),
        ("final_number", "2", "Answer: 2,3 or 4", 1),
        ("final_number", "12345", r"Answer: $12,\!345$.", 1),
        ("final_number", "0", "Answer: 0,125", 1),
        ("final_number", "-1200", "Answer: -1,200", 1),
        ("final_number", "-7", "Answer: -007", 1),
        pytest.param("final_number", "9" * 5000, "Answer: 00" + "9" * 5000, 1, id="a number of 5000 digits"),
        pytest.param("final_number", "12", "Answer: " + "9" * 5000, 0, id="another of 5000 digits"),
        ("variables", "V1, V22", "V3 = 4\nThey are V22 and V1.", 1),
        ("variables", "", "None of them.", 1),
        # A class counts by how many are named; one within the right one's name does not.
        ("class", "city", "a city", 1),
        ("class", "city", "a city or a person", 1 / 2),
        ("class", "city", "nothing", 0),
        ("class", "capital city", "a capital city", 1),
        ("class", "city", "a capital city", 1 / 2),
        # Of several references all, any or the best count.
        ("all", ["7", "42", "99", "x"], "42", 1 / 4),
        ("any", ["Paris", "the city of Paris"], "paris it is", 1),
        ("words", ["Paris", "Lyon"], "Lyon", 1),
    ],
)
def test_a_score_is_that_of_its_definition(scoring, reference, answer, expected):
    references = [reference] if isinstance(reference, str) else reference
    assert score(answer, prompt(scoring, *references)) == pytest.approx(expected)


def test_only_the_first_line_counts_where_that_is_the_answer():
    text = "\nLyon\nQuestion: what else?"
    assert score(text, prompt("words", "Lyon", first_line=True)) == 1
    assert score(text, prompt("words", "Lyon")) < 1
    assert score(text, prompt("any", "question", first_line=True)) == 0


def test_what_a_score_depends_on_changes_the_prompts_digest():
    changes = ({}, {"classes": ()}, {"first_line": True})
    assert len({prompt("class", "city", **change).digest for change in changes}) == len(changes)
