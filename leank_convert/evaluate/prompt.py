"""Prompts of an evaluation: held-out samples of a recipe's data, and how an answer is scored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from leank_convert.data import SampleSource
from leank_convert.evaluate.scores import SCORES
from leank_convert.recipe import DataSection

# Room to be wrong in: a right answer ends here at the latest.
_EXTRA_TOKENS = 4


@dataclass(frozen=True)
class Prompt:
    """A prompt with what its answer should hold."""

    task: str  # the task it was drawn from
    length: int  # the tokens that were asked for, room for the answer included
    index: int  # its place among the prompts of one task and length
    input_ids: Tensor  # the tokens as they are fed, template included, int64 [N]
    references: tuple[str, ...]  # what the answer should be, or should hold
    # A key of `SCORES`. `all` is the share of references that the answer holds (RULER's `string_match_all`);
    # the others are the best score against a reference.
    scoring: str
    max_new_tokens: int  # where an answer ends at the latest
    classes: tuple[str, ...] = ()  # with `class`: what the answer might be
    first_line: bool = False  # whether the answer is its first line alone

    @cached_property
    def digest(self) -> str:
        """A digest of everything but the model that an answer and its score depend on."""
        content: tuple[Any, ...] = (
            self.input_ids.tolist(), self.references, self.scoring, self.max_new_tokens
        )  # fmt: skip
        if self.classes or self.first_line:
            content += (self.classes, self.first_line)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def score(prediction: str, prompt: Prompt) -> float:
    """Score an answer, from 0 to 1; LeanKError if a package that scores it is missing."""
    if prompt.first_line:
        prediction = prediction.lstrip("\n").partition("\n")[0]
    measure = SCORES[prompt.scoring]
    scores = [measure(prediction, reference, prompt.classes) for reference in prompt.references]
    return sum(scores) / len(scores) if prompt.scoring == "all" else max(scores)


def held_out_prompts(tokenizer: Any, data: DataSection, *, num_samples: int, seed: int) -> list[Prompt]:
    """Draw prompts as training draws them, one question on each context; `length` is the range's upper end.

    Raises:
        LeanKError: If samples cannot be drawn for this tokenizer.
    """
    source = SampleSource(tokenizer, data.model_copy(update={"questions_per_context": 1}), seed)
    source.check()
    prompts = []
    for index in range(num_samples):
        sample = source.draw(index)
        prompts.append(
            Prompt(
                task=sample.task,
                length=data.max_length,
                index=index,
                input_ids=sample.prompt_ids(),
                references=(tokenizer.decode(sample.answer_ids()).strip(),),
                scoring="exact",
                max_new_tokens=sample.num_answer_tokens + _EXTRA_TOKENS,
            )
        )
    return prompts
