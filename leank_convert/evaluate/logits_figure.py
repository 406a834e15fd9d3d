"""The figure of a text's predictions: divergence, agreement and likelihood along the text."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from leank_convert.evaluate.logits import LogitMeans, TextComparison
from leank_convert.files import write_atomically

_FLOOR = 1e-7  # of a divergence, in nats: below, float32 tells nothing
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": "medium"}


def write_text_figure(result: TextComparison, path: Path) -> Path:
    """Write the figure as PNG.

    Returns:
        `path`.
    """
    figure, panels = plt.subplots(3, 1, figsize=(8.0, 7.0), sharex=True, layout="constrained")
    _draw_divergence(panels[0], result)
    _draw_means(panels[1], result, lambda means: 100 * means.agreement)
    panels[1].set_title("Most likely next token is the dense model's", **_TITLE)
    panels[1].set_ylabel("fed tokens (%)")
    panels[1].set_ylim(top=101)
    panels[2].axhline(0, color="grey", linewidth=0.8)
    _draw_means(panels[2], result, lambda means: means.nll - means.dense_nll)
    panels[2].set_title("Negative log-likelihood of the text, less the dense model's", **_TITLE)
    panels[2].set(ylabel="nats", xlabel=f"token of the text (the first {result.prefix_tokens} are prefilled)")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.5, alpha=0.35)
    names = [variant.name for variant in result.variants]
    figure.legend(panels[0].get_lines(), names, loc="outside upper right", ncols=4, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    plt.close(figure)
    write_atomically(path, content.getvalue())
    return path


def _draw_divergence(axes: Axes, result: TextComparison) -> None:
    """A point for every fed token, and the mean of every stretch of the text."""
    places = range(result.prefix_tokens, result.num_tokens - 1)
    for place, variant in enumerate(result.variants):
        values = [max(value, _FLOOR) for value in variant.divergence]
        axes.scatter(places, values, s=5, alpha=0.35, linewidths=0, color=f"C{place}")
    _draw_means(axes, result, lambda means: max(means.divergence, _FLOOR))
    axes.set_yscale("log")
    axes.set_title("KL(dense || variant) of the next token: each, and means", **_TITLE)
    axes.set_ylabel("nats")


def _draw_means(axes: Axes, result: TextComparison, value: Callable[[LogitMeans], float]) -> None:
    for place, variant in enumerate(result.variants):
        bins = result.by_position(variant)
        middles = [(means.first + means.last) / 2 for means in bins]
        heights = [value(means) for means in bins]
        axes.plot(middles, heights, marker="o", markersize=3.5, color=f"C{place}")
