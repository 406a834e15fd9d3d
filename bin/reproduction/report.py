"""Report of the experiments: a page that opens offline, the same in Markdown, and all numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bin.reproduction.document import Chapter, Grid, to_html, to_markdown
from bin.reproduction.findings import Finding, Findings, Found, describe_difference, describe_seeds
from bin.reproduction.paper import paper_grids
from bin.reproduction.plan import MAIN, UNALIGNED
from bin.reproduction.real import RealResults
from bin.reproduction.real_report import MODEL_NAME, list_chapters
from leank_convert.files import write_atomically
from leank_convert.report.figures import BLUE, GREEN, INK, ORANGE
from leank_convert.report.page import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_NAME, MARKDOWN_NAME, JSON_NAME = "report.html", "report.md", "results.json"
# Readable on light and on dark ground; LeanK's own is the strongest.
_LOOKS = {
    "dense": (INK, "", "-"),
    MAIN: (BLUE, "o", "-"),
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


def write_report(findings: Findings, out: Path, real: RealResults | None = None) -> Path:
    """Write all files of the report, each whole or not at all; returns the page.

    Args:
        findings: The tables.
        out: The folder.
        real: Of a real model, what else was measured.
    """
    chapters, facts, numbers = _list_chapters(findings), _list_facts(findings), findings.to_dict()
    title = f"The LeanK paper's experiments on {'the shipped model' if real is None else MODEL_NAME}"
    if real is not None:
        chapters = [*list_chapters(findings, real), *chapters]
        numbers["real"] = real.to_dict()
    write_atomically(out / PAGE_NAME, to_html(title, facts, chapters).encode())
    write_atomically(out / MARKDOWN_NAME, to_markdown(title, facts, chapters).encode())
    write_atomically(out / JSON_NAME, (json.dumps(numbers, indent=1) + "\n").encode())
    return out / PAGE_NAME


def _list_facts(findings: Findings) -> list[tuple[str, str]]:
    sizes = findings.plan.sizes
    tasks = ", ".join(findings.dense.scores.tasks)
    lengths = ", ".join(f"{length:,}" for length in sizes.lengths)
    return [
        *findings.environment.items(),
        ("prompts", f"{sizes.num_prompts} of each of {tasks} at {lengths} tokens"),
        ("dense", f"{findings.dense.scores.mean:.2%} {sizes.measure}"),
        ("figures in brackets", "95% intervals of paired differences over the same prompts, in points"),
    ]


def _list_chapters(findings: Findings) -> list[Chapter]:
    compared = findings.tables["comparison"]
    first = [
        Chapter(
            "verdicts",
            "What the figures say",
            "Each answer is computed from paired differences. `not told apart`: the interval holds 0. Claims "
            "that something is close, suffices, matters little or does are judged by the mean and a margin "
            "of one point. Intervals are over prompts, not over the seed of training, which may matter more: "
            f"{describe_seeds(findings)}.",
            _verdict_grids(findings),
        ),
        Chapter(
            "comparison",
            findings.plan.tables["comparison"].title,
            "The share is K's alone: methods that drop whole heads drop as much of V, which the last table "
            "adds up. Baselines are not held to a width multiple; LeanK is, and without it is a line of its "
            "own. Of methods with several settings (budgets per head, window sizes) the one that is best on "
            "prompts of a seed of their own is shown, chosen for each ratio. Where more factors end at 1 "
            "than channels are kept, which of them are kept is left to their order.",
            [
                *paper_grids("comparison"),
                _score_grid(findings, compared.values()),
                _choice_grid(findings),
            ],
            lambda: _draw_curves(findings),
            "Ours. At 0% stands the dense model. The share that is removed is the reached one.",
        ),
        Chapter("by-length", "Accuracy by length", "", [], lambda: _draw_lengths(findings), "Ours."),
    ]
    ablations = [
        Chapter(
            name,
            findings.plan.tables[name].title,
            "",
            [*paper_grids(name), _score_grid(findings, found.values())],
        )
        for name, found in findings.tables.items()
        if name != "comparison"
    ]
    saved = Chapter(
        "saved",
        "What is saved of K and V",
        "Shares of the pruned region, of which a long context is nearly all. A head that keeps no channel of "
        "K keeps no V.",
        [*paper_grids("saved"), _saved_grid(findings)],
    )
    return [*first, *ablations, saved]


def _verdict_grids(findings: Findings) -> list[Grid]:
    by_topic: dict[str, list[tuple[str, str, str]]] = {}
    for claim, answer, detail, topic in findings.verdicts:
        by_topic.setdefault(topic, []).append((claim, answer, detail))
    return [Grid(topic, ("claim", "ours", "figures"), rows) for topic, rows in by_topic.items()]


def _score_grid(findings: Findings, found: Iterable[Finding]) -> Grid:
    dense, measure = findings.dense, findings.plan.sizes.measure
    tasks, lengths = dense.scores.tasks, dense.scores.lengths
    shares = ("asked", "K removed", "V removed", f"{measure} (%)", "against dense", "factors at 1, of kept")
    lines = []
    for finding in (dense, *found):
        scores = [finding.scores.where(tasks=[task]).mean for task in tasks]
        scores += [finding.scores.where(lengths=[length]).mean for length in lengths]
        lines.append(
            (
                finding.label,
                "" if finding.entry is None else f"{finding.entry.ratio:.0%}",
                f"{finding.removed:.1%}",
                f"{finding.value_removed:.1%}",
                f"{100 * finding.scores.mean:.2f}",
                "" if finding.entry is None else describe_difference(finding.against_dense),
                "" if finding.tied is None else "{} of {}".format(*finding.tied),
                *(f"{100 * score:.1f}" for score in scores),
            )
        )
    return Grid("Ours", ("", *shares, *tasks, *map(str, lengths)), lines)


def _choice_grid(findings: Findings) -> Grid:
    cells = [
        (
            finding.label,
            f"{finding.entry.ratio:.0%}",
            finding.entry.setting,
            ", ".join(f"{setting}: {100 * mean:.1f}" for setting, mean in finding.validation.items()),
        )
        for finding in findings.tables["comparison"].values()
        if finding.validation and finding.entry is not None
    ]
    num_prompts = findings.plan.sizes.num_validation
    caption = f"Settings, chosen on {num_prompts} other prompts of each task and length"
    return Grid(caption, ("", "asked", "best", f"{findings.plan.sizes.measure} (%)"), cells)


def _saved_grid(findings: Findings) -> Grid:
    rows = [
        (
            finding.entry.name,
            f"{finding.removed:.1%}",
            f"{finding.value_removed:.1%}",
            f"{(finding.removed + finding.value_removed) / 2:.1%}",
            describe_difference(finding.against_dense),
        )
        for finding in findings.all_findings()
        if finding.entry is not None and not finding.entry.dynamic
    ]
    return Grid("Ours", ("mask", "K", "V", "K and V", "against dense"), rows)


def _draw_curves(findings: Findings) -> Figure:
    """Score over the removed share of K, a line a method; at the right, its upper end."""
    figure = new_figure(4.6)
    whole, top = figure.subplots(1, 2, width_ratios=[1.15, 1])
    dense = 100 * findings.dense.scores.mean
    for axes in (whole, top):
        axes.axhline(dense, color=INK, linewidth=1, linestyle=":", label="dense")
        for method, curve in _by_label(findings.tables["comparison"]).items():
            points = sorted((100 * finding.removed, 100 * finding.scores.mean) for finding in curve.values())
            shares, scores = zip((0, dense), *points, strict=True)
            _draw_line(axes, method, shares, scores)
        axes.set(xlabel="K channels removed (%)", xlim=(-2, 101))
    whole.set(ylabel=f"{findings.plan.sizes.measure} (%)", ylim=(-2, 102), title="All methods")
    least = 100 * min(findings.plan.sizes.ratios)
    top.set(
        xlim=(least - 3, 101),
        ylim=(dense - 25.5, min(dense + 3, 100.75)),
        title="The same, near the dense model",
    )
    top.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def _draw_lengths(findings: Findings) -> Figure:
    """Score over the prompts' length, a line a method, a panel for each of the two shown ratios."""
    figure = new_figure(3.6)
    sizes = findings.plan.sizes
    panels = figure.subplots(1, 2)
    for axes, ratio in zip(panels, (sizes.main_ratio, sizes.hard_ratio), strict=True):
        shown = {"dense": findings.dense}
        for name, curve in _by_label(findings.tables["comparison"]).items():
            shown |= {name: curve[ratio]} if ratio in curve else {}
        for name, finding in shown.items():
            scores = [100 * finding.scores.where(lengths=[length]).mean for length in sizes.lengths]
            _draw_line(axes, name, sizes.lengths, scores)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes.lengths, [str(length) for length in sizes.lengths])
        axes.set_xticks([], minor=True)
        axes.set(xlabel="tokens of the prompt", ylabel=f"{sizes.measure} (%)", ylim=(-2, 102))
        axes.set_title(f"{ratio:.0%} of K asked for")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure


def _draw_line(axes: Axes, name: str, places: Sequence[float], scores: Sequence[float]) -> None:
    colour, marker, line = _LOOKS[name]
    width = 2 if name == MAIN else 1.2
    axes.plot(
        places, scores, color=colour, marker=marker, linestyle=line, label=name, markersize=4, linewidth=width
    )
    axes.grid(axis="y")


def _by_label(found: Found) -> dict[str, dict[float, Finding]]:
    curves: dict[str, dict[float, Finding]] = {}
    for (label, ratio), finding in found.items():
        curves.setdefault(label, {})[ratio] = finding
    return curves
