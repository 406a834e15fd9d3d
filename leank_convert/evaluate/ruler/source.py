"""Draws RULER's prompts: every task at every length, filled up to it by the model's own tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from leank_convert.data.drafts import fit
from leank_convert.data.haystack import Haystack, control_tokens, open_haystack
from leank_convert.data.sample import encode_prompts
from leank_convert.errors import LeanKError
from leank_convert.evaluate.prompt import Prompt, score
from leank_convert.evaluate.ruler.draft import Draft
from leank_convert.evaluate.ruler.question_file import QuestionFile, read_question_file
from leank_convert.evaluate.ruler.questions import choose_question, draft_question
from leank_convert.evaluate.ruler.tasks import ESSAY_TASKS, QA_TASK, check_tasks, draw_draft
from leank_convert.recipe import HaystackSection


@dataclass(frozen=True)
class PromptSource:
    """Draws the prompts of a task at a length.

    Attributes:
        tokenizer: The model's own; without a chat template, prompts are plain text, for a base model to go on
            with.
        seed: Of everything drawn.
        haystack: Running text.
        questions: For `qa`; None where it is not asked.
    """

    tokenizer: PreTrainedTokenizerBase
    seed: int
    haystack: Haystack
    questions: QuestionFile | None

    def draw(self, task: str, length: int, num_samples: int) -> list[Prompt]:
        """Draw prompts that have, with room for their answers, at most `length` tokens and come close to it.

        Each is a function of the source, the task, the length and its index alone.

        Raises:
            LeanKError: If the tokenizer cannot write an answer, the length leaves no room for the task, or
                the question file is too small.
        """
        drafts = [self._draft(task, length, index) for index in range(num_samples)]
        prefixes = [self._encode(draft.answer_prefix) for draft in drafts]
        shortest = self._encode_prompts([draft.render(0) for draft in drafts])
        taken = [
            len(prompt) + len(prefix) + draft.max_new_tokens
            for draft, prefix, prompt in zip(drafts, prefixes, shortest, strict=True)
        ]
        longest = max(taken, default=0)
        if longest > length:
            raise LeanKError(
                f"{length} tokens leave no room for `{task}`, which takes {longest} without any filler",
                hint=f"ask for lengths of {longest} tokens or more, most of them far longer, or leave "
                f"`{task}` out",
            )
        prompts = []
        for index, (draft, prefix) in enumerate(zip(drafts, prefixes, strict=True)):
            ids = [*self._fill(draft, shortest[index], length - draft.max_new_tokens - len(prefix)), *prefix]
            prompts.append(
                Prompt(
                    task,
                    length,
                    index,
                    torch.tensor(ids),
                    draft.references,
                    draft.scoring,
                    draft.max_new_tokens,
                )
            )
            self._check_answers(prompts[-1])
        return prompts

    def _draft(self, task: str, length: int, index: int) -> Draft:
        rng = random.Random(f"{self.seed}/{task}/{length}/{index}")
        if self.questions is not None and task == QA_TASK:
            return draft_question(choose_question(self.questions, self.seed, index), rng, self.questions)
        return draw_draft(task, length, rng, self.haystack)

    def _fill(self, draft: Draft, shortest: list[int], room: int) -> list[int]:
        def render(num_pieces: int) -> list[int]:
            return self._encode_prompts([draft.render(num_pieces)])[0]

        return fit(render, shortest, room)[1]

    def _check_answers(self, prompt: Prompt) -> None:
        """Refuse a tokenizer by which even the perfect answer would not count."""
        if prompt.scoring == "any":  # a user's question, whose answer may be in letters that no token has
            return
        written = self.tokenizer.decode(
            self._encode(f" {', '.join(prompt.references)}"), skip_special_tokens=True
        )
        if score(str(written), prompt) < 1:
            raise LeanKError(
                f"the tokenizer of `{self.tokenizer.name_or_path}` cannot write an answer of "
                f"`{prompt.task}`: `{', '.join(prompt.references)}` becomes `{written}`",
                hint="RULER takes a model of general text; the shipped model has tasks of its own",
            )

    def _encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        if getattr(self.tokenizer, "chat_template", None) is not None or not texts:
            return encode_prompts(self.tokenizer, texts)
        # The beginning of the answer stands on a line of its own.
        rows: list[list[int]] = self.tokenizer([f"{text}\n" for text in texts])["input_ids"]
        return rows

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def open_source(
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    seed: int,
    haystack: HaystackSection,
    question_file: Path | None,
) -> PromptSource:
    """Read the files that the tasks are made of.

    Args:
        tokenizer: The model's own.
        tasks: Names of `RULER_TASKS`.
        seed: Of everything drawn.
        haystack: Running text for the tasks that hide their facts in it.
        question_file: For `qa`, see `read_question_file`.

    Raises:
        LeanKError: If a task is unknown, a file cannot be used, or is given and no task reads it.
    """
    check_tasks(tasks)
    if haystack.source is not None and not set(tasks) & set(ESSAY_TASKS):
        raise LeanKError(
            f"haystack `{haystack.source}` is read by none of the tasks {_list(tasks)}",
            hint=f"leave it out, or add one of {_list(ESSAY_TASKS)}",
        )
    if QA_TASK in tasks and question_file is None:
        raise LeanKError(
            f"task `{QA_TASK}` needs a file of questions",
            hint="name one, in SQuAD's form, HotpotQA's, or a plain one: see `leank_convert.evaluate.ruler`",
        )
    if QA_TASK not in tasks and question_file is not None:
        raise LeanKError(
            f"question file `{question_file}` is read by none of the tasks {_list(tasks)}",
            hint=f"leave it out, or add `{QA_TASK}`",
        )
    control = control_tokens(tokenizer)
    questions = None if question_file is None else read_question_file(question_file, control)
    return PromptSource(tokenizer, seed, open_haystack(haystack, control), questions)


def draw_prompts(
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    lengths: Sequence[int],
    num_samples: int,
    seed: int,
    haystack: HaystackSection,
    qa_file: Path | None = None,
) -> list[Prompt]:
    """Draw as many prompts of every task at every length, each independent of which others are asked for.

    Args:
        tokenizer: The model's own.
        tasks: Names of `RULER_TASKS`.
        lengths: Tokens of prompt and answer.
        num_samples: Prompts of each task at each length.
        seed: Of everything drawn.
        haystack: Where running text comes from.
        qa_file: The user's questions, for `qa`.

    Raises:
        LeanKError: As `open_source` and `PromptSource.draw`.
    """
    source = open_source(tokenizer, tasks, seed, haystack, qa_file)
    return [
        prompt for task in tasks for length in lengths for prompt in source.draw(task, length, num_samples)
    ]


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
