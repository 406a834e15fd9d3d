"""Questions on short documents, and prompts of one task."""

import json
import re

import pytest

from leank_convert.evaluate.ruler import draw_prompts


@pytest.fixture(scope="session")
def records():
    """Twelve questions with a document each, and what answers them in no other document."""
    return [
        {
            "question": f"Who keeps the key of tower {n}?",
            "answers": [f"Keeper {n}{n}", f"the keeper {n}{n}"],
            "documents": [
                f"Tower {n} is old. Its key hangs on the belt of the keeper {n}{n}, who tells no one."
            ],
        }
        for n in range(12, 24)
    ]


@pytest.fixture(scope="session")
def question_file(tmp_path_factory, records):
    """The records as a file."""
    path = tmp_path_factory.mktemp("questions") / "towers.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def split(tokenizer, prompt):
    """Parts of a prompt by the plain tokenizer: the user's message, and the beginning of the answer."""
    text = tokenizer.decode(prompt.input_ids)
    return re.fullmatch(r"<\|turn\|>user\n(.*)</s><\|turn\|>assistant\n(.*)", text, re.S).groups()


@pytest.fixture(scope="session")
def draw(question_file):
    """Draws prompts of one task at one length."""

    def draw_one(tokenizer, task, length=3000, num_samples=2, seed=0, haystack=None):
        file = question_file if task == "qa" else None
        return draw_prompts(tokenizer, [task], [length], num_samples, seed, haystack, file)

    return draw_one
