"""Figures of the experiments; each function draws one, in `train.figures`' style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leank_convert.report.figures import BLUE, GREEN, INK, ORANGE
from leank_convert.report.page import new_figure
from leank_convert.reproduce.findings import Finding, Findings
from leank_convert.reproduce.plan import UNALIGNED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Readable on light and on dark ground; LeanK's own is the strongest.
_LOOKS = {
    "leank": (BLUE, "o", "-"),
    UNALIGNED: (BLUE, "^", ":"),
    "magnitude-alpha": (BLUE, "s", "--"),
    "static-norm": (GREEN, "o", "-"),
    "double-sparsity": (GREEN, "s", "--"),
    "random": ("#9a9a9c", "x", ":"),
    "think": (ORANGE, "o", "-"),
    "per-head-budget-dynamic": (ORANGE, "s", "--"),
    "high-frequency-ratio": ("#9b6bc4", "o", "-"),
    "duo-attention": ("#9b6bc4", "s", "--"),
    "duo-attention+leank": ("#c45b8a", "D", "-."),
}


def draw_curves(findings: Findings) -> Figure:
    """Score over the removed share of K, a line a method; at the right, its upper end."""
    figure = new_figure(4.6)
    whole, top = figure.subplots(1, 2, width_ratios=[1.15, 1])
    for axes in (whole, top):
        _draw_lines(axes, findings)
    whole.set(ylabel="exact match (%)", ylim=(-2, 102), title="All methods")
    dense = 100 * findings.dense.scores.mean
    least = 100 * min(findings.plan.sizes.ratios)
    top.set(xlim=(least - 3, 101), ylim=(dense - 25.5, dense + 0.75), title="The same, near the dense model")
    top.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def draw_table(rows: Sequence[Finding], dense: Finding) -> Figure:
    """Points of a table's rows with their intervals against the dense model, a panel a pruning ratio."""
    by_ratio: dict[float, list[Finding]] = {}
    for finding in rows:
        if finding.entry is not None:
            by_ratio.setdefault(finding.entry.ratio, []).append(finding)
    figure = new_figure(max(1.6, 0.34 * max(map(len, by_ratio.values())) + 0.9))
    panels = figure.subplots(1, len(by_ratio), squeeze=False)[0]
    for axes, (ratio, shown) in zip(panels, by_ratio.items(), strict=True):
        _draw_points(axes, shown, dense)
        axes.set_title(f"{ratio:.0%} of K asked for")
    return figure


def draw_lengths(findings: Findings) -> Figure:
    """Score over the prompts' length, a line a method, a panel for each of the two shown ratios."""
    figure = new_figure(3.6)
    sizes = findings.plan.sizes
    panels = figure.subplots(1, 2)
    for axes, ratio in zip(panels, (sizes.main_ratio, sizes.hard_ratio), strict=True):
        shown = {"dense": findings.dense}
        shown |= {name: curve[ratio] for name, curve in findings.curves.items() if ratio in curve}
        for name, finding in shown.items():
            colour, marker, line = _LOOKS.get(name, (INK, "", "-"))
            values = [100 * finding.scores.where(lengths=[length]).mean for length in sizes.lengths]
            axes.plot(
                sizes.lengths, values, color=colour, marker=marker, linestyle=line, label=name, markersize=4
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes.lengths, [str(length) for length in sizes.lengths])
        axes.set_xticks([], minor=True)
        axes.set(xlabel="tokens of the prompt", ylabel="exact match (%)", ylim=(-2, 102))
        axes.set_title(f"{ratio:.0%} of K asked for")
        axes.grid(axis="y")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def _draw_lines(axes: Axes, findings: Findings) -> None:
    dense = 100 * findings.dense.scores.mean
    axes.axhline(dense, color=INK, linewidth=1, linestyle=":", label="dense")
    for method, curve in findings.curves.items():
        colour, marker, line = _LOOKS[method]
        points = sorted((100 * finding.removed, 100 * finding.scores.mean) for finding in curve.values())
        axes.plot(
            *zip((0, dense), *points, strict=True),
            color=colour,
            marker=marker,
            linestyle=line,
            label=method,
            markersize=4,
            linewidth=2 if method == "leank" else 1.2,
        )
    axes.set(xlabel="K channels removed (%)", xlim=(-2, 101))
    axes.grid(axis="y")


def _draw_points(axes: Axes, shown: Sequence[Finding], dense: Finding) -> None:
    places = range(len(shown))
    means = [100 * finding.scores.mean for finding in shown]
    base = 100 * dense.scores.mean
    reach = [
        (max(0.0, mean - base - 100 * low), max(0.0, base + 100 * high - mean))
        for mean, (low, high) in zip(means, (f.against_dense.interval for f in shown), strict=True)
    ]
    axes.errorbar(
        means, places, xerr=list(zip(*reach, strict=True)), fmt="o", color=BLUE, ecolor=INK, markersize=6
    )
    axes.axvline(base, color=INK, linewidth=1, linestyle=":")
    for place, mean in zip(places, means, strict=True):
        axes.annotate(
            f"{mean:.1f}", (1, place), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
    # Not from 0, where differences of those that do well would be lost, nor so close that tenths look large.
    most = max(base, *(mean + above for mean, (_, above) in zip(means, reach, strict=True)))
    least = min(most - 5, *(mean - below for mean, (below, _) in zip(means, reach, strict=True)))
    room = 0.06 * (most - least)
    axes.set(xlabel="exact match (%)", xlim=(least - room, most + room), ylim=(len(shown) - 0.5, -0.5))
    axes.set_yticks(list(places), [finding.label for finding in shown])
    axes.grid(axis="x")
