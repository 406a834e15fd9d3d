"""Samples a second of several processes, each with a sample of its own, against those of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from leank_convert.benchmark.timing import synchronize
from leank_convert.benchmark.training_step import OptimizerStep
from leank_convert.data import TrainingSample
from leank_convert.train.ranks import Ranks


def measure_scale(
    build_step: Callable[[Ranks | None], OptimizerStep], sample: TrainingSample, ranks: Ranks, rounds: int
) -> dict[str, Any]:
    """Time steps of the first process while the others wait, then steps of all, gradients added up.

    Args:
        build_step: Makes a step that adds gradients up over ranks, or one that does not.
        sample: This process's own, as long as the others'.
        ranks: The processes.
        rounds: Steps of each.
    """
    together = build_step(ranks)
    together.run(sample)  # warms up, and connects the processes
    alone_seconds = []
    if ranks.is_first:
        alone = build_step(None)
        alone_seconds = [_time(alone, sample, ranks) for _ in range(rounds)]
    _wait_for_all(ranks)
    seconds = []
    for _ in range(rounds):
        _wait_for_all(ranks)
        began = time.perf_counter()
        together.run(sample)
        synchronize(ranks.device)
        _wait_for_all(ranks)
        seconds.append(time.perf_counter() - began)
    one = 0.0 if not alone_seconds else 1 / median(alone_seconds)
    all_ranks = ranks.num_ranks / median(seconds)
    return {
        "ranks": ranks.num_ranks,
        "rounds": rounds,
        "tokens": sample.num_tokens,
        "samples_per_second_alone": one,
        "samples_per_second": all_ranks,
        "ratio": all_ranks / one if one else None,
    }


def _time(step: OptimizerStep, sample: TrainingSample, ranks: Ranks) -> float:
    synchronize(ranks.device)
    began = time.perf_counter()
    step.run(sample)
    synchronize(ranks.device)
    return time.perf_counter() - began


def _wait_for_all(ranks: Ranks) -> None:
    """Return when every process has come here."""
    ranks.any(False)
