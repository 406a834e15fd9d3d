"""A report's document: chapters of text, tables and figures, as a page that opens offline and as Markdown."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from leank_convert.report.page import Section, render_page, render_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = "<style>td { white-space: nowrap; } #verdicts td { white-space: normal; }</style>"


class Grid(NamedTuple):
    """A table: what it is, the names of its columns, its cells as text."""

    caption: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]


class Chapter(NamedTuple):
    """A heading, text and tables below it, and perhaps a figure, which is on the page alone."""

    name: str
    heading: str
    text: str
    grids: Sequence[Grid]
    draw: Callable[[], Figure] | None = None
    caption: str = ""


def to_html(title: str, facts: Sequence[tuple[str, str]], chapters: Sequence[Chapter]) -> str:
    """The whole page."""
    return render_page(title, facts, [_STYLE, *map(_to_html, chapters)])


def to_markdown(title: str, facts: Sequence[tuple[str, str]], chapters: Sequence[Chapter]) -> str:
    """All but the figures, in Markdown."""
    parts = [f"# {title}", "\n".join(f"- {name}: {text}" for name, text in facts)]
    for chapter in chapters:
        if not chapter.grids:
            continue
        parts += [f"## {chapter.heading}", *filter(None, [chapter.text])]
        for grid in chapter.grids:
            lines = [grid.header, ["---"] * len(grid.header), *grid.cells] if grid.cells else []
            parts += [f"**{grid.caption}**"]
            parts += ["\n".join(f"| {' | '.join(cells)} |" for cells in lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def _to_html(chapter: Chapter) -> str:
    body = f"<p>{html.escape(chapter.text)}</p>\n" if chapter.text else ""
    for grid in chapter.grids:
        body += render_table(*grid) if grid.cells else f"<p><b>{html.escape(grid.caption)}</b></p>\n"
    if chapter.draw is None:
        heading = html.escape(chapter.heading)
        return f'<h2>{heading}</h2>\n<div id="{chapter.name}">\n{body}</div>'
    return Section(chapter.heading, chapter.name, chapter.draw, chapter.caption).to_html() + body
