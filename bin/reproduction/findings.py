"""Findings: every row's scores against the dense model, and what they say of the paper's claims.

No verdict is written by hand: each is computed from paired differences over the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from bin.reproduction.answers import Part, Scores
from bin.reproduction.bench import Masks
from bin.reproduction.plan import MAIN, UNALIGNED, Entry, Plan, name_choices
from leank_convert.evaluate.comparison import Difference
from leank_convert.evaluate.variants import kept_channels
from leank_convert.train.scaling import count_largest

_MARGIN = 0.01  # a point: what the paper calls near-lossless

Answer = Literal["yes", "no", "not told apart"]
_ORDER: tuple[Answer, ...] = ("no", "not told apart", "yes")  # of a claim in parts, the first holds
Chosen = dict[tuple[Entry, ...], tuple[Entry, dict[str, float]]]
"""By a row's candidates, the one that is shown, and what each scored on validation prompts by setting."""


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

    def where(self, **chosen: Any) -> Finding:
        """The same on some of its prompts, as `Scores.where` takes them."""
        return replace(self, scores=self.scores.where(**chosen))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        cells = [
            {"task": task, "length": length, "score": self.scores.where([task], [length]).mean}
            for task, length in dict.fromkeys(self.scores.cells)
        ]
        return {
            "label": self.label,
            "entry": None if self.entry is None else self.entry._asdict(),
            "removed": self.removed,
            "value_removed": self.value_removed,
            "n": len(self.scores.values),
            "score": self.scores.mean,
            "difference": asdict(self.against_dense),
            "cells": cells,
            "validation": self.validation,
            "tied": self.tied,
        }


Found = dict[tuple[str, float], Finding]
"""Rows of a table by label and asked ratio."""


class Verdict(NamedTuple):
    """A claim, and what the figures say."""

    claim: str  # as the paper has it, or would
    answer: Answer  # `yes` and `no` where a 95% interval excludes the other, for a margin by the mean
    detail: str  # the figures
    topic: str = ""  # which claims it is listed with


@dataclass(frozen=True)
class Findings:
    """Everything that was found.

    Attributes:
        plan: What was measured.
        dense: The dense model.
        tables: As in the plan.
        verdicts: Of the claims.
        environment: Where it was measured, as names and values.
    """

    plan: Plan
    dense: Finding
    tables: dict[str, Found]
    verdicts: list[Verdict]
    environment: dict[str, str]

    def all_findings(self) -> list[Finding]:
        """Every finding once, the dense model left out."""
        found = [finding for table in self.tables.values() for finding in table.values()]
        return list({finding.entry: finding for finding in found}.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "environment": self.environment,
            "sizes": asdict(self.plan.sizes),
            "dense": self.dense.to_dict(),
            "tables": {
                name: [finding.to_dict() for finding in table.values()] for name, table in self.tables.items()
            },
            "verdicts": [verdict._asdict() for verdict in self.verdicts],
        }


def choose_entries(plan: Plan, validation: Part) -> Chosen:
    """Choose each row's entry: of several the best on validation prompts, of equal ones the first."""
    chosen: Chosen = {}
    for candidates in (row for table in plan.tables.values() for row in table.rows.values()):
        if len(candidates) == 1:
            chosen[candidates] = (candidates[0], {})
        else:
            means = {entry: validation.scores(entry).mean for entry in candidates}
            best = max(means, key=lambda entry: means[entry])
            chosen[candidates] = (best, {entry.setting: mean for entry, mean in means.items()})
    return chosen


def collect_findings(
    plan: Plan, chosen: Chosen, test: Part, masks: Masks, environment: dict[str, str]
) -> Findings:
    """Sum up what was measured.

    Args:
        plan: What was measured.
        chosen: As `choose_entries` gives it.
        test: Where all chosen entries have answered.
        masks: By run and ratio.
        environment: Where it was measured, as names and values.
    """
    scores = test.scores(None)
    dense = Finding("dense", None, 0.0, 0.0, scores, scores.minus(scores))

    def find(label: str, candidates: tuple[Entry, ...]) -> Finding:
        entry, validation = chosen[candidates]
        scores = test.scores(entry)
        against_dense = scores.minus(dense.scores)
        return Finding(
            label, entry, *_removed(entry, masks), scores, against_dense, validation, _tied(entry, masks)
        )

    tables = {
        name: {(label, ratio): find(label, row) for (label, ratio), row in table.rows.items()}
        for name, table in plan.tables.items()
    }
    verdicts = [
        verdict._replace(topic=topic)
        for topic, judged in _judge(plan, dense, tables).items()
        for verdict in judged
    ]
    return Findings(plan, dense, tables, verdicts, environment)


def describe_seeds(findings: Findings) -> str:
    """What other seeds of training give, which no interval over prompts covers."""
    by_ratio: dict[float, list[float]] = {}
    for (_, ratio), finding in findings.tables["seeds"].items():
        by_ratio.setdefault(ratio, []).append(finding.scores.mean)
    spreads = [
        f"from {min(means):.1%} to {max(means):.1%} at {ratio:.0%}" for ratio, means in by_ratio.items()
    ]
    return f"{findings.plan.sizes.num_seeds} runs that differ by it alone score {' and '.join(spreads)}"


def describe_difference(difference: Difference) -> str:
    """A difference with its interval, in points."""
    # Adding 0 makes -0.0, which is rounded from a little below, a zero.
    mean, low, high = (round(100 * value, 1) + 0.0 for value in (difference.mean, *difference.interval))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _judge(plan: Plan, dense: Finding, tables: Mapping[str, Found]) -> dict[str, Iterable[Verdict]]:
    """Verdicts by topic."""
    shown = (plan.sizes.main_ratio, plan.sizes.hard_ratio)
    methods = tables["comparison"]
    return {
        "The paper's main claims": _judge_main(methods, dense, *shown),
        "Methods against one another": _judge_pairs(methods, shown),
        **{
            f"LeanK's parts and settings at {ratio:.0%}": _judge_ablations(plan, tables, ratio)
            for ratio in shown
        },
        "Whole heads": _judge_heads(plan, list(tables["heads"].values())),
    }


