"""Figures of what was measured on a model; each function draws one into the axes it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from leank_convert.analyze.impact import GROUP_SIZE, GroupImpact
from leank_convert.report.figures import BLUE, INK, ORANGE, add_colorbar, label_layers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NUMBERS = 64  # cells that still have room for their value
_NAMED_SHARE = 0.6  # of the largest norm or impact, from which on a point has its name


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


def draw_impact(axes: Axes, groups: Sequence[GroupImpact]) -> None:
    """A point per group of channels: its norm against what its removal costs; far ones are named."""
    norms, lost = [group.norm for group in groups], [100 * group.lost for group in groups]
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.scatter(norms, lost, s=34, color=BLUE, alpha=0.8, linewidths=0)
    half = (groups[-1].first + GROUP_SIZE) / 2
    for group, norm, points in zip(groups, norms, lost, strict=True):
        if norm > _NAMED_SHARE * max(norms) or abs(points) > _NAMED_SHARE * max(map(abs, lost)):
            # RoPE's other half of the same pairs mostly lies close by: its name goes to the other side.
            side, place = (-5, "right") if group.first < half else (5, "left")
            axes.annotate(
                f"{group.first}-{group.first + GROUP_SIZE - 1}",
                (norm, points),
                xytext=(side, 4),
                textcoords="offset points",
                ha=place,
                fontsize=8,
            )
    axes.set(
        title="Norm against impact",
        xlabel=f"mean norm ratio of {GROUP_SIZE} channels",
        ylabel="exact matches lost (points)",
    )
    axes.margins(0.12)
    axes.grid()


def draw_impact_by_group(axes: Axes, groups: Sequence[GroupImpact]) -> None:
    """Bars of what the removal of each group of channels costs."""
    places = [group.first + (GROUP_SIZE - 1) / 2 for group in groups]
    lost = [100 * group.lost for group in groups]
    axes.bar(places, lost, width=0.85 * GROUP_SIZE, color=BLUE)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(title="Impact by channel", xlabel="channel", ylabel="exact matches lost (points)")
    axes.grid(axis="y")
