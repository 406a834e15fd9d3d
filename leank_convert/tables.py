"""Tables for people: no line is longer than 80 columns, and no word is broken."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names flush left, figures in columns flush right, empty cells as they are.

    Columns that there is no room for follow below, beside the names again.
    """
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    parts: list[list[int]] = [[]]
    for column in range(1, len(sizes)):
        if parts[-1] and sum(sizes[at] + 2 for at in (*parts[-1], column)) + sizes[0] > WIDTH:
            parts.append([])
        parts[-1].append(column)
    lines: list[str] = []
    for part in parts:
        lines += [""] if lines else []
        for name, *figures in rows:
            cells = "".join(f"  {figures[at - 1]:>{sizes[at]}}" for at in part)
            lines.append(f"{name:<{sizes[0]}}{cells}".rstrip())
    return lines


def listing(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns flush left, the last of text that goes on below itself; a row of text alone is indented."""
    sizes = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    lines: list[str] = []
    for *cells, text in rows:
        start = "".join(f"{cell:<{size}}  " for cell, size in zip(cells, sizes, strict=False))
        lines += paragraph(text, start or "    ") or [start.rstrip()]
    return lines


def paragraph(text: str, start: str = "") -> list[str]:
    """Text in lines, the first after `start` and the others below."""
    indents = start, " " * len(start)
    return textwrap.TextWrapper(WIDTH, *indents, break_long_words=False, break_on_hyphens=False).wrap(text)
