"""What a model's own queries and keys tell beside its mask: staticity and high-frequency ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.analyze.impact import GroupImpact
from leank_convert.analyze.prompts import Prompt
from leank_convert.mask import ChannelMask
from leank_convert.methods.statistics import measure_attention


@dataclass(frozen=True)
class Measurement:
    """Statistics of a model over prompts of several tasks and lengths; heads in the model's own order.

    Attributes:
        tasks: The tasks, in the order of the rows below.
        lengths: The prompts' lengths in tokens, ascending.
        num_samples: Prompts of each task at each length.
        between_tasks: Pearson correlation of the tasks' channel norm ratios, each the mean over all lengths
            [tasks][tasks] (the paper's section "Quantifying K Channel Staticity").
        between_lengths: The same of the lengths, each the mean over all tasks [lengths][lengths].
        channel_norms: The norm ratio of every channel, mean over all prompts [L, H_kv, D].
        high_frequency_ratio: The paper's w_hf of every KV head, mean over all prompts [L, H_kv].
        ratio_of_empty: The mean w_hf of the heads of width 0, None if there are none.
        ratio_of_others: The mean w_hf of the heads that keep channels, None if there are none.
        impact: What removing each group of channels costs; None if that was not measured.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    num_samples: int
    between_tasks: tuple[tuple[float, ...], ...]
    between_lengths: tuple[tuple[float, ...], ...]
    channel_norms: Tensor
    high_frequency_ratio: Tensor
    ratio_of_empty: float | None
    ratio_of_others: float | None
    impact: tuple[GroupImpact, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The measurement as JSON-ready data; single channels are left out."""
        return {
            "tasks": list(self.tasks),
            "lengths": list(self.lengths),
            "num_samples": self.num_samples,
            "correlation_between_tasks": [list(row) for row in self.between_tasks],
            "correlation_between_lengths": [list(row) for row in self.between_lengths],
            "high_frequency_ratio": self.high_frequency_ratio.tolist(),
            "high_frequency_ratio_of_empty_heads": self.ratio_of_empty,
            "high_frequency_ratio_of_other_heads": self.ratio_of_others,
            "impact": None if self.impact is None else [group.to_dict() for group in self.impact],
        }


def measure_model(
    model: PreTrainedModel,
    mask: ChannelMask,
    prompts: Sequence[Prompt],
    *,
    advance: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measure a model on prompts, one dense pass each.

    Args:
        model: As `train.subject.load_subject` loads it.
        mask: A mask of it.
        prompts: As `draw_prompts` gives them: equally many of every task at every length.
        advance: Called after each.

    Raises:
        LeanKError: If a statistic is not finite.
    """
    norms, ratios = [], []
    for prompt in prompts:
        statistics = measure_attention(model, prompt.input_ids)
        norms.append(statistics.channel_norms)
        ratios.append(statistics.high_frequency_ratio)
        advance()
    tasks = tuple(dict.fromkeys(prompt.task for prompt in prompts))
    lengths = tuple(sorted({prompt.length for prompt in prompts}))
    by_task = [_mean(n for n, p in zip(norms, prompts, strict=True) if p.task == task) for task in tasks]
    by_length = [
        _mean(n for n, p in zip(norms, prompts, strict=True) if p.length == size) for size in lengths
    ]
    ratio = _mean(ratios)
    empty = ~mask.channel_mask.any(-1)
    return Measurement(
        tasks=tasks,
        lengths=lengths,
        num_samples=len(prompts) // (len(tasks) * len(lengths)),
        between_tasks=correlate(by_task),
        between_lengths=correlate(by_length),
        channel_norms=_mean(norms),
        high_frequency_ratio=ratio,
        ratio_of_empty=ratio[empty].mean().item() if empty.any() else None,
        ratio_of_others=ratio[~empty].mean().item() if not empty.all() else None,
    )


def correlate(vectors: Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Pearson correlation of each of some tensors of one shape with each other, over their elements."""
    table = torch.corrcoef(torch.stack([vector.double().flatten() for vector in vectors]))
    return tuple(tuple(row) for row in table.reshape(len(vectors), -1).tolist())


def _mean(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean(0)
