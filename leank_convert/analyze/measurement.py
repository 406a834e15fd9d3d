"""Statistics of a mask's model on prompts: stability of channel rankings, high-frequency ratios of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from leank_convert.data import SampleSource
from leank_convert.device import choose_device
from leank_convert.mask import ChannelMask, check_mask_fits
from leank_convert.methods.statistics import measure_attention
from leank_convert.progress import progress_bar
from leank_convert.recipe import DataSection, Recipe
from leank_convert.train.model import find_model, load_model

_MOST_LENGTHS = 4


@dataclass(frozen=True)
class MeasuredPrompt:
    """One prompt of a task."""

    task: str  # the task it was drawn from
    length: int  # the length asked for, in tokens; it comes close to it
    input_ids: Tensor  # the prompt, int64 [N]


@dataclass(frozen=True)
class Measurement:
    """Statistics of a model over prompts of several tasks and lengths; heads in the model's own order."""

    tasks: tuple[str, ...]  # the tasks, in the order of the rows below
    lengths: tuple[int, ...]  # the prompts' lengths in tokens, ascending
    num_samples: int  # prompts of each task at each length
    # Pearson correlation of the tasks' channel norm ratios, each the mean over all lengths [tasks][tasks]
    # (the paper's section "Quantifying K Channel Staticity").
    between_tasks: tuple[tuple[float, ...], ...]
    # The same of the lengths, each the mean over all tasks [lengths][lengths].
    between_lengths: tuple[tuple[float, ...], ...]
    # The paper's w_hf of every KV head, mean over all prompts [L, H_kv]; NaN in layers without rotation.
    high_frequency_ratio: Tensor
    ratio_of_empty: float | None  # the mean w_hf of the heads of width 0, None if there are none
    ratio_of_others: float | None  # the mean w_hf of the heads that keep channels, None if there are none
    centred: bool = False  # whether keys were measured less the mask's mean, as they are cached

    def to_dict(self) -> dict[str, Any]:
        """The measurement as JSON-ready data."""
        return {
            "tasks": list(self.tasks),
            "lengths": list(self.lengths),
            "num_samples": self.num_samples,
            "key_mean": self.centred,
            "correlation_between_tasks": [list(row) for row in self.between_tasks],
            "correlation_between_lengths": [list(row) for row in self.between_lengths],
            "high_frequency_ratio": [
                row.tolist() if row.isfinite().all() else None for row in self.high_frequency_ratio
            ],
            "high_frequency_ratio_of_empty_heads": self.ratio_of_empty,
            "high_frequency_ratio_of_other_heads": self.ratio_of_others,
        }


def measure(
    mask: ChannelMask,
    artifact: str,
    model: str,
    recipe: Recipe,
    *,
    num_samples: int = 2,
    seed: int = 1_000_000,
    device: str | torch.device | None = None,
    progress: bool = False,
) -> Measurement:
    """Load a mask's model, a hub id or folder, and measure it on a recipe's data; `artifact` names the mask.

    On each task at each length, `num_samples` prompts are drawn by `seed`. The device is CUDA by default, if
    there is any.

    Raises:
        LeanKError: If the mask is not the model's, or anything cannot be loaded, drawn or measured.
    """
    chosen_device = choose_device(device)
    files = find_model(model, recipe)
    check_mask_fits(mask, files.facts, mask_origin=artifact, model_origin=model)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = load_model(files, recipe, chosen_device)
    prompts = draw_prompts(loaded.tokenizer, recipe.data, num_samples=num_samples, seed=seed)
    with progress_bar(progress, "measuring", len(prompts)) as advance:
        return measure_model(loaded.model, mask, prompts, advance=lambda: advance(1))


def measure_model(
    model: PreTrainedModel,
    mask: ChannelMask,
    prompts: Sequence[MeasuredPrompt],
    *,
    advance: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measure a model on prompts, one dense pass each; its keys less the mask's mean, if that has one.

    The model is as `load_model` loads it; of every task there are as many prompts at every length, as
    `draw_prompts` gives them. `advance` is called after each.

    Raises:
        LeanKError: If a statistic is not finite.
    """
    norms, ratios = [], []
    for prompt in prompts:
        statistics = measure_attention(model, prompt.input_ids, mask.key_mean)
        norms.append(statistics.channel_norms)
        ratios.append(statistics.high_frequency_ratio)
        advance()
    tasks = tuple(dict.fromkeys(prompt.task for prompt in prompts))
    lengths = tuple(sorted({prompt.length for prompt in prompts}))
    measured = [*zip(norms, prompts, strict=True)]
    by_task = [_mean(n for n, p in measured if p.task == task) for task in tasks]
    by_length = [_mean(n for n, p in measured if p.length == size) for size in lengths]
    ratio = _mean(ratios)
    empty, rotated = ~mask.channel_mask.any(-1), ratio.any(-1, keepdim=True).expand_as(ratio)
    means = [
        ratio[chosen].mean().item() if chosen.any() else None
        for chosen in (empty & rotated, ~empty & rotated)
    ]
    return Measurement(
        tasks=tasks,
        lengths=lengths,
        num_samples=len(prompts) // (len(tasks) * len(lengths)),
        between_tasks=correlate(by_task),
        between_lengths=correlate(by_length),
        high_frequency_ratio=ratio.where(rotated, torch.nan),
        ratio_of_empty=means[0],
        ratio_of_others=means[1],
        centred=mask.key_mean is not None,
    )


def choose_lengths(data: DataSection) -> tuple[int, ...]:
    """Up to four lengths over a recipe's range, each as many times the one before."""
    ratio = data.max_length / data.min_length
    steps = [step / (_MOST_LENGTHS - 1) for step in range(_MOST_LENGTHS)]
    return tuple(sorted({round(data.min_length * ratio**step) for step in steps}))


def draw_prompts(
    tokenizer: PreTrainedTokenizerBase, data: DataSection, *, num_samples: int, seed: int
) -> list[MeasuredPrompt]:
    """Draw `num_samples` prompts of every task and length, each a sample's own; raises as `draw`."""
    prompts: list[MeasuredPrompt] = []
    for length in choose_lengths(data):
        for task in dict.fromkeys(data.tasks):
            only = {"tasks": (task,), "min_length": length, "max_length": length, "questions_per_context": 1}
            source = SampleSource(tokenizer, data.model_copy(update=only), seed)
            for _ in range(num_samples):
                prompts.append(MeasuredPrompt(task, length, source.draw(len(prompts)).prompt_ids()))
    return prompts


def correlate(vectors: Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Pearson correlation of each of some tensors of one shape with each other, over their elements."""
    table = torch.corrcoef(torch.stack([vector.double().flatten() for vector in vectors]))
    return tuple(tuple(row) for row in table.reshape(len(vectors), -1).tolist())


def _mean(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean(0)
