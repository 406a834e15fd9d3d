"""What an evaluation leaves on the disk: its figures as JSON and CSV, and drawn."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from leank_convert.evaluate.comparison import Comparison
from leank_convert.files import write_atomically

JSON_NAME, CSV_NAME, PLOT_NAME = "results.json", "results.csv", "results.png"


def write_results(result: Comparison, folder: Path) -> list[Path]:
    """Write `results.json`, `results.csv` and `results.png`.

    Returns:
        What was written.
    """
    contents = {
        JSON_NAME: (json.dumps(result.to_dict(), indent=2) + "\n").encode(),
        CSV_NAME: _to_csv(result).encode(),
        PLOT_NAME: _draw(result),
    }
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def _to_csv(result: Comparison) -> str:
    """One line for every length, task and variant."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["length", "task", "n", "variant", "score", "difference", "interval_low", "interval_high"]
    )
    for length, task, score in result.rows():
        for variant in result.variants:
            difference = score.differences.get(variant)
            beside = ("", "", "") if difference is None else (difference.mean, *difference.interval)
            writer.writerow([length, task, score.n, variant, score.means[variant], *beside])
    return text.getvalue()


def _draw(result: Comparison) -> bytes:
    """Scores by task, a panel a length, a bar a variant."""
    lengths = result.lengths
    num_bars = max(len(result.by_task(length)) for length in lengths) * len(result.variants)
    size = (max(6.0, 0.28 * num_bars + 2), 2.8 * len(lengths) + 0.6)
    figure, panels = plt.subplots(len(lengths), 1, figsize=size, squeeze=False, layout="constrained")
    for axes, length in zip(panels[:, 0], lengths, strict=True):
        _draw_length(axes, result, length)
    panels[0, 0].legend(loc="lower left", bbox_to_anchor=(0, 1.08), ncols=len(result.variants), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    plt.close(figure)
    return content.getvalue()


def _draw_length(axes: Axes, result: Comparison, length: int) -> None:
    scores = result.by_task(length)
    width = 0.8 / len(result.variants)
    for place, variant in enumerate(result.variants):
        x = [task + (place - (len(result.variants) - 1) / 2) * width for task in range(len(scores))]
        axes.bar(x, [score.means[variant] for score in scores.values()], width, label=variant)
    axes.set_xticks(range(len(scores)), list(scores), rotation=20, ha="right")
    axes.set_ylim(0, 1)
    axes.set_ylabel(result.measure)
    axes.set_title(f"up to {length} tokens", loc="right", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
