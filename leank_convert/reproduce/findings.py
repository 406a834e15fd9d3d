"""What was found: rows of scores against the dense model, and what they say about the paper's claims.

No verdict is written by hand: each is computed from paired differences over the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from leank_convert.evaluate.comparison import Difference, compare
from leank_convert.evaluate.dynamic import kept_channels
from leank_convert.reproduce.measure import Bench, Masks, Scores
from leank_convert.reproduce.plan import TASK_CHOICES, UNALIGNED, Entry, Plan, Row
from leank_convert.train.results import count_tied

_MARGIN = 0.01  # a point: what the paper calls near-lossless

Answer = Literal["yes", "no", "not told apart"]
_ORDER: tuple[Answer, ...] = ("no", "not told apart", "yes")  # of a claim in parts, the first holds


@dataclass(frozen=True)
class Finding:
    """A row, measured.

    Attributes:
        label: The row's.
        entry: Which of its candidates is shown; None for the dense model.
        removed: Share of K channels that its pruned region lacks.
        value_removed: Share of V that it lacks.
        scores: On the test prompts.
        against_dense: Its difference to the dense model.
        validation: What each candidate scored on validation prompts, by setting; empty of a single one.
        tied: Channels that share the largest learned factor, and channels that are kept: where the first
            are more, which of them are kept is left to their order. None where nothing was learned.
    """

    label: str
    entry: Entry | None
    removed: float
    value_removed: float
    scores: Scores
    against_dense: Difference
    validation: dict[str, float] = field(default_factory=dict)
    tied: tuple[int, int] | None = None

    @property
    def method(self) -> str:
        """The entry's method, with its chosen setting if there was a choice."""
        if self.entry is None:
            return self.label
        return f"{self.entry.method} ({self.entry.setting})" if self.entry.setting else self.entry.method


@dataclass(frozen=True)
class Verdict:
    """A claim, and what the figures say.

    Attributes:
        claim: As the paper has it, or would.
        answer: `yes` and `no` where a 95% interval excludes the other, for a margin by the mean.
        detail: The figures.
        topic: Which claims it is listed with.
    """

    claim: str
    answer: Answer
    detail: str
    topic: str = ""


@dataclass(frozen=True)
class Findings:
    """Everything that was found.

    Attributes:
        plan: What was measured.
        dense: The dense model.
        curves: By method and ratio.
        tables: By name, in the plan's order.
        verdicts: Of the claims.
        environment: Where it was measured.
    """

    plan: Plan
    dense: Finding
    curves: dict[str, dict[float, Finding]]
    tables: dict[str, list[Finding]]
    verdicts: list[Verdict]
    environment: dict[str, str]

    def all_findings(self) -> list[Finding]:
        """Every finding once, the dense model first."""
        rows = [finding for curve in self.curves.values() for finding in curve.values()]
        rows += [finding for table in self.tables.values() for finding in table]
        return [self.dense, *{finding.entry: finding for finding in rows}.values()]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "environment": self.environment,
            "sizes": asdict(self.plan.sizes),
            "dense": _to_dict(self.dense),
            "curves": {
                method: [_to_dict(finding) for finding in curve.values()]
                for method, curve in self.curves.items()
            },
            "tables": {name: [_to_dict(finding) for finding in rows] for name, rows in self.tables.items()},
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }


def choose_entries(rows: Iterable[Row], validation: Bench) -> dict[Row, tuple[Entry, dict[str, float]]]:
    """Choose each row's entry: of several candidates the best on validation prompts, of equal ones the first.

    Returns:
        By row, the entry and what each candidate scored.
    """
    chosen = {}
    for row in rows:
        if len(row.candidates) == 1:
            chosen[row] = (row.candidates[0], dict[str, float]())
        else:
            means = {entry: validation.scores(entry).mean for entry in row.candidates}
            best = max(means, key=lambda entry: means[entry])
            chosen[row] = (best, {entry.setting: mean for entry, mean in means.items()})
    return chosen


def collect_findings(
    plan: Plan,
    chosen: Mapping[Row, tuple[Entry, dict[str, float]]],
    test: Bench,
    masks: Masks,
    environment: dict[str, str],
) -> Findings:
    """Sum up what was measured.

    Args:
        plan: What was measured.
        chosen: As `choose_entries` gives it.
        test: Where all chosen entries have answered.
        masks: By run and ratio.
        environment: Where it was measured, as names and values.
    """
    dense_scores = test.scores(None)
    dense = Finding("dense", None, 0.0, 0.0, dense_scores, compare([0.0] * len(dense_scores.values)))

    def find(row: Row) -> Finding:
        entry, validation = chosen[row]
        scores = test.scores(entry)
        removed, value_removed = _removed(entry, masks)
        against_dense = subtract(scores, dense_scores)
        tied = _tied(entry, masks)
        return Finding(row.label, entry, removed, value_removed, scores, against_dense, validation, tied)

    curves = {
        curve.method: {ratio: find(row) for ratio, row in curve.points.items()} for curve in plan.curves
    }
    tables = {table.name: [find(row) for row in table.rows] for table in plan.tables}
    verdicts = [*_judge_main(plan, dense, curves), *_judge_pairs(plan, curves), *_judge_tables(plan, tables)]
    return Findings(plan, dense, curves, tables, verdicts, environment)


