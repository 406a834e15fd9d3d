"""Figures of masks, of their analysis and of training runs; each function draws one into given axes.

Colours are readable on light and on dark ground; `STYLE` makes text and lines a grey that is, too. Heads are
in the mask's own order: the model's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from leank_convert.methods import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from leank_convert.mask import ChannelMask
    from leank_convert.report.distribution import MaskAnalysis
    from leank_convert.train.log import StepRecord

INK = "#808182"  # of text and lines; no other colour of a figure may be equal
BLUE, ORANGE, GREEN = "#3d85c6", "#e07b39", "#3f9b6d"
_DROPPED = "#80808020"
_MOST_LABELS = 16
_MOST_NUMBERS = 64  # cells that still have room for their value

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "leank",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.35,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}


def draw_scaling_factors(axes: Axes, scaling_factors: Tensor) -> None:
    """Heat map of the scaling factors [L, H_kv, D]: a row per layer and head, a column per channel."""
    image = _draw_heads_by_channels(axes, scaling_factors, "viridis")
    axes.set_title("Scaling factors")
    _add_colorbar(axes, image, "scaling factor", 1)


def draw_channel_mask(axes: Axes, channel_mask: Tensor) -> None:
    """The mask itself [L, H_kv, D], laid out like the scaling factors."""
    from matplotlib.colors import ListedColormap

    _draw_heads_by_channels(axes, channel_mask, ListedColormap([_DROPPED, BLUE]))
    axes.set_title("Kept channels (blue)")


def draw_by_head(
    axes: Axes, values: Tensor, title: str, label: str, top: float = 1.0, number: str = ".2f"
) -> None:
    """Heat map of numbers [L, H_kv] from 0 to `top`: a row per layer, a column per KV head.

    Where they have room they are written into the cells, in the format `number`.
    """
    image = _draw_cells(axes, values, top)
    if values.numel() <= _MOST_NUMBERS:
        _write_numbers(axes, values.numpy(), top, number)
    axes.set_xticks(range(0, values.shape[1], _label_step(values.shape[1])))
    _label_layers(axes, len(values), 1)
    axes.set(title=title, xlabel="KV head")
    _add_colorbar(axes, image, label, top)


def draw_kept_by_layer(axes: Axes, channel_mask: Tensor) -> None:
    """Bars of the fraction of channels that each layer keeps, the first layer on top."""
    kept = 100 * channel_mask.float().mean((1, 2)).numpy()
    _draw_layers(axes, kept.tolist(), BLUE)
    axes.axvline(kept.mean(), color=INK, linewidth=1, linestyle="--", label="whole model")
    axes.set(title="Kept by layer", xlabel="kept channels (%)")
    _add_legend(axes)


def draw_kept_by_pair(axes: Axes, analysis: MaskAnalysis) -> None:
    """Bars of the share that is kept of each RoPE pair, outliers named and in another colour."""
    pairs = range(len(analysis.kept_by_pair))
    bars = axes.bar(pairs, [100 * share for share in analysis.kept_by_pair], width=0.85, color=BLUE)
    axes.axhline(100 * analysis.kept, color=INK, linewidth=1, linestyle="--", label="whole model")
    neighbours = [100 * share for share in analysis.neighbours_by_pair]
    axes.plot(pairs, neighbours, color=GREEN, linewidth=1.6, label="median of the neighbours")
    for outlier in analysis.outliers:
        bars[outlier.pair].set_facecolor(ORANGE)
        style = {"ha": "center", "color": ORANGE, "fontweight": "bold"}
        share = f"pair {outlier.pair}: {outlier.kept:.0%}"
        _annotate(axes, share, (outlier.pair, 100 * outlier.kept), (0, 4), **style)
    axes.margins(y=0.14)
    axes.set(
        title="Kept by RoPE pair",
        xlabel="pair (0 turns fastest)",
        ylabel="kept (%)",
        xlim=(-0.75, len(pairs) - 0.25),
    )
    axes.grid(axis="y")
    _add_legend(axes, columns=2)


def draw_layers_by_pair(axes: Axes, mask: ChannelMask) -> None:
    """Heat map of the share that each layer keeps of each RoPE pair."""
    rotated = mask.rotated_channels
    num_layers, _, num_rotated = rotated.shape
    kept = rotated.double().mean(1).view(num_layers, 2, num_rotated // 2).mean(1)
    image = _draw_cells(axes, 100 * kept, 100)
    _label_layers(axes, num_layers, 1)
    axes.set(title="Kept by layer and RoPE pair", xlabel="pair (0 turns fastest)")
    _add_colorbar(axes, image, "kept (%)", 100)


def draw_width_histogram(axes: Axes, channel_mask: Tensor) -> None:
    """Bars of how many heads have each width; widths without a common step are put into bins."""
    from matplotlib.ticker import MaxNLocator

    head_dim = channel_mask.shape[-1]
    widths = channel_mask.sum(-1).flatten().tolist()
    exact = math.gcd(head_dim, *widths)
    step = max(exact, math.ceil(head_dim / 32))
    counts = Counter(width // step for width in widths)
    places = range(head_dim // step + 1)
    bars = axes.bar(places, [counts[place] for place in places], width=0.8, color=BLUE)
    if len(places) <= _MOST_LABELS + 1:
        axes.bar_label(bars, [str(counts[place] or "") for place in places], padding=2)
    shown = places[:: _label_step(len(places))]
    axes.set_xticks(shown, [str(place * step) for place in shown])
    binned = "" if step == exact else f", in bins of {step}"
    axes.set(title="Learned widths", xlabel=f"kept channels of {head_dim}{binned}", ylabel="heads")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)
    axes.grid(axis="y")


def draw_empty_by_layer(axes: Axes, analysis: MaskAnalysis) -> None:
    """Bars of the heads of width 0 in each layer, the first layer on top."""
    from matplotlib.ticker import MaxNLocator

    num_heads = len(analysis.widths[0])
    _draw_layers(axes, analysis.empty_by_layer, ORANGE)
    axes.set(title="Heads of width 0", xlabel=f"of {num_heads} KV heads", xlim=(0, num_heads))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_cache(axes: Axes, analysis: MaskAnalysis) -> None:
    """Bars of the bytes of one token in K and V: what is kept of it, and what is saved."""
    cache = analysis.cache
    pruned = np.array([cache.key_pruned, cache.value_pruned, cache.key_pruned + cache.value_pruned])
    dense = np.array([cache.key_dense, cache.value_dense, cache.key_dense + cache.value_dense])
    names = ("K", "V", "K + V")
    axes.barh(names, pruned / 1024, color=BLUE, label="kept")
    axes.barh(names, (dense - pruned) / 1024, left=pruned / 1024, color=INK, alpha=0.25, label="saved")
    for place, share in enumerate(1 - pruned / dense):
        _annotate(axes, f"{share:.1%} saved", (dense[place] / 1024, place), (5, 0), va="center")
    axes.set(title="Cache of a token in the pruned region", xlabel="KiB, all layers", ylim=(2.5, -0.5))
    axes.margins(x=0.22)
    axes.grid(axis="x")
    _add_legend(axes, columns=2)


def draw_correlation(axes: Axes, table: Sequence[Sequence[float]], names: Sequence[str], title: str) -> None:
    """Table of correlations, a cell for each two of the names."""
    values = np.array(table)
    axes.imshow(values, interpolation="none", vmin=0, vmax=1, cmap="viridis", aspect="auto")
    _write_numbers(axes, values, 1, ".3f")
    axes.set_xticks(range(len(names)), list(names))
    axes.set_yticks(range(len(names)), list(names))
    axes.tick_params(length=0)
    axes.set_title(title)


def draw_ratio_by_width(axes: Axes, ratios: Tensor, widths: Tensor) -> None:
    """A point per head: its width against its w_hf, heads of width 0 in another colour."""
    ratio, width = ratios.flatten().numpy(), widths.flatten().numpy()
    for chosen, colour, label in ((width == 0, ORANGE, "width 0"), (width > 0, BLUE, "keeps channels")):
        chosen = chosen & np.isfinite(ratio)  # layers that are not rotated have none
        if chosen.any():
            axes.scatter(
                ratio[chosen], width[chosen], s=26, color=colour, alpha=0.6, linewidths=0, label=label
            )
            axes.axvline(ratio[chosen].mean(), color=colour, linewidth=1.2, linestyle="--")
    axes.set(
        title="Width against ratio", xlabel="high-frequency ratio (dashed: means)", ylabel="kept channels",
        xlim=(0, None),
    )  # fmt: skip
    axes.grid()
    _add_legend(axes, columns=2)


def draw_distillation(axes: Axes, records: Sequence[StepRecord]) -> None:
    """Curve of the distillation loss over the steps, with the median of the steps around each."""
    losses = np.array([record.distillation for record in records])
    places = np.arange(1, len(records) + 1)
    axes.plot(places, losses, color=BLUE, linewidth=0.7, alpha=0.45)
    window = max(1, len(records) // 40) | 1
    for stage in range(len(STAGES)):
        chosen = np.array([record.stage == stage for record in records])
        if chosen.any():
            smooth = _running_median(losses[chosen], window)
            axes.plot(places[chosen], smooth, color=BLUE, linewidth=1.8)
    positive = losses[losses > 0]
    if len(positive):
        # All factors are 1 before the first step: what that step loses is rounding alone, and would take
        # half of the axis.
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5 * np.quantile(positive, 0.02))
    axes.set(title="Distillation loss", ylabel="mean squared difference")
    _mark_stages(axes, records)


def draw_pruning(axes: Axes, records: Sequence[StepRecord]) -> None:
    """Curves of the mean gate or scaling factor and, in stage 2, of the reached pruning ratio."""
    places = np.arange(1, len(records) + 1)
    means = np.array([record.mean_factor for record in records])
    stages = np.array([record.stage for record in records])
    of_factors = (stages == 1) | (stages == 2)
    parts = (stages == 0, BLUE, "mean gate"), (of_factors, ORANGE, "mean scaling factor")
    for rows, colour, name in (*parts, (stages == 3, BLUE, "mean gate of V")):
        if rows.any():
            axes.plot(places[rows], means[rows], color=colour, label=name)
    ratios = np.array([record.pruning_ratio for record in records], dtype=float)
    reached = ~np.isnan(ratios)  # None but in stage 2
    if reached.any():
        axes.plot(places[reached], ratios[reached], color=GREEN, label="reached pruning ratio")
    asked = {ratio for record in records if (ratio := record.pruning_ratio_asked) is not None}
    for ratio in sorted(asked):
        label = "asked pruning ratio" if len(asked) == 1 else None
        axes.axhline(ratio, color=INK, linewidth=1.2, linestyle=":", label=label)
    axes.set(title="Pruning", xlabel="step", ylabel="fraction", ylim=(0, 1.02))
    _add_legend(axes, columns=4, column_spacing=1.2)
    _mark_stages(axes, records)


def _draw_layers(axes: Axes, values: Sequence[float], colour: str) -> None:
    """Bars of one value a layer, the first layer on top."""
    axes.barh(range(len(values)), values, height=0.8, color=colour)
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.grid(axis="x")
    _label_layers(axes, len(values), 1)


def _draw_heads_by_channels(axes: Axes, values: Tensor, colours: Any) -> AxesImage:
    num_layers, num_heads, head_dim = values.shape
    image = _draw_cells(axes, values.reshape(-1, head_dim), 1, colours)
    _label_layers(axes, num_layers, num_heads)
    axes.set_xticks(range(0, head_dim, max(1, head_dim // 4)))
    axes.set_xlabel("channel")
    return image


def _draw_cells(axes: Axes, values: Tensor, top: float, colours: Any = "viridis") -> AxesImage:
    return axes.imshow(values.numpy(), aspect="auto", interpolation="none", vmin=0, vmax=top, cmap=colours)


def _write_numbers(axes: Axes, values: np.ndarray[Any, Any], top: float, number: str) -> None:
    for (row, column), value in np.ndenumerate(values):
        if not math.isfinite(value):
            continue
        colour = "black" if value > 0.6 * top else "white"
        axes.text(column, row, format(value, number), ha="center", va="center", color=colour)


def _label_layers(axes: Axes, num_layers: int, rows: int) -> None:
    """Name the layers at the left, each beside the middle of its rows, with ticks at the borders between."""
    shown = range(0, num_layers, _label_step(num_layers))
    axes.set_yticks([(layer + 0.5) * rows - 0.5 for layer in shown], [str(layer) for layer in shown])
    axes.tick_params(axis="y", length=0)
    if rows > 1:
        axes.set_yticks([layer * rows - 0.5 for layer in range(num_layers + 1)], minor=True)
        axes.tick_params(axis="y", which="minor", length=3)
    axes.set_ylabel("layer" if rows == 1 else f"layer ({rows} KV heads each)")


def _label_step(count: int) -> int:
    return -(-count // _MOST_LABELS)


def _add_colorbar(axes: Axes, image: AxesImage, label: str, top: float) -> None:
    """A scale from 0 to `top` beside an image, with ticks at its quarters."""
    from matplotlib.figure import Figure

    figure = axes.figure
    assert isinstance(figure, Figure)
    ticks = np.linspace(0, top, 5).round(2).tolist()
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30, label=label, ticks=ticks)
    bar.outline.set_visible(False)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # in an SVG, one picture instead of a path per colour


def _add_legend(axes: Axes, columns: int = 1, column_spacing: float = 2.0) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, columnspacing=column_spacing, borderpad=0,
        borderaxespad=0.2,
    )  # fmt: skip


def _mark_stages(axes: Axes, records: Sequence[StepRecord]) -> None:
    axes.grid(axis="y")
    axes.set_xlim(1, max(2, len(records)))
    for stage, name in enumerate(STAGES):
        first = sum(record.stage < stage for record in records)
        if 0 < first < len(records):
            axes.axvline(first + 0.5, color=INK, linewidth=1, linestyle="--")
            where = ("data", "axes fraction")
            _annotate(axes, name, (first + 0.5, 1), (4, -3), xycoords=where, va="top")


def _annotate(axes: Axes, text: str, place: Any, points: tuple[int, int], **style: Any) -> None:
    """Write a text so many points right of and above a place."""
    axes.annotate(text, place, xytext=points, textcoords="offset points", **style)


def _running_median(values: np.ndarray[Any, Any], window: int) -> np.ndarray[Any, Any]:
    """The median of `window` (odd) values around each; fewer at the ends."""
    half = window // 2
    return np.array(
        [np.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))], dtype=values.dtype
    )
