"""What an evaluation found: paired exact matches, their difference with an interval, cache bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Outcome:
    """One prompt, answered three times from one prefill.

    Attributes:
        task: The task it was drawn from.
        num_tokens: Prompt tokens.
        dense: Whether the dense model was right.
        pruned: Whether the pruned cache was.
        window: Whether it was right with no pruned key at all, from sink and recent window alone.
    """

    task: str
    num_tokens: int
    dense: bool
    pruned: bool
    window: bool


@dataclass(frozen=True)
class PairedScore:
    """Exact matches over prompts that dense and pruned both answered.

    Attributes:
        n: Prompts.
        dense: Share that the dense model answered right.
        pruned: Share that the pruned cache answered right.
        window: Share right from sink and recent window alone.
        lost: Prompts right when dense and wrong when pruned.
        gained: Prompts wrong when dense and right when pruned.
        difference: `pruned - dense`.
        interval: 95% interval of the difference.
    """

    n: int
    dense: float
    pruned: float
    window: float
    lost: int
    gained: int
    difference: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that the longest prompt's tokens use in a cache, all layers together."""

    num_tokens: int
    key_dense: int
    key_pruned: int
    value_dense: int
    value_pruned: int


@dataclass(frozen=True)
class Comparison:
    """The result of an evaluation.

    Attributes:
        checkpoint: What was evaluated.
        seed: Of the held-out samples.
        pruning_ratio_asked: None if the mask was imported.
        pruning_ratio: Reached.
        num_whole: Prompts so short that nothing of them is pruned.
        outcomes: One per prompt.
        cache: Bytes at the longest prompt.
    """

    checkpoint: str
    seed: int
    pruning_ratio_asked: float | None
    pruning_ratio: float
    num_whole: int
    outcomes: tuple[Outcome, ...]
    cache: CacheBytes

    @property
    def total(self) -> PairedScore:
        """Over all prompts."""
        return score_pairs(self.outcomes)

    @property
    def by_task(self) -> dict[str, PairedScore]:
        """Per task, in order of appearance."""
        tasks = dict.fromkeys(outcome.task for outcome in self.outcomes)
        return {task: score_pairs([o for o in self.outcomes if o.task == task]) for task in tasks}

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready data, prompts left out."""
        return {
            "checkpoint": self.checkpoint,
            "seed": self.seed,
            "pruning_ratio_asked": self.pruning_ratio_asked,
            "pruning_ratio": self.pruning_ratio,
            "num_whole": self.num_whole,
            "exact_match": {
                "total": asdict(self.total),
                **{task: asdict(score) for task, score in self.by_task.items()},
            },
            "cache_bytes": asdict(self.cache),
        }


def score_pairs(outcomes: Sequence[Outcome]) -> PairedScore:
    """Score prompts that both sides answered.

    Raises:
        ValueError: If there are none.
    """
    n = len(outcomes)
    if not n:
        raise ValueError("there are no outcomes to score")
    lost = sum(o.dense and not o.pruned for o in outcomes)
    gained = sum(o.pruned and not o.dense for o in outcomes)
    return PairedScore(
        n=n,
        dense=_share(o.dense for o in outcomes),
        pruned=_share(o.pruned for o in outcomes),
        window=_share(o.window for o in outcomes),
        lost=lost,
        gained=gained,
        difference=(gained - lost) / n,
        interval=paired_difference_interval(n, lost=lost, gained=gained),
    )


def paired_difference_interval(n: int, *, lost: int, gained: int) -> tuple[float, float]:
    """95% interval of a difference of paired proportions.

    The adjusted Wald interval of Agresti and Min (2005, "Simple improved confidence intervals for comparing
    matched proportions", Statistics in Medicine 24): half a pair is added to each of the four cells, so that
    the interval keeps its coverage, and a width, where few pairs or none differ.
    """
    n_adjusted, lost_adjusted, gained_adjusted = n + 2, lost + 0.5, gained + 0.5
    difference = (gained_adjusted - lost_adjusted) / n_adjusted
    variance = (gained_adjusted + lost_adjusted) / n_adjusted - difference**2
    half = _Z_95 * math.sqrt(variance / n_adjusted)
    return max(-1.0, difference - half), min(1.0, difference + half)


def render_comparison(result: Comparison) -> str:
    """Render a comparison as a table for a person."""
    asked = "-" if result.pruning_ratio_asked is None else f"{result.pruning_ratio_asked:.1%}"
    cache = result.cache
    lines = [
        f"{'exact match':<20}{'n':>6}{'dense':>9}{'pruned':>9}{'difference':>12}  "
        f"{'95% interval':<18}{'window alone':>12}"
    ]
    for task, score in {**result.by_task, "all tasks": result.total}.items():
        low, high = score.interval
        lines.append(
            f"{task:<20}{score.n:>6}{score.dense:>9.2%}{score.pruned:>9.2%}{score.difference:>+12.2%}  "
            f"{f'[{low:+.2%}, {high:+.2%}]':<18}{score.window:>12.2%}"
        )
    lines += ["", f"{f'cache at {cache.num_tokens} tokens':<26}{'dense':>12}{'pruned':>12}{'saved':>9}"]
    for name, dense, pruned in (
        ("K bytes", cache.key_dense, cache.key_pruned),
        ("V bytes", cache.value_dense, cache.value_pruned),
    ):
        lines.append(f"{name:<26}{dense:>12,}{pruned:>12,}{1 - pruned / dense:>9.1%}")
    lines += ["", f"pruning ratio: asked {asked}, reached {result.pruning_ratio:.1%}"]
    return "\n".join(lines) + "\n"


def _share(hits: Iterable[bool]) -> float:
    values = list(hits)
    return sum(values) / len(values)