def subtract(scores: Scores, others: Scores) -> Difference:
    """The difference of two entries over the same prompts."""
    return compare([a - b for a, b in zip(scores.values, others.values, strict=True)])


def describe_seeds(findings: Findings) -> str:
    """What other seeds of training give, which no interval over prompts covers."""
    by_ratio: dict[float, list[float]] = {}
    for finding in findings.tables["seeds"]:
        assert finding.entry is not None
        by_ratio.setdefault(finding.entry.ratio, []).append(finding.scores.mean)
    spreads = [
        f"from {min(means):.1%} to {max(means):.1%} at {ratio:.0%}" for ratio, means in by_ratio.items()
    ]
    return f"{findings.plan.sizes.num_seeds} runs that differ by it alone score {' and '.join(spreads)}"


def describe_difference(difference: Difference) -> str:
    """A difference with its interval, in points."""
    # Adding 0 makes -0.0, which is rounded from a little below, a zero.
    mean, low, high = (round(100 * value, 1) + 0.0 for value in (difference.mean, *difference.interval))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _judge_main(plan: Plan, dense: Finding, curves: Mapping[str, Mapping[float, Finding]]) -> list[Verdict]:
    main, hard = plan.sizes.main_ratio, plan.sizes.hard_ratio
    verdicts = [_close(f"LeanK at {main:.0%} is within 1 point of dense", curves["leank"][main], dense)]
    for ratio in (main, hard):
        learned, static, dynamic = (curves[name][ratio] for name in ("leank", "static-norm", "think"))
        steps = [_above("", learned, static), _above("", static, dynamic)]
        verdicts.append(
            Verdict(
                f"learned > static > dynamic channels at {ratio:.0%}",
                min((step.answer for step in steps), key=_ORDER.index),
                "; ".join(step.detail for step in steps),
            )
        )
    saved = curves["leank"][main].value_removed
    verdicts.append(
        Verdict(
            f"at {main:.0%} of K, LeanK drops some of V, too",
            "yes" if saved > 0 else "no",
            f"{saved:.1%} of V: heads of width 0",
        )
    )
    return _about("The paper's main claims", verdicts)


def _judge_pairs(plan: Plan, curves: Mapping[str, Mapping[float, Finding]]) -> list[Verdict]:
    main, hard = plan.sizes.main_ratio, plan.sizes.hard_ratio
    verdicts = []
    pairs = [("leank", "static-norm"), ("static-norm", "think"), ("leank", "think")]
    pairs += [("leank", other) for other in curves if other not in {"leank", "static-norm", "think"}]
    pairs += [(UNALIGNED, other) for other in ("static-norm", "double-sparsity", "per-head-budget-dynamic")]
    for better, worse in pairs:
        for ratio in (main, hard):
            if ratio in curves[better] and ratio in curves[worse]:
                verdicts.append(
                    _above(
                        f"{better} is better than {worse} at {ratio:.0%}",
                        curves[better][ratio],
                        curves[worse][ratio],
                    )
                )
    return _about("Methods against one another", verdicts)


def _judge_tables(plan: Plan, tables: Mapping[str, Sequence[Finding]]) -> list[Verdict]:
    judged = []
    cells = tables["tasks"][0].scores.cells
    all_tasks = dict.fromkeys(task for task, _ in cells)
    longer = [length for length in plan.sizes.lengths if length > plan.sizes.short_length]
    for ratio in (plan.sizes.main_ratio, plan.sizes.hard_ratio):
        at = {
            name: {
                finding.label: finding for finding in rows if finding.entry and finding.entry.ratio == ratio
            }
            for name, rows in tables.items()
        }
        both, alone = at["stage2"].values()
        verdicts = [_above(f"stage 2 is worth its steps at {ratio:.0%}", both, alone)]
        think, uniform, dynamic, learned = at["budget"].values()
        verdicts += [
            _above(f"dynamic channels gain from LeanK's budget per head at {ratio:.0%}", dynamic, think),
            _above(f"learned channels gain from a budget per head at {ratio:.0%}", learned, uniform),
            _above(f"learned channels beat dynamic ones of the same budget at {ratio:.0%}", learned, dynamic),
        ]
        weights = [finding for label, finding in at["lambda"].items() if 0.04 <= float(label) <= 0.1]
        if len(weights) > 1:
            verdicts.append(_alike(f"any lambda from 0.04 to 0.1 does at {ratio:.0%}", weights))
        verdicts.append(_alike(f"any width multiple does at {ratio:.0%}", list(at["multiple"].values())))
        *fewer, every = at["tasks"].values()
        for finding in fewer:
            untrained = [task for task in all_tasks if task not in TASK_CHOICES[finding.label]]
            claim = f"training on {finding.label} suffices at {ratio:.0%}"
            verdicts.append(_close(claim, finding, every))
            claim = f"{claim} for {' and '.join(untrained)}, never trained on"
            verdicts.append(_close(claim, _narrow(finding, tasks=untrained), _narrow(every, tasks=untrained)))
        short, full = (_narrow(finding, lengths=longer) for finding in at["length"].values())
        verdicts.append(
            _close(
                f"training on {short.label} suffices at {ratio:.0%} for prompts of "
                f"{' and '.join(map(str, longer))} tokens",
                short,
                full,
            )
        )
        verdicts.append(
            _alike(f"the seed of training matters little at {ratio:.0%}", list(at["seeds"].values()))
        )
        judged += _about(f"LeanK's parts and settings at {ratio:.0%}", verdicts)
    by_frequency, gated, combined, _ = tables["heads"]
    ratio, both_ratio = plan.sizes.head_ratio, plan.sizes.combined_ratio
    verdicts = [
        _close(
            f"heads are found by their high frequencies as by DuoAttention, at {ratio:.0%}",
            by_frequency,
            gated,
        ),
        _close(f"LeanK takes DuoAttention from {ratio:.0%} of K to {both_ratio:.0%}", combined, gated),
    ]
    return judged + _about("Whole heads", verdicts)


