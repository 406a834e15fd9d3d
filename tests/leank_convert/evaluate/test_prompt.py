"""How answers are scored."""

import pytest
import torch

from leank_convert.evaluate.prompt import Prompt, score


def prompt(scoring, *references):
    return Prompt("task", 64, 0, torch.arange(3), references, scoring, 8)


@pytest.mark.parametrize(
    ("scoring", "references", "answer", "expected"),
    [
        ("exact", ["goze 17"], " goze 17\n", 1.0),
        ("exact", ["goze 17"], "goze 17 42", 0.0),
        ("exact", ["goze 17"], "Goze 17", 0.0),
        ("all", ["7", "42"], "They are 42 and 7.", 1.0),
        ("all", ["7", "42", "99", "x"], "42", 0.25),
        ("all", ["Amber-Fox"], "AMBER-FOX", 1.0),
        ("any", ["Paris", "the city of Paris"], "paris it is", 1.0),
        ("any", ["Paris", "Lyon"], "Rome", 0.0),
        ("all", ["7"], "", 0.0),
    ],
)
def test_scoring(scoring, references, answer, expected):
    assert score(answer, prompt(scoring, *references)) == expected
