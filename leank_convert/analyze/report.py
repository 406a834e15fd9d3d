"""What an analysis leaves on the disk: a page that opens offline, its figures as PNG, its numbers as JSON."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leank_convert.analyze.distribution import OUTLIER_RULE, MaskAnalysis, OutlierPair
from leank_convert.analyze.figures import (
    draw_cache,
    draw_empty_by_layer,
    draw_layers_by_pair,
    draw_pairs,
)
from leank_convert.checkpoint_io import write_atomically
from leank_convert.errors import LeanKError
from leank_convert.mask import ChannelMask
from leank_convert.train.figures import (
    INK,
    STYLE,
    draw_kept_by_head,
    draw_kept_by_layer,
    draw_width_histogram,
)
from leank_convert.train.page import new_figure, render_page, render_section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_NAME = "analysis.html"
NUMBERS_NAME = "analysis.json"
_PNG_DPI = 150
_MOST_WIDTHS = 12  # that a line names one by one
# A PNG has a ground of its own, and text that stands out on it.
_PNG_STYLE = {
    **{key: "#24292f" if value == INK else value for key, value in STYLE.items()},
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class _Section:
    """A figure with its words; drawn twice, for the page and for its PNG."""

    heading: str
    name: str
    draw: Callable[[], Figure]
    caption: str


def check_writable(out: Path) -> None:
    """Refuse a folder that already holds something.

    Raises:
        LeanKError: If it does, or is a file.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LeanKError(f"`{out}` already exists", hint="name another folder by `--out`, or remove this one")


def write_analysis(mask: ChannelMask, analysis: MaskAnalysis, origin: str, out: Path) -> list[Path]:
    """Write page, figures and numbers into a folder that appears whole or not at all.

    Args:
        mask: The mask.
        analysis: What was found of it.
        origin: What the user called it.
        out: The folder.

    Returns:
        The files, the page first.

    Raises:
        LeanKError: If the folder already holds something.
        OSError: If it cannot be written.
    """
    import matplotlib.style

    check_writable(out)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        sections = _list_sections(mask, analysis)
        with matplotlib.style.context(["default", STYLE]):
            shown = [render_section(s.heading, s.name, s.draw(), s.caption) for s in sections]
        page = render_page(f"Analysis of {analysis.model or origin}", describe(analysis, origin), shown)
        write_atomically(partial / PAGE_NAME, page.encode())
        with matplotlib.style.context(["default", _PNG_STYLE]):
            for section in sections:
                write_atomically(partial / f"{section.name}.png", _render_png(section.draw()))
        write_atomically(partial / NUMBERS_NAME, (json.dumps(analysis.to_dict(), indent=1) + "\n").encode())
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / name for name in (PAGE_NAME, *(f"{s.name}.png" for s in sections), NUMBERS_NAME)]


def describe(analysis: MaskAnalysis, origin: str) -> list[tuple[str, str]]:
    """The analysis in short, as names and values."""
    layers, heads = len(analysis.widths), len(analysis.widths[0])
    cache = analysis.cache
    key, value = 1 - cache.key_pruned / cache.key_dense, 1 - cache.value_pruned / cache.value_dense
    quarters = ", ".join(str(count) for count in analysis.empty_by_quarter)
    facts = [
        ("mask", origin),
        ("shape", f"{layers} layers, {heads} KV heads, head_dim {analysis.head_dim}"),
        ("K channels", f"{analysis.kept:.1%} kept, {1 - analysis.kept:.1%} removed"),
        (
            "heads of width 0",
            f"{analysis.empty_heads} of {analysis.num_heads} ({analysis.empty_share:.1%}); "
            f"by quarter of the layers, shallow first: {quarters}",
        ),
        ("heads per width", _describe_widths(analysis)),
        ("outlier pairs", "; ".join(map(_describe_outlier, analysis.outliers)) or "none"),
        (
            "saved per token",
            f"K {key:.1%}, V {value:.1%}, together {cache.saved:.1%}: "
            f"{cache.key_dense + cache.value_dense:,} bytes become {cache.key_pruned + cache.value_pruned:,} "
            f"in the pruned region, at {analysis.element_bytes} bytes a number",
        ),
    ]
    return facts if analysis.model is None else [("model", analysis.model), *facts]


def _describe_widths(analysis: MaskAnalysis) -> str:
    counts = analysis.heads_per_width
    if len(counts) <= _MOST_WIDTHS:
        return ", ".join(f"{width}: {count}" for width, count in counts.items())
    return f"{len(counts)} widths from {min(counts)} to {max(counts)}"


def _describe_outlier(outlier: OutlierPair) -> str:
    return (
        f"pair {outlier.pair}, {outlier.kept:.1%} kept, its neighbours {outlier.neighbours:.1%} "
        f"({outlier.score:+.1f} robust standard deviations)"
    )


def _list_sections(mask: ChannelMask, analysis: MaskAnalysis) -> list[_Section]:
    channels = mask.channel_mask
    rows_height = min(9.0, max(3.2, 0.22 * len(channels) + 1.2))

    def pairs() -> Figure:
        figure = new_figure(3.8)
        draw_pairs(figure.subplots(), channels, analysis)
        return figure

    def layers() -> Figure:
        figure = new_figure(rows_height)
        by_head, by_layer, empty = figure.subplots(1, 3, width_ratios=[1.4, 1, 0.7])
        draw_kept_by_head(by_head, channels)
        draw_kept_by_layer(by_layer, channels)
        draw_empty_by_layer(empty, analysis)
        for axes in (by_layer, empty):
            axes.set_ylabel("")
        return figure

    def layers_by_pair() -> Figure:
        figure = new_figure(rows_height)
        draw_layers_by_pair(figure.subplots(), channels)
        return figure

    def widths() -> Figure:
        figure = new_figure(3.2)
        histogram, cache = figure.subplots(1, 2)
        draw_width_histogram(histogram, channels)
        draw_cache(cache, analysis)
        return figure

    return [
        _Section(
            "RoPE pairs",
            "pairs",
            pairs,
            "A pair is two channels that RoPE turns together, at a frequency that falls with i. "
            + OUTLIER_RULE,
        ),
        _Section(
            "Layers and heads",
            "layers",
            layers,
            "In the model's own order; a head of width 0 sees only sink and recent window.",
        ),
        _Section(
            "Pairs in each layer",
            "layers-by-pair",
            layers_by_pair,
            "Over a layer's KV heads. A pair that matters to the whole model is a line from top to bottom.",
        ),
        _Section(
            "Widths and bytes",
            "widths",
            widths,
            "A head keeps as many K channels as its width and all of V; a head of width 0 keeps neither. "
            "Tokens in sink and recent window stay whole.",
        ),
    ]


def _render_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return buffer.getvalue()
