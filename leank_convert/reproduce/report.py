"""What the experiments leave: a page that opens offline, tables in Markdown, figures, numbers.

Page and Markdown are two renderings of the same sections.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leank_convert.files import write_atomically
from leank_convert.report.figures import INK, STYLE
from leank_convert.report.page import render_page, render_section
from leank_convert.reproduce.figures import draw_curves, draw_lengths, draw_table
from leank_convert.reproduce.findings import Finding, Findings, describe_difference, describe_seeds
from leank_convert.reproduce.paper import PAPER, SOURCE, PaperTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_NAME, MARKDOWN_NAME = "report.html", "report.md"
JSON_NAME, CSV_NAME = "results.json", "results.csv"
_TITLE = "The LeanK paper's experiments on the shipped model"
_PNG_DPI = 150
# A PNG has a ground of its own, and text that stands out on it.
_PNG_STYLE = {
    **{key: "#24292f" if value == INK else value for key, value in STYLE.items()},
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
_TABLE_STYLE = (
    "<style>table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; display: block; "
    "overflow-x: auto; } th, td { border-bottom: 1px solid var(--line); padding: 0.2rem 0.6rem; "
    "text-align: left; } td { white-space: nowrap; } #verdicts td { white-space: normal; } "
    "p { max-width: 50rem; }</style>"
)


@dataclass(frozen=True)
class _Grid:
    """A table: what it is, the names of its columns, its cells as text."""

    caption: str
    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Section:
    """A heading, what is to be said below it, tables, and perhaps a figure."""

    name: str
    heading: str
    text: str
    grids: tuple[_Grid, ...]
    draw: Callable[[], Figure] | None = None
    caption: str = ""


def write_report(findings: Findings, out: Path) -> Path:
    """Write all files of the report; each appears whole or not at all.

    Args:
        findings: What is told.
        out: The folder.

    Returns:
        The page.
    """
    import matplotlib.style

    sections = _list_sections(findings)
    facts = _list_facts(findings)
    with matplotlib.style.context(["default", STYLE]):
        shown = [_to_html(section) for section in sections]
    write_atomically(out / PAGE_NAME, render_page(_TITLE, facts, [_TABLE_STYLE, *shown]).encode())
    with matplotlib.style.context(["default", _PNG_STYLE]):
        for section in sections:
            if section.draw is not None:
                write_atomically(out / f"{section.name}.png", _to_png(section.draw()))
    write_atomically(out / MARKDOWN_NAME, _to_markdown(facts, sections).encode())
    write_atomically(out / JSON_NAME, (json.dumps(findings.to_dict(), indent=1) + "\n").encode())
    write_atomically(out / CSV_NAME, _to_csv(findings).encode())
    return out / PAGE_NAME


def _list_facts(findings: Findings) -> list[tuple[str, str]]:
    sizes = findings.plan.sizes
    tasks = dict.fromkeys(task for task, _ in findings.dense.scores.cells)
    return [
        *findings.environment.items(),
        ("prompts", f"{sizes.num_prompts} of each of {', '.join(tasks)} at {_join(sizes.lengths)} tokens"),
        ("dense", f"{findings.dense.scores.mean:.2%} exact match"),
        ("figures in brackets", "95% intervals of paired differences over the same prompts, in points"),
    ]


def _list_sections(findings: Findings) -> list[_Section]:
    sections = [
        _Section(
            "verdicts",
            "What the figures say",
            "Each answer is computed from paired differences. `not told apart`: the interval holds 0. Claims "
            "that something is close, suffices, matters little or does are judged by the mean and a margin "
            "of one point. Intervals are over prompts, not over the seed of training, which may matter more: "
            f"{describe_seeds(findings)}.",
            _verdict_grids(findings),
        ),
        _Section(
            "comparison",
            "Pruning ratio against accuracy",
            "The share is K's alone: methods that drop whole heads drop as much of V, which the last table "
            "adds up. Baselines are not held to a width multiple; LeanK is, and without it is a line of its "
            "own. Of methods with several settings (budgets per head, window sizes) the one that is best on "
            "prompts of a seed of their own is shown, chosen for each ratio. Where more factors end at 1 "
            "than channels are kept, which of them are kept is left to their order.",
            (
                *_paper_grids("comparison"),
                _grid("Ours", [findings.dense, *_points(findings)]),
                _choice_grid(findings),
            ),
            lambda: draw_curves(findings),
            "Ours. At 0% stands the dense model. The share that is removed is the reached one.",
        ),
        _Section(
            "by-length",
            "Accuracy by length",
            "",
            (),
            lambda: draw_lengths(findings),
            "Ours.",
        ),
    ]
    for table in findings.plan.tables:
        rows = findings.tables[table.name]
        sections.append(
            _Section(
                table.name,
                table.title,
                "",
                (*_paper_grids(table.name), _grid("Ours", [findings.dense, *rows])),
                lambda rows=rows: draw_table(rows, findings.dense),  # type: ignore[misc]
                "Ours; each panel has its own scale. Lines: 95% intervals of the difference to the dense "
                "model, which is dotted.",
            )
        )
    sections.append(
        _Section(
            "saved",
            "What is saved of K and V",
            "Shares of the pruned region, of which a long context is nearly all. A head that keeps no "
            "channel of K keeps no V.",
            (*_paper_grids("saved"), _saved_grid(findings)),
        )
    )
    return sections


def _points(findings: Findings) -> list[Finding]:
    return [finding for curve in findings.curves.values() for finding in curve.values()]


def _paper_grids(name: str) -> tuple[_Grid, ...]:
    if name not in PAPER:
        return ()
    table: PaperTable = PAPER[name]
    caption = f"The paper's ({SOURCE}; {table.origin}): {table.claim}"
    rows = tuple((label, ratio, f"{accuracy:g}") for label, ratio, accuracy in table.rows)
    return (_Grid(caption, ("the paper's", "K removed", "accuracy (%)"), rows),)


def _verdict_grids(findings: Findings) -> tuple[_Grid, ...]:
    return tuple(
        _Grid(
            topic,
            ("claim", "ours", "figures"),
            tuple((v.claim, v.answer, v.detail) for v in findings.verdicts if v.topic == topic),
        )
        for topic in dict.fromkeys(verdict.topic for verdict in findings.verdicts)
    )


def _grid(caption: str, rows: Sequence[Finding]) -> _Grid:
    cells = rows[0].scores.cells
    tasks = list(dict.fromkeys(task for task, _ in cells))
    lengths = list(dict.fromkeys(length for _, length in cells))
    header = (
        "",
        "asked",
        "K removed",
        "V removed",
        "exact match (%)",
        "against dense",
        "factors at 1, of kept",
        *tasks,
        *map(str, lengths),
    )
    lines = []
    for finding in rows:
        scores = [finding.scores.where(tasks=[task]).mean for task in tasks]
        scores += [finding.scores.where(lengths=[length]).mean for length in lengths]
        line = [
            finding.label,
            "" if finding.entry is None else f"{finding.entry.ratio:.0%}",
            f"{finding.removed:.1%}",
            f"{finding.value_removed:.1%}",
            f"{100 * finding.scores.mean:.2f}",
            "" if finding.entry is None else describe_difference(finding.against_dense),
            "" if finding.tied is None else "{} of {}".format(*finding.tied),
            *(f"{100 * score:.1f}" for score in scores),
        ]
        lines.append(tuple(line))
    return _Grid(caption, header, tuple(lines))


def _choice_grid(findings: Findings) -> _Grid:
    cells = tuple(
        (
            finding.label,
            f"{finding.entry.ratio:.0%}",
            finding.entry.setting,
            ", ".join(f"{setting}: {100 * mean:.1f}" for setting, mean in finding.validation.items()),
        )
        for finding in _points(findings)
        if finding.validation and finding.entry is not None
    )
    caption = (
        f"Settings, chosen on {findings.plan.sizes.num_validation} other prompts of each task and length"
    )
    return _Grid(caption, ("", "asked", "best", "exact match (%)"), cells)


def _saved_grid(findings: Findings) -> _Grid:
    rows = tuple(
        (
            finding.entry.name,
            f"{finding.removed:.1%}",
            f"{finding.value_removed:.1%}",
            f"{(finding.removed + finding.value_removed) / 2:.1%}",
            describe_difference(finding.against_dense),
        )
        for finding in findings.all_findings()
        if finding.entry is not None and not finding.entry.dynamic
    )
    return _Grid("Ours", ("mask", "K", "V", "K and V", "against dense"), rows)


def _to_html(section: _Section) -> str:
    body = f"<p>{html.escape(section.text)}</p>" if section.text else ""
    body += "".join(map(_grid_to_html, section.grids))
    if section.draw is None:
        heading = html.escape(section.heading)
        return f'<h2>{heading}</h2>\n<div id="{section.name}">\n{body}</div>'
    return render_section(section.heading, section.name, section.draw(), section.caption) + body


def _grid_to_html(grid: _Grid) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"

    caption = f"<p><b>{html.escape(grid.caption)}</b></p>\n"
    if not grid.cells:
        return caption
    rows = "".join(line("td", cells) for cells in grid.cells)
    return f"{caption}<table>\n{line('th', grid.header)}{rows}</table>\n"


def _to_markdown(facts: Sequence[tuple[str, str]], sections: Sequence[_Section]) -> str:
    parts = [f"# {_TITLE}", "\n".join(f"- {name}: {text}" for name, text in facts)]
    for section in sections:
        parts.append(f"## {section.heading}")
        if section.text:
            parts.append(section.text)
        if section.draw is not None:
            parts.append(f"![{section.heading}]({section.name}.png)")
        for grid in section.grids:
            parts.append(f"**{grid.caption}**")
            if grid.cells:
                lines = [grid.header, tuple("---" for _ in grid.header), *grid.cells]
                parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return "\n\n".join(parts) + "\n"


def _to_png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_PNG_DPI)
    return content.getvalue()


def _to_csv(findings: Findings) -> str:
    """A line for every finding, task and length."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["method", "setting", "ratio_asked", "k_removed", "v_removed", "task", "length", "n", "score"]
    )
    for finding in findings.all_findings():
        entry = finding.entry
        named = ["dense", "", ""] if entry is None else [entry.method, entry.setting, entry.ratio]
        for task, length in dict.fromkeys(finding.scores.cells):
            writer.writerow(
                [
                    *named,
                    finding.removed,
                    finding.value_removed,
                    task,
                    length,
                    finding.scores.cells.count((task, length)),
                    finding.scores.where(tasks=[task], lengths=[length]).mean,
                ]
            )
    return text.getvalue()


def _join(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)
