"""RULER's tasks by name."""

from __future__ import annotations

import random
from collections.abc import Collection

from leank_convert.data.haystack import Haystack
from leank_convert.errors import LeanKError
from leank_convert.evaluate.ruler.counting import draft_common_words, draft_frequent_words
from leank_convert.evaluate.ruler.draft import Draft
from leank_convert.evaluate.ruler.needles import NEEDLE_TASKS, draft_needles
from leank_convert.evaluate.ruler.tracking import draft_tracking

QA_TASK = "qa"
RULER_TASKS = (*NEEDLE_TASKS, "vt", "cwe", "fwe", QA_TASK)
ESSAY_TASKS = tuple(name for name, task in NEEDLE_TASKS.items() if task.haystack == "essay")
"""The tasks that hide their facts in running text."""


def check_tasks(tasks: Collection[str]) -> None:
    """Refuse names that are no task.

    Raises:
        LeanKError: Names them.
    """
    unknown = [task for task in tasks if task not in RULER_TASKS]
    if unknown:
        raise LeanKError(
            f"{', '.join(f'`{task}`' for task in unknown)}: no task of RULER",
            hint=f"its tasks: {', '.join(RULER_TASKS)}",
        )


def draw_draft(task: str, length: int, rng: random.Random, haystack: Haystack) -> Draft:
    """Draw the facts and the question of one prompt of any task but `qa`.

    Args:
        task: Its name.
        length: The tokens that are asked for, on which some parameters depend.
        rng: Draws them.
        haystack: Running text.
    """
    if task in NEEDLE_TASKS:
        return draft_needles(NEEDLE_TASKS[task], rng, haystack)
    if task == "vt":
        return draft_tracking(rng)
    return draft_common_words(rng, length) if task == "cwe" else draft_frequent_words(rng, length)
