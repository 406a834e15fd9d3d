"""Figures of an analysis; each function draws one into the axes it is given, in `report.figures`' style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from leank_convert.analyze.distribution import MaskAnalysis
from leank_convert.report.figures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    add_colorbar,
    draw_kept_by_pair,
    label_layers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from leank_convert.mask import ChannelMask

_MOST_NUMBERS = 64  # cells that still have room for their value


def draw_pairs(axes: Axes, mask: ChannelMask, analysis: MaskAnalysis) -> None:
    """Bars of the share that is kept of each RoPE pair, outliers named and in another colour."""
    draw_kept_by_pair(axes, mask)
    bars = list(axes.patches)
    axes.plot(
        range(len(bars)),
        [100 * share for share in analysis.neighbours_by_pair],
        color=GREEN,
        linewidth=1.6,
        label="median of the neighbours",
    )
    for outlier in analysis.outliers:
        bars[outlier.pair].set_facecolor(ORANGE)
        axes.annotate(
            f"pair {outlier.pair}: {outlier.kept:.0%}",
            (outlier.pair, 100 * outlier.kept),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            color=ORANGE,
            fontweight="bold",
        )
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderpad=0, borderaxespad=0.2)
    axes.margins(y=0.14)


def draw_layers_by_pair(axes: Axes, mask: ChannelMask) -> None:
    """Heat map of the share that each layer keeps of each RoPE pair."""
    rotated = mask.rotated_channels
    num_layers, _, num_rotated = rotated.shape
    kept = rotated.double().mean(1).view(num_layers, 2, num_rotated // 2).mean(1)
    image = axes.imshow(
        100 * kept.numpy(), aspect="auto", interpolation="none", vmin=0, vmax=100, cmap="viridis"
    )
    label_layers(axes, num_layers, 1)
    axes.set(title="Kept by layer and RoPE pair", xlabel="pair (0 turns fastest)")
    add_colorbar(axes, image, "kept (%)", range(0, 101, 25))


def draw_empty_by_layer(axes: Axes, analysis: MaskAnalysis) -> None:
    """Bars of the heads of width 0 in each layer, the first layer on top."""
    from matplotlib.ticker import MaxNLocator

    empty = analysis.empty_by_layer
    axes.barh(range(len(empty)), empty, height=0.8, color=ORANGE)
    axes.set(
        title="Heads of width 0",
        xlabel=f"of {len(analysis.widths[0])} KV heads",
        xlim=(0, len(analysis.widths[0])),
        ylim=(len(empty) - 0.5, -0.5),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x")
    label_layers(axes, len(empty), 1)


def draw_cache(axes: Axes, analysis: MaskAnalysis) -> None:
    """Bars of the bytes of one token in K and V: what is kept of it, and what is saved."""
    cache = analysis.cache
    rows = [
        ("K", cache.key_pruned, cache.key_dense),
        ("V", cache.value_pruned, cache.value_dense),
        ("K + V", cache.key_pruned + cache.value_pruned, cache.key_dense + cache.value_dense),
    ]
    names = [name for name, _, _ in rows]
    axes.barh(names, [pruned / 1024 for _, pruned, _ in rows], color=BLUE, label="kept")
    axes.barh(
        names,
        [(dense - pruned) / 1024 for _, pruned, dense in rows],
        left=[pruned / 1024 for _, pruned, _ in rows],
        color=INK,
        alpha=0.25,
        label="saved",
    )
    for place, (_, pruned, dense) in enumerate(rows):
        axes.annotate(
            f"{1 - pruned / dense:.1%} saved",
            (dense / 1024, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set(title="Cache of a token in the pruned region", xlabel="KiB, all layers", ylim=(2.5, -0.5))
    axes.margins(x=0.22)
    axes.grid(axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderpad=0, borderaxespad=0.2)


def draw_correlation(axes: Axes, table: Sequence[Sequence[float]], names: Sequence[str], title: str) -> None:
    """Table of correlations, a cell for each two of the names."""
    values = np.array(table)
    axes.imshow(values, interpolation="none", vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        colour = "black" if value > 0.6 else "white"
        axes.text(column, row, f"{value:.3f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(names)), list(names))
    axes.set_yticks(range(len(names)), list(names))
    axes.tick_params(length=0)
    axes.set_title(title)


def draw_ratio_by_head(axes: Axes, ratios: Tensor) -> None:
    """Heat map of w_hf [L, H_kv]: a row per layer, a column per KV head."""
    values = ratios.numpy()
    top = max(1.0, float(values.max()))
    image = axes.imshow(values, aspect="auto", interpolation="none", vmin=0, vmax=top, cmap="viridis")
    if values.size <= _MOST_NUMBERS:
        for (layer, head), value in np.ndenumerate(values):
            colour = "black" if value > 0.6 * top else "white"
            axes.text(head, layer, f"{value:.2f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(0, values.shape[1], -(-values.shape[1] // 16)))
    label_layers(axes, len(values), 1)
    axes.set(title="High-frequency ratio by head", xlabel="KV head")
    add_colorbar(axes, image, "high-frequency ratio", np.linspace(0, top, 5).round(2).tolist())


def draw_ratio_by_width(axes: Axes, ratios: Tensor, widths: Tensor) -> None:
    """A point per head: its width against its w_hf, heads of width 0 in another colour."""
    ratio, width = ratios.flatten().numpy(), widths.flatten().numpy()
    for chosen, colour, label in ((width == 0, ORANGE, "width 0"), (width > 0, BLUE, "keeps channels")):
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
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderpad=0, borderaxespad=0.2)
