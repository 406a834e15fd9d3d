"""The frame of an HTML report: facts and figures. It needs no other file, no network and no script."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any

from leank_convert.report.figures import INK, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 11.0  # inches of a figure, which the page scales to its own width
_PNG_DPI = 150
# A PNG has a ground of its own, and text that stands out on it.
_PNG_STYLE = {
    **{key: "#24292f" if value == INK else value for key, value in STYLE.items()},
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ground: #fff; --text: #24292f; --quiet: #59636e; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171c; --text: #d5dae0; --quiet: #98a2ad; --line: #343b44; }
}
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; background: var(--ground);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 0.5rem; border-top: 1px solid var(--line); padding-top: 1.25rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.25rem; margin: 0; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0 0; }
figcaption { color: var(--quiet); font-size: 0.9rem; }
svg { display: block; width: 100%; height: auto; }
p { max-width: 50rem; }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: 0.75rem 1rem; }
@media (max-width: 44rem) {
  dl { grid-template-columns: 1fr; } dd { margin-bottom: 0.5rem; }
  figure { overflow-x: auto; } svg { width: 44rem; } /* narrower, its text could not be read */
}
</style>
</head>
<body>
<h1>$title</h1>
<dl>
$facts
</dl>
$sections
</body>
</html>
""")


def render_page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[str]) -> str:
    """Render a page of a title and facts, as text, and sections of HTML; empty ones are left out."""
    rows = "\n".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in facts)
    return _PAGE.substitute(title=html.escape(title), facts=rows, sections="\n".join(filter(None, sections)))


def new_figure(height: float) -> Figure:
    """An empty figure of a page's width, 11 inches, and so many inches high."""
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained", dpi=100)


def panels(height: float, *drawn: tuple[Any, ...], width_ratios: Sequence[float] | None = None) -> Figure:
    """A figure of panels side by side, each a function of `figures.py` with what it draws into its axes."""
    figure = new_figure(height)
    row = figure.subplots(1, len(drawn), squeeze=False, width_ratios=width_ratios)[0]
    for axes, (draw, *shown) in zip(row, drawn, strict=True):
        draw(axes, *shown)
    return figure


def rows_height(num_layers: int) -> float:
    """Inches of a figure that has a row per layer, and room for axes."""
    return min(9.0, max(3.2, 0.22 * num_layers + 1.2))


@dataclass(frozen=True)
class Section:
    """A heading with one figure below it."""

    heading: str  # as text
    name: str  # what the ids within the figure begin with; no other section of the page may have it
    # Makes the figure; matplotlib's style is set meanwhile, whatever the user's own is.
    draw: Callable[[], Figure]
    caption: str  # as text

    def to_html(self) -> str:
        """The section as part of a page."""
        import matplotlib.style

        heading, caption = html.escape(self.heading), html.escape(self.caption)
        with matplotlib.style.context(["default", STYLE]):
            svg = _render_svg(self.name, heading, self.draw())
        return f"<h2>{heading}</h2>\n<figure>\n{svg}<figcaption>{caption}</figcaption>\n</figure>"


def figure_png(draw: Callable[[], Figure]) -> bytes:
    """Draw a figure as a PNG on white; equal figures give equal bytes, with the same matplotlib."""
    import matplotlib.style

    buffer = io.BytesIO()
    with matplotlib.style.context(["default", _PNG_STYLE]):
        draw().savefig(buffer, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return buffer.getvalue()


def _render_svg(name: str, label: str, figure: Figure) -> str:
    """The figure as an element of a page: text in the page's colour, ids that no other figure has."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    svg = text[text.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
