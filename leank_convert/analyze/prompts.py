"""The prompts on which a model is measured: every task at every length."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from leank_convert.data import SampleSource
from leank_convert.recipe import DataSection

_MOST_LENGTHS = 4


@dataclass(frozen=True)
class Prompt:
    """One prompt with its answer.

    Attributes:
        task: The task it was drawn from.
        length: The length asked for, in tokens; it comes close to it.
        input_ids: The prompt, int64 [N].
        answer_ids: Its answer, int64 [A].
    """

    task: str
    length: int
    input_ids: Tensor
    answer_ids: Tensor


def choose_lengths(data: DataSection) -> tuple[int, ...]:
    """Up to four lengths over a recipe's range, each as many times the one before."""
    ratio = data.max_length / data.min_length
    steps = [step / (_MOST_LENGTHS - 1) for step in range(_MOST_LENGTHS)]
    return tuple(sorted({round(data.min_length * ratio**step) for step in steps}))


def draw_prompts(
    tokenizer: PreTrainedTokenizerBase, data: DataSection, *, num_samples: int, seed: int
) -> list[Prompt]:
    """Draw as many prompts of every task at every length, no two of them from one sample.

    Args:
        tokenizer: The model's own.
        data: Tasks and range of lengths.
        num_samples: Prompts of each task at each length.
        seed: Of the samples.

    Raises:
        LeanKError: As `SampleSource.draw`.
    """
    prompts: list[Prompt] = []
    for length in choose_lengths(data):
        for task in dict.fromkeys(data.tasks):
            only = {"tasks": (task,), "min_length": length, "max_length": length, "questions_per_context": 1}
            source = SampleSource(tokenizer, data.model_copy(update=only), seed)
            for _ in range(num_samples):
                sample = source.draw(len(prompts))
                prompts.append(Prompt(task, length, sample.prompt_ids(), sample.answer_ids()))
    return prompts
