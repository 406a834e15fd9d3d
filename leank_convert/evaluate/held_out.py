"""Held-out samples of a recipe's data as prompts of an evaluation."""

from __future__ import annotations

from typing import Any

from leank_convert.data import SampleSource
from leank_convert.evaluate.prompt import Prompt
from leank_convert.recipe import DataSection

MEASURE = "exact match"
# Room to be wrong in: a right answer ends here at the latest.
_EXTRA_TOKENS = 4


def held_out_prompts(tokenizer: Any, data: DataSection, *, num_samples: int, seed: int) -> list[Prompt]:
    """Draw prompts as training draws them, one question on each context.

    Args:
        tokenizer: The model's own, with a chat template.
        data: Tasks, in turn, and the range of lengths.
        num_samples: How many.
        seed: Take another than the training's.

    Returns:
        Prompts whose `length` is the range's upper end.

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