def _judge_main(methods: Found, dense: Finding, main: float, hard: float) -> Iterator[Verdict]:
    leank = methods[MAIN, main]
    yield _close(f"LeanK at {main:.0%} is within 1 point of dense", leank, dense)
    for ratio in (main, hard):
        learned, static, dynamic = (methods[name, ratio] for name in (MAIN, "static-norm", "think"))
        steps = [_above("", learned, static), _above("", static, dynamic)]
        yield Verdict(
            f"learned > static > dynamic channels at {ratio:.0%}",
            min((step.answer for step in steps), key=_ORDER.index),
            "; ".join(step.detail for step in steps),
        )
    saved = leank.value_removed
    yield Verdict(
        f"at {main:.0%} of K, LeanK drops some of V, too",
        "yes" if saved > 0 else "no",
        f"{saved:.1%} of V: heads of width 0",
    )


def _judge_pairs(methods: Found, shown: Iterable[float]) -> Iterator[Verdict]:
    pairs = [(MAIN, "static-norm"), ("static-norm", "think"), (MAIN, "think")]
    others = dict.fromkeys(label for label, _ in methods)
    pairs += [(MAIN, other) for other in others if other not in {MAIN, "static-norm", "think"}]
    pairs += [(UNALIGNED, other) for other in ("static-norm", "double-sparsity", "per-head-budget-dynamic")]
    for better, worse in pairs:
        for ratio in shown:
            if (better, ratio) in methods and (worse, ratio) in methods:
                claim = f"{better} is better than {worse} at {ratio:.0%}"
                yield _above(claim, methods[better, ratio], methods[worse, ratio])


def _judge_ablations(plan: Plan, tables: Mapping[str, Found], ratio: float) -> Iterator[Verdict]:
    def at(name: str) -> list[Finding]:
        return [finding for (_, asked), finding in tables[name].items() if asked == ratio]

    both, alone = at("stage2")
    yield _above(f"stage 2 is worth its steps at {ratio:.0%}", both, alone)
    think, uniform, dynamic, learned = at("budget")
    yield _above(f"dynamic channels gain from LeanK's budget per head at {ratio:.0%}", dynamic, think)
    yield _above(f"learned channels gain from a budget per head at {ratio:.0%}", learned, uniform)
    yield _above(f"learned channels beat dynamic ones of the same budget at {ratio:.0%}", learned, dynamic)
    weights = [finding for finding in at("lambda") if 0.04 <= float(finding.label) <= 0.1]
    if len(weights) > 1:
        yield _alike(f"any lambda from 0.04 to 0.1 does at {ratio:.0%}", weights)
    yield _alike(f"any width multiple does at {ratio:.0%}", at("multiple"))
    *fewer, every = at("tasks")
    for finding in fewer:
        tasks = finding.scores.tasks
        untrained = [task for task in tasks if task not in name_choices(plan.sizes)[finding.label]]
        claim = f"training on {finding.label} suffices at {ratio:.0%}"
        yield _close(claim, finding, every)
        if len(untrained) < len(tasks):
            claim = f"{claim} for {' and '.join(untrained)}, never trained on"
            yield _close(claim, finding.where(tasks=untrained), every.where(tasks=untrained))
    *shorter, full = at("length")
    for limit, finding in zip(plan.sizes.short_lengths, shorter, strict=True):
        longer = [length for length in plan.sizes.lengths if length > limit]
        if longer:
            asked = " and ".join(map(str, longer))
            claim = f"training on {finding.label} suffices at {ratio:.0%} for prompts of {asked} tokens"
            yield _close(claim, finding.where(lengths=longer), full.where(lengths=longer))
    yield _alike(f"the seed of training matters little at {ratio:.0%}", at("seeds"))


def _judge_heads(plan: Plan, heads: Sequence[Finding]) -> Iterator[Verdict]:
    by_frequency, gated, combined, _ = heads
    ratio, both = plan.sizes.head_ratio, plan.sizes.combined_ratio
    claim = f"heads are found by their high frequencies as by DuoAttention, at {ratio:.0%}"
    yield _close(claim, by_frequency, gated)
    yield _close(f"LeanK takes DuoAttention from {ratio:.0%} of K to {both:.0%}", combined, gated)


def _above(claim: str, better: Finding, worse: Finding) -> Verdict:
    difference = better.scores.minus(worse.scores)
    low, high = difference.interval
    answer: Answer = "yes" if low > 0 else "no" if high < 0 else "not told apart"
    return Verdict(claim, answer, _detail(better, worse, difference))


def _close(claim: str, finding: Finding, reference: Finding) -> Verdict:
    difference = finding.scores.minus(reference.scores)
    answer: Answer = "yes" if difference.mean >= -_MARGIN else "no"
    return Verdict(claim, answer, _detail(finding, reference, difference))


def _alike(claim: str, findings: Sequence[Finding]) -> Verdict:
    best = max(findings, key=lambda finding: finding.scores.mean)
    worst = min(findings, key=lambda finding: finding.scores.mean)
    answer: Answer = "yes" if best.scores.mean - worst.scores.mean <= _MARGIN else "no"
    return Verdict(claim, answer, _detail(best, worst, best.scores.minus(worst.scores)))


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
    if mask.scaling_factors is None:
        return None
    return count_largest(mask.scaling_factors), int(mask.channel_mask.sum())
