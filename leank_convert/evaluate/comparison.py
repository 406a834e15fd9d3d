"""Results of an evaluation: paired scores, their differences with an interval, cache bytes; table, files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leank_convert.evaluate.request import CSV_NAME, GSM_INFINITE, JSON_NAME, MEASURES, PLOT_NAME
from leank_convert.files import write_atomically
from leank_convert.report.figures import BLUE, GREEN, ORANGE
from leank_convert.report.page import figure_png
from leank_convert.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (BLUE, ORANGE, GREEN, "#8a63b5", "#b0413e")  # of variants, the baseline's first
_HATCHES = ("", "//", "..")  # where there are more variants than colours
_Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Outcome:
    """One prompt and how well each variant answered it."""

    task: str
    length: int  # tokens that were asked for
    num_tokens: int  # of the prompt
    scores: Mapping[str, float]  # from 0 to 1, by variant


@dataclass(frozen=True)
class Difference:
    """A variant's scores against the baseline's, over the same prompts."""

    lost: int  # prompts with a lower score than the baseline's
    gained: int  # prompts with a higher one
    mean: float  # of `variant - baseline`
    interval: tuple[float, float]  # of the mean, 95%


@dataclass(frozen=True)
class PairedScore:
    """Mean scores over prompts that all variants answered."""

    n: int  # prompts
    means: dict[str, float]  # by variant
    differences: dict[str, Difference]  # by variant, the baseline's own left out


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that the longest prompt's tokens use in a cache, all layers together."""

    num_tokens: int
    key_dense: int
    key_pruned: int
    value_dense: int
    value_pruned: int


@dataclass(frozen=True)
class UsedBytes:
    """Bytes of K and V in a cache, all layers and rows together."""

    held: int  # of the tokens in memory, with what a method keeps beside them
    read: int  # of them by the last decode step


def used_bytes(cache: Any) -> UsedBytes:
    """Count K and V of a dense cache, a LeanK cache, or one that counts them itself by `used`."""
    if hasattr(cache, "used"):
        used: UsedBytes = cache.used()
        return used
    if hasattr(cache, "memory"):
        memory = cache.memory()
        held = memory.keys.used + memory.values.used
    else:
        # States of linear attention are neither.
        tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
        held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return UsedBytes(held, held)


@dataclass(frozen=True)
class Comparison:
    """The result of an evaluation."""

    checkpoint: str
    baseline: str  # what the others are compared with: `dense`, or `against` for another model
    variants: tuple[str, ...]  # all that answered, the baseline first
    measure: str  # what a score is
    seed: int | None  # of the prompts; None of published ones
    pruning_ratio_asked: float | None  # none if the mask was imported
    pruning_ratio: float  # reached
    num_whole: int  # prompts so short that nothing of them is pruned
    outcomes: tuple[Outcome, ...] = field(repr=False)  # one per prompt
    cache: CacheBytes  # bytes at the longest prompt
    used: dict[str, UsedBytes] = field(default_factory=dict)  # there, by variant, `against` left out

    @property
    def total(self) -> PairedScore:
        """Over all prompts."""
        return score_pairs(self.outcomes, self.baseline)

    @property
    def lengths(self) -> list[int]:
        """The lengths that were asked for, ascending."""
        return sorted({outcome.length for outcome in self.outcomes})

    def describe(self, length: int) -> str:
        """What a length is of: of the longest prompts, or of the text around a problem of GSM-Infinite."""
        return (
            f"{length} tokens of filler"
            if self.measure == MEASURES[GSM_INFINITE]
            else f"up to {length} tokens"
        )

    def by_task(self, length: int) -> dict[str, PairedScore]:
        """Per task at one length, in order of appearance."""
        here = [outcome for outcome in self.outcomes if outcome.length == length]
        tasks = dict.fromkeys(outcome.task for outcome in here)
        return {task: score_pairs([o for o in here if o.task == task], self.baseline) for task in tasks}

    def at(self, length: int) -> PairedScore:
        """Over all prompts of one length."""
        return score_pairs([outcome for outcome in self.outcomes if outcome.length == length], self.baseline)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready data, prompts left out."""
        told = {key: value for key, value in vars(self).items() if key not in ("outcomes", "cache", "used")}
        return {
            **told,
            "variants": list(self.variants),
            "scores": [
                {"length": length, "task": task, **asdict(score)} for length, task, score in self.rows()
            ],
            "total": asdict(self.total),
            "cache_bytes": asdict(self.cache),
            "used_bytes": {name: asdict(used) for name, used in self.used.items()},
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat row for every length, task and variant, as `pandas.DataFrame` takes them."""
        rows = []
        for length, task, score in self.rows():
            for name in self.variants:
                row = {"length": length, "task": task, "n": score.n, "variant": name}
                found = score.differences.get(name)  # None of the baseline
                mean, low, high = (None, None, None) if found is None else (found.mean, *found.interval)
                row |= {"score": score.means[name], "difference": mean}
                rows.append({**row, "interval_low": low, "interval_high": high})
        return rows

    def rows(self) -> list[tuple[int, str, PairedScore]]:
        """Every length's tasks, in that order."""
        return [
            (length, task, score) for length in self.lengths for task, score in self.by_task(length).items()
        ]


