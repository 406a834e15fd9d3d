"""RULER's prompts: every task at every length, filled up to it by the model's own tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from leank_convert.data.drafts import fit
from leank_convert.data.haystack import control_tokens, open_haystack
from leank_convert.data.sample import encode_messages
from leank_convert.errors import LeanKError
from leank_convert.evaluate.prompt import Prompt, score
from leank_convert.evaluate.request import RULER
from leank_convert.evaluate.ruler.questions import collect_documents, draft_question, read_questions
from leank_convert.evaluate.ruler.synthetic import (
    NEEDLE_TASKS,
    Draft,
    draft_common_words,
    draft_frequent_words,
    draft_needles,
    draft_tracking,
)
from leank_convert.recipe import HaystackSection

RULER_TASKS = (*NEEDLE_TASKS, "vt", "cwe", "fwe", "qa")
_ESSAY_TASKS = [name for name, task in NEEDLE_TASKS.items() if task.haystack == "essay"]


def draw_prompts(
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    lengths: Sequence[int],
    num_samples: int,
    seed: int,
    haystack: str | None = None,
    questions: Path | None = None,
) -> list[Prompt]:
    """Draw as many prompts of every task at every length, each independent of which others are asked for.

    With room for their answers they have at most the length asked for, and come close to it.

    Without a chat template they are plain text, for a base model to go on with. `ruler` is all tasks that
    have something to ask; `haystack` is a `HaystackSection.source`, and `read_questions` reads `questions`.

    Raises:
        LeanKError: If a task is unknown, a file cannot be used, or is given and no task reads it; if a length
            leaves no room for a task, or the tokenizer cannot write an answer.
    """
    tasks = _choose_tasks(tasks, haystack, questions)
    control = control_tokens(tokenizer)
    text = open_haystack(HaystackSection(source=haystack), control)
    asked = [] if questions is None else read_questions(questions, control)
    documents = collect_documents(asked)

    def draft(task: str, length: int, index: int) -> Draft:
        rng = random.Random(f"{seed}/{task}/{length}/{index}")
        if task in NEEDLE_TASKS:
            return draft_needles(NEEDLE_TASKS[task], rng, text)
        if task == "vt":
            return draft_tracking(rng)
        if questions is not None and task == "qa":
            return draft_question(asked, documents, questions, seed, index, rng)
        return draft_common_words(rng, length) if task == "cwe" else draft_frequent_words(rng, length)

    prompts: list[Prompt] = []
    for task in tasks:
        for length in sorted(set(lengths)):
            drafts = [draft(task, length, index) for index in range(num_samples)]
            prompts += _fill(tokenizer, task, length, drafts)
    return prompts


def _choose_tasks(tasks: Sequence[str], haystack: str | None, questions: Path | None) -> list[str]:
    known = [task for task in RULER_TASKS if task != "qa" or questions is not None]
    tasks = list(dict.fromkeys(name for task in tasks for name in (known if task == RULER else [task])))
    if unknown := [task for task in tasks if task not in RULER_TASKS]:
        raise LeanKError(f"{_list(unknown)}: no task of RULER", hint=f"its tasks: {', '.join(RULER_TASKS)}")
    if haystack is not None and not set(tasks) & set(_ESSAY_TASKS):
        raise LeanKError(
            f"haystack `{haystack}` is read by none of the tasks {_list(tasks)}",
            hint=f"leave it out, or add one of {_list(_ESSAY_TASKS)}",
        )
    if "qa" in tasks and questions is None:
        raise LeanKError(
            "task `qa` needs a file of questions",
            hint="name one by `--questions`: records with `question`, `answers` and `documents`",
        )
    if "qa" not in tasks and questions is not None:
        raise LeanKError(
            f"question file `{questions}` is read by none of the tasks {_list(tasks)}",
            hint="leave it out, or add `qa`",
        )
    return tasks


def _fill(
    tokenizer: PreTrainedTokenizerBase, task: str, length: int, drafts: Sequence[Draft]
) -> Iterator[Prompt]:
    """Fill every draft up to the length."""
    # The beginning of the answer stands on a line of its own.
    encode = partial(encode_messages, tokenizer, ending="\n")
    prefixes = [_encode(tokenizer, draft.answer_prefix) for draft in drafts]
    shortest = encode([draft.render(0) for draft in drafts])
    rooms = [length - draft.max_new_tokens - len(p) for draft, p in zip(drafts, prefixes, strict=True)]
    longest = length + max((len(ids) - room for ids, room in zip(shortest, rooms, strict=True)), default=0)
    if longest > length:
        raise LeanKError(
            f"{length} tokens leave no room for `{task}`, which takes {longest} without any filler",
            hint=f"ask for {longest} tokens or more, most of them far more, or leave `{task}` out",
        )
    for index, (draft, prefix, room) in enumerate(zip(drafts, prefixes, rooms, strict=True)):

        def render(num_pieces: int, draft: Draft = draft) -> list[int]:
            return encode([draft.render(num_pieces)])[0]

        ids = torch.tensor([*fit(render, shortest[index], room)[1], *prefix])
        prompt = Prompt(task, length, index, ids, draft.references, draft.scoring, draft.max_new_tokens)
        _check_answer(tokenizer, prompt)
        yield prompt


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _check_answer(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> None:
    """Refuse a tokenizer by which even the perfect answer would not count."""
    if prompt.scoring == "any":  # a user's question, whose answer may be in letters that no token has
        return
    right = ", ".join(prompt.references)
    written = str(tokenizer.decode(_encode(tokenizer, f" {right}"), skip_special_tokens=True))
    if score(written, prompt) < 1:
        raise LeanKError(
            f"the tokenizer of `{tokenizer.name_or_path}` cannot write an answer of `{prompt.task}`: "
            f"`{right}` becomes `{written}`",
            hint="RULER takes a model of general text; the shipped model has tasks of its own",
        )


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