def _about(topic: str, verdicts: Iterable[Verdict]) -> list[Verdict]:
    return [replace(verdict, topic=topic) for verdict in verdicts]


def _narrow(finding: Finding, **chosen: Any) -> Finding:
    """A finding on some of its prompts."""
    return replace(finding, scores=finding.scores.where(**chosen))


def _above(claim: str, better: Finding, worse: Finding) -> Verdict:
    difference = subtract(better.scores, worse.scores)
    low, high = difference.interval
    answer: Answer = "yes" if low > 0 else "no" if high < 0 else "not told apart"
    return Verdict(claim, answer, _detail(better, worse, difference))


def _close(claim: str, finding: Finding, reference: Finding) -> Verdict:
    difference = subtract(finding.scores, reference.scores)
    answer: Answer = "yes" if difference.mean >= -_MARGIN else "no"
    return Verdict(claim, answer, _detail(finding, reference, difference))


def _alike(claim: str, findings: Sequence[Finding]) -> Verdict:
    best = max(findings, key=lambda finding: finding.scores.mean)
    worst = min(findings, key=lambda finding: finding.scores.mean)
    spread = best.scores.mean - worst.scores.mean
    difference = subtract(best.scores, worst.scores)
    return Verdict(claim, "yes" if spread <= _MARGIN else "no", _detail(best, worst, difference))


def _detail(first: Finding, second: Finding, difference: Difference) -> str:
    named = [f"{finding.label}: {finding.scores.mean:.1%}" for finding in (first, second)]
    shares = [_describe_removed(finding) for finding in (first, second)]
    if first.entry and second.entry and shares[0] != shares[1]:
        # Widths are rounded, whole heads most of all, and V goes with heads: not always as much is compared.
        named = [f"{name} without {share}" for name, share in zip(named, shares, strict=True)]
    return f"{', '.join(named)}; {describe_difference(difference)} points"


def _describe_removed(finding: Finding) -> str:
    value = f" and {finding.value_removed:.1%} of V" if finding.value_removed else ""
    return f"{finding.removed:.1%} of K{value}"


def _removed(entry: Entry, masks: Masks) -> tuple[float, float]:
    """Shares of K and of V that the pruned region lacks."""
    if entry.run is None:
        head_dim = next(iter(next(iter(masks.values())).values())).channel_mask.shape[-1]
        return 1 - kept_channels(head_dim, entry.ratio) / head_dim, 0.0
    channel_mask = masks[entry.run][entry.ratio].channel_mask
    return 1 - channel_mask.double().mean().item(), 1 - channel_mask.any(-1).double().mean().item()


def _tied(entry: Entry, masks: Masks) -> tuple[int, int] | None:
    if entry.run is None or entry.dynamic:
        return None
    mask = masks[entry.run][entry.ratio]
    return None if mask.scaling_factors is None else (count_tied(mask), int(mask.channel_mask.sum()))


def _to_dict(finding: Finding) -> dict[str, Any]:
    cells = dict.fromkeys(finding.scores.cells)
    return {
        "label": finding.label,
        "entry": None if finding.entry is None else asdict(finding.entry),
        "removed": finding.removed,
        "value_removed": finding.value_removed,
        "n": len(finding.scores.values),
        "score": finding.scores.mean,
        "difference": asdict(finding.against_dense),
        "cells": [
            {
                "task": task,
                "length": length,
                "score": finding.scores.where(tasks=[task], lengths=[length]).mean,
            }
            for task, length in cells
        ],
        "validation": finding.validation,
        "tied": finding.tied,
    }