def score_pairs(outcomes: Sequence[Outcome], baseline: str) -> PairedScore:
    """Score prompts that every variant answered against a baseline; ValueError if there are none."""
    if not outcomes:
        raise ValueError("there are no outcomes to score")
    columns = {name: [outcome.scores[name] for outcome in outcomes] for name in outcomes[0].scores}
    base = columns[baseline]
    differences = {
        name: compare([score - other for score, other in zip(scores, base, strict=True)])
        for name, scores in columns.items()
        if name != baseline
    }
    means = {name: sum(scores) / len(scores) for name, scores in columns.items()}
    return PairedScore(len(outcomes), means, differences)


def compare(differences: Sequence[float]) -> Difference:
    """Sum up one difference per prompt, each from -1 to 1."""
    return Difference(
        lost=sum(difference < 0 for difference in differences),
        gained=sum(difference > 0 for difference in differences),
        mean=sum(differences) / len(differences),
        interval=paired_difference_interval(differences),
    )


def paired_difference_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of paired differences, each from -1 to 1.

    The adjusted Wald interval of Agresti and Min (2005, "Simple improved confidence intervals for comparing
    matched proportions", Statistics in Medicine 24): half a pair is added to each of the four cells, so that
    the interval keeps its coverage, and a width, where few pairs or none differ. Of scores between 0 and 1
    it is the same formula over sums of differences and of their squares.
    """
    n = len(differences) + 2
    mean = sum(differences) / n
    variance = (sum(difference**2 for difference in differences) + 1) / n - mean**2
    half = _Z_95 * math.sqrt(variance / n)
    return max(-1.0, mean - half), min(1.0, mean + half)


def render_comparison(result: Comparison) -> str:
    """Render a comparison as a table for a person."""
    asked = "-" if result.pruning_ratio_asked is None else f"{result.pruning_ratio_asked:.1%}"
    cache = result.cache
    compared, others = result.variants[1], result.variants[2:]
    names = result.baseline, compared, "difference", "95% interval", *map(_title, others)
    rows, blank = [[result.measure, "n", *names]], [""] * (len(names) + 1)

    def add(name: str, score: PairedScore) -> None:
        difference = score.differences[compared]
        low, high = difference.interval
        dense, pruned, *more = (f"{score.means[variant]:.2%}" for variant in result.variants)
        interval = f"[{low:+.2%}, {high:+.2%}]"
        rows.append([name, str(score.n), dense, pruned, f"{difference.mean:+.2%}", interval, *more])

    for length in result.lengths:
        if len(result.lengths) > 1:
            rows += [["", *blank], [result.describe(length), *blank]]
        for task, score in result.by_task(length).items():
            add(task, score)
        if len(result.lengths) > 1:
            add("all prompts", result.at(length))
    if len(result.lengths) > 1:
        rows.append(["", *blank])
    add("all prompts" if len(result.lengths) == 1 else "all", result.total)
    sizes = [(f"cache at {cache.num_tokens} tokens", "dense", "pruned", "saved")]
    for name, dense, pruned in (
        ("K bytes", cache.key_dense, cache.key_pruned),
        ("V bytes", cache.value_dense, cache.value_pruned),
    ):
        sizes.append((name, f"{dense:,}", f"{pruned:,}", f"{1 - pruned / dense:.1%}"))
    lines = [*table(rows), "", *table(sizes), *(_render_used(result) if others else ())]
    lines += ["", f"pruning ratio: asked {asked}, reached {result.pruning_ratio:.1%}"]
    return "\n".join(lines) + "\n"


def _render_used(result: Comparison) -> list[str]:
    """Every variant's score beside the bytes of its cache, window and all counted."""
    count = result.cache.num_tokens
    dense = result.cache.key_dense + result.cache.value_dense
    rows = [(f"K and V at {count} tokens", "score", "bytes/token", "of dense", "read")]
    for name, used in result.used.items():
        shares = f"{used.held / dense:.1%}", f"{used.read / dense:.1%}"
        rows.append((_title(name), f"{result.total.means[name]:.2%}", f"{used.held / count:,.0f}", *shares))
    return ["", *table(rows), "read: by one decode step, of the dense cache's bytes"]


def _title(variant: str) -> str:
    return "window alone" if variant == "window" else variant


def write_results(result: Comparison, folder: Path) -> None:
    """Write `results.json`, `results.csv` and `results.png`."""
    text, rows = io.StringIO(), result.to_rows()
    writer = csv.DictWriter(text, list(rows[-1]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    contents = {
        JSON_NAME: (json.dumps(result.to_dict(), indent=2) + "\n").encode(),
        CSV_NAME: text.getvalue().encode(),
        PLOT_NAME: figure_png(lambda: _draw(result)),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content)


def _draw(result: Comparison) -> Figure:
    """Scores by task in percent, a panel a length, a bar a variant, with the intervals of the table."""
    from matplotlib.figure import Figure

    lengths = result.lengths
    num_bars = max(len(result.by_task(length)) + 1 for length in lengths) * len(result.variants)
    size = (max(7.0, 0.28 * num_bars + 2), 2.8 * len(lengths) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(lengths), 1, squeeze=False)[:, 0]
    for axes, length in zip(panels, lengths, strict=True):
        _draw_length(axes, result, length)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 6))
    return figure


def _draw_length(axes: Axes, result: Comparison, length: int) -> None:
    scores = result.by_task(length)
    if len(scores) > 1:
        scores["all prompts"] = result.at(length)
    width = 0.8 / len(result.variants)
    legend = f"95% interval of the difference from {result.baseline}"
    for place, variant in enumerate(result.variants):
        x = [task + (place - (len(result.variants) - 1) / 2) * width for task in range(len(scores))]
        means = [100 * score.means[variant] for score in scores.values()]
        again, colour = divmod(place, len(_COLOURS))
        hatch = _HATCHES[again % len(_HATCHES)]
        axes.bar(x, means, width, label=_title(variant), color=_COLOURS[colour], hatch=hatch)
        if variant != result.baseline:
            whiskers = [_whisker(score, result.baseline, variant) for score in scores.values()]
            axes.errorbar(
                x,
                [middle for middle, _ in whiskers],
                [half for _, half in whiskers],
                fmt="none",
                ecolor="black",
                elinewidth=1,
                capsize=3,
                clip_on=False,
                label=legend if variant == result.variants[-1] else None,
            )
    labels = [f"{task}\nn = {score.n}" for task, score in scores.items()]
    axes.set_xticks(range(len(scores)), labels, rotation=20 if len(scores) > 5 else 0)
    axes.set(ylim=(0, 100), xlim=(-0.6, len(scores) - 0.4), ylabel=f"{result.measure} (%)")
    axes.set_title(result.describe(length), loc="right")
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _whisker(score: PairedScore, baseline: str, variant: str) -> tuple[float, float]:
    """Middle and half the length of the scores, in percent, that a difference's interval allows."""
    ends = score.differences[variant].interval
    low, high = (100 * min(1.0, max(0.0, score.means[baseline] + end)) for end in ends)
    return (low + high) / 2, (high - low) / 2
