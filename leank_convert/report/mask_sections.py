"""Facts and figures of a mask, as every report of one shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from leank_convert.mask import ChannelMask
from leank_convert.report import figures
from leank_convert.report.distribution import OUTLIER_RULE, MaskAnalysis
from leank_convert.report.page import Section, panels, rows_height

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_WIDTHS = 12  # that a line names one by one


def describe_mask(analysis: MaskAnalysis, asked: float | None = None) -> Iterator[tuple[str, str]]:
    """Describe a mask in short, as names and values; `asked` is the pruning ratio that was asked for."""
    layers, heads = len(analysis.widths), len(analysis.widths[0])
    yield "shape", f"{layers} layers, {heads} KV heads, head_dim {analysis.head_dim}"
    removed = f"{1 - analysis.kept:.1%} removed" + ("" if asked is None else f" (asked: {asked:.1%})")
    yield "K channels", f"{analysis.kept:.1%} kept, {removed}"
    quarters = ", ".join(str(count) for count in analysis.empty_by_quarter)
    empty = f"{analysis.empty_heads} of {analysis.num_heads} ({analysis.empty_share:.1%})"
    yield "heads of width 0", f"{empty}; by quarter of the layers, shallow first: {quarters}"
    counts = analysis.heads_per_width
    few = ", ".join(f"{width}: {count}" for width, count in counts.items())
    many = f"{len(counts)} widths from {min(counts)} to {max(counts)}"
    yield "heads per width", few if len(counts) <= _MOST_WIDTHS else many
    outliers = [
        f"pair {outlier.pair}, {outlier.kept:.1%} kept, its neighbours {outlier.neighbours:.1%} "
        f"({outlier.score:+.1f} robust standard deviations)"
        for outlier in analysis.outliers
    ]
    yield "outlier pairs", "; ".join(outliers) or "none"
    cache = analysis.cache
    key, value = cache.removed
    yield (
        "saved per token",
        f"K {key:.1%}, V {value:.1%}, together {cache.saved:.1%}: "
        f"{cache.key_dense + cache.value_dense:,} bytes become {cache.key_pruned + cache.value_pruned:,} "
        f"in the pruned region, at {analysis.element_bytes} bytes a number",
    )


def list_mask_sections(mask: ChannelMask, analysis: MaskAnalysis) -> list[Section]:
    """List the figures of a mask, each with heading and caption."""
    channels, head_dim = mask.channel_mask, analysis.head_dim
    height, widths = rows_height(len(channels)), channels.sum(-1)

    def layers() -> Figure:
        figure = panels(
            height,
            (
                figures.draw_by_head,
                widths,
                "Kept channels by head",
                f"kept channels of {head_dim}",
                head_dim,
                "d",
            ),
            (figures.draw_kept_by_layer, channels),
            (figures.draw_empty_by_layer, analysis),
            width_ratios=[1.4, 1, 0.7],
        )
        for axes in figure.axes[1:3]:
            axes.set_ylabel("")
        return figure

    return [
        Section(
            "RoPE pairs",
            "pairs",
            lambda: panels(3.8, (figures.draw_kept_by_pair, analysis)),
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
            lambda: panels(height, (figures.draw_layers_by_pair, mask)),
            "Over a layer's KV heads. A pair that matters to the whole model is a line from top to bottom.",
        ),
        Section(
            "Widths and bytes",
            "widths",
            lambda: panels(3.2, (figures.draw_width_histogram, channels), (figures.draw_cache, analysis)),
            "A head keeps as many K channels as its width, and of V all, or where it is pruned its best "
            "directions; a head of width 0 keeps neither. "
            "Tokens in sink and recent window stay whole.",
        ),
    ]
