"""Presentation of an analysis: text, a page that opens offline, figures as PNG, numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leank_convert.analyze.distribution import OUTLIER_RULE, MaskAnalysis, OutlierPair
from leank_convert.analyze.drawing import (
    draw_cache,
    draw_correlation,
    draw_empty_by_layer,
    draw_layers_by_pair,
    draw_pairs,
    draw_ratio_by_head,
    draw_ratio_by_width,
)
from leank_convert.analyze.measurement import Measurement
from leank_convert.errors import LeanKError
from leank_convert.export.publish import check_replaceable, staged_folder
from leank_convert.files import write_atomically
from leank_convert.folders import check_folder
from leank_convert.mask import ChannelMask
from leank_convert.report.figures import draw_kept_by_head, draw_kept_by_layer, draw_width_histogram
from leank_convert.report.page import Section, new_figure, render_page, rows_height

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_NAME = "analysis.html"
NUMBERS_NAME = "analysis.json"
_MOST_WIDTHS = 12  # that a line names one by one
_PAIRS_PER_LINE = 8


def check_writable(out: Path) -> None:
    """Refuse a folder that already holds something, or cannot be one.

    Raises:
        LeanKError: If it does, or is a file.
    """
    if check_folder(out).exists() and any(out.iterdir()):
        raise LeanKError(f"`{out}` already exists", hint="name another folder by `--out`, or remove this one")
    check_replaceable(out, overwrite=False)


def write_analysis(
    mask: ChannelMask, analysis: MaskAnalysis, measured: Measurement | None, origin: str, out: Path
) -> list[Path]:
    """Write page, figures and numbers into a folder that appears whole or not at all.

    Args:
        mask: The mask.
        analysis: What was found of it.
        measured: What was measured on its model, None if nothing was.
        origin: What the user called it.
        out: The folder.

    Returns:
        The files, the page first.

    Raises:
        LeanKError: If the folder already holds something.
        OSError: If it cannot be written.
    """
    check_writable(out)
    with staged_folder(out, overwrite=False) as partial:
        sections = _list_sections(mask, analysis)
        if measured is not None:
            sections += _list_measured_sections(mask, measured)
        title = f"Analysis of {analysis.model or Path(origin).name}"
        shown = [section.to_html() for section in sections]
        page = render_page(title, describe(analysis, measured, origin), shown)
        write_atomically(partial / PAGE_NAME, page.encode())
        for section in sections:
            write_atomically(partial / f"{section.name}.png", section.to_png())
        write_atomically(
            partial / NUMBERS_NAME, (json.dumps(to_dict(analysis, measured), indent=1) + "\n").encode()
        )
    return [out / name for name in (PAGE_NAME, *(f"{s.name}.png" for s in sections), NUMBERS_NAME)]


def to_dict(analysis: MaskAnalysis, measured: Measurement | None) -> dict[str, Any]:
    """Both as JSON-ready data."""
    return {**analysis.to_dict(), "measured": None if measured is None else measured.to_dict()}


def render_analysis(analysis: MaskAnalysis, measured: Measurement | None, origin: str) -> str:
    """Render an analysis as text.

    Args:
        analysis: What was found of a mask.
        measured: What was measured on its model, None if nothing was.
        origin: What the user called it.
    """
    facts = describe(analysis, measured, origin)
    size = max(len(name) for name, _ in facts)
    lines = [f"{name:<{size}}  {text}" for name, text in facts]
    named = {outlier.pair for outlier in analysis.outliers}
    lines += ["", "pair  kept (%)" + ("; * marks an outlier" if named else "")]
    for start in range(0, len(analysis.kept_by_pair), _PAIRS_PER_LINE):
        cells = (
            f"{100 * share:>6.1f}{'*' if pair in named else ' '}"
            for pair, share in enumerate(analysis.kept_by_pair[start : start + _PAIRS_PER_LINE], start)
        )
        lines.append(f"{start:>4}  {''.join(cells)}".rstrip())
    digits = max(5, len(str(analysis.head_dim)))
    lines += ["", "layer  kept (%)  width 0  widths by head"]
    for layer, (share, empty, widths) in enumerate(
        zip(analysis.kept_by_layer, analysis.empty_by_layer, analysis.widths, strict=True)
    ):
        cells = (f"{width:>{digits}}" for width in widths)
        lines.append(f"{layer:>5}  {100 * share:>8.1f}  {empty:>7}  {''.join(cells)}")
    return "\n".join(lines) + "\n"


def describe(analysis: MaskAnalysis, measured: Measurement | None, origin: str) -> list[tuple[str, str]]:
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
    if analysis.model is not None:
        facts.insert(0, ("model", analysis.model))
    return facts if measured is None else [*facts, *_describe_measured(measured)]


def _describe_measured(measured: Measurement) -> list[tuple[str, str]]:
    facts = [
        (
            "measured on",
            f"{', '.join(measured.tasks)} at {_list_lengths(measured)} tokens, "
            f"{measured.num_samples} of each" + ("; keys less their mean" if measured.centred else ""),
        )
    ]
    for name, table in (("tasks", measured.between_tasks), ("lengths", measured.between_lengths)):
        others = [value for row, values in enumerate(table) for value in values[:row]]
        if others:
            text = f"Pearson correlation of channel norms {min(others):.3f} to {max(others):.3f}"
            facts.append((f"between {name}", text))
    means = [
        f"{value:.3f} of heads {name}"
        for name, value in (
            ("of width 0", measured.ratio_of_empty),
            ("with channels", measured.ratio_of_others),
        )
        if value is not None
    ]
    facts.append(("high frequencies", f"mean ratio {', '.join(means)}"))
    return facts


def _list_lengths(measured: Measurement) -> str:
    return ", ".join(f"{length:,}" for length in measured.lengths)


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


def _list_sections(mask: ChannelMask, analysis: MaskAnalysis) -> list[Section]:
    channels = mask.channel_mask
    height = rows_height(len(channels))

    def layers() -> Figure:
        figure = _panels(
            height,
            lambda axes: draw_kept_by_head(axes, channels),
            lambda axes: draw_kept_by_layer(axes, channels),
            lambda axes: draw_empty_by_layer(axes, analysis),
            width_ratios=[1.4, 1, 0.7],
        )
        for axes in figure.axes[1:3]:
            axes.set_ylabel("")
        return figure

    return [
        Section(
            "RoPE pairs",
            "pairs",
            lambda: _panels(3.8, lambda axes: draw_pairs(axes, mask, analysis)),
            "A pair is two channels that RoPE turns together, at a frequency that falls with its number. "
            + OUTLIER_RULE,
        ),
        Section(
            "Layers and heads",
            "layers",
            layers,
            "In the model's own order; a head of width 0 sees only sink and recent window.",
        ),
        Section(
            "Pairs in each layer",
            "layers-by-pair",
            lambda: _panels(height, lambda axes: draw_layers_by_pair(axes, mask)),
            "Over a layer's KV heads. A pair that matters to the whole model is a line from top to bottom.",
        ),
        Section(
            "Widths and bytes",
            "widths",
            lambda: _panels(
                3.2,
                lambda axes: draw_width_histogram(axes, channels),
                lambda axes: draw_cache(axes, analysis),
            ),
            "A head keeps as many K channels as its width and all of V; a head of width 0 keeps neither. "
            "Tokens in sink and recent window stay whole.",
        ),
    ]


def _list_measured_sections(mask: ChannelMask, measured: Measurement) -> list[Section]:
    names = [f"{length:,}" for length in measured.lengths]
    ratios = measured.high_frequency_ratio
    return [
        Section(
            "Are the same channels large everywhere?",
            "staticity",
            lambda: _panels(
                0.5 * max(len(measured.tasks), len(names)) + 1.2,
                lambda axes: draw_correlation(axes, measured.between_tasks, measured.tasks, "Between tasks"),
                lambda axes: draw_correlation(
                    axes, measured.between_lengths, names, "Between lengths (tokens)"
                ),
            ),
            "Pearson correlation of the channels' norm ratios over all layers and heads: a channel's part in "
            "the products of the last 32 queries with all keys. Near 1, one mask can serve all.",
        ),
        Section(
            "High frequencies",
            "frequencies",
            lambda: _panels(
                rows_height(len(mask.channel_mask)),
                lambda axes: draw_ratio_by_head(axes, ratios),
                lambda axes: draw_ratio_by_width(axes, ratios, mask.channel_mask.sum(-1)),
            ),
            "The norm of a head's attention logits from the faster half of the RoPE pairs alone, against "
            "that of all. By the paper, heads with a high ratio look at what is near and matter little far "
            "away.",
        ),
    ]


def _panels(
    height: float, *draw: Callable[[Axes], None], width_ratios: Sequence[float] | None = None
) -> Figure:
    """A figure of panels side by side, each drawn by a function of its axes."""
    figure = new_figure(height)
    row = figure.subplots(1, len(draw), squeeze=False, width_ratios=width_ratios)[0]
    for axes, draw_panel in zip(row, draw, strict=True):
        draw_panel(axes)
    return figure
