"""The report of a mask: one HTML page that needs nothing beside it, no network and no script."""

from __future__ import annotations

import datetime
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from leank_convert.cache_bytes import count_cache_bytes
from leank_convert.checkpoint_io import write_atomically
from leank_convert.mask import ChannelMask
from leank_convert.train.figures import (
    INK,
    STYLE,
    draw_channel_mask,
    draw_distillation,
    draw_kept_by_head,
    draw_kept_by_layer,
    draw_kept_by_pair,
    draw_pruning,
    draw_scaling_factors,
    draw_width_histogram,
)
from leank_convert.train.journal import StepRecord, read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_NAME = "report.html"
_WIDTH = 11.0  # inches of a figure, which the page scales to its own width

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
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: 0.75rem 1rem; }
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


def write_report(mask: ChannelMask, log_path: Path | None, path: Path) -> None:
    """Write the report of a mask; equal masks and logs give equal pages, with the same matplotlib.

    Args:
        mask: The mask; without scaling factors or provenance the page shows what there is.
        log_path: The log of its training, of which the steps that led to this mask are shown; None or a file
            that does not exist for a mask without one.
        path: The page, which appears whole or not at all.

    Raises:
        OSError: If it cannot be written.
    """
    import matplotlib.style

    asked = mask.provenance.pruning_ratio_asked if mask.provenance else None
    records = [
        record
        for record in (read_log(log_path) if log_path else [])
        if record.stage == 1 or asked in (None, record.pruning_ratio_asked)
    ]
    with matplotlib.style.context(["default", STYLE]):
        sections = [_show_widths(mask), _show_pairs(mask), _show_training(records), _show_channels(mask)]
    sections.append(_show_recipe(mask))
    title = f"LeanK mask of {mask.provenance.model}" if mask.provenance else "LeanK mask"
    facts = "\n".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
        for name, text in _collect_facts(mask, records)
    )
    page = _PAGE.substitute(title=html.escape(title), facts=facts, sections="\n".join(filter(None, sections)))
    write_atomically(path, page.encode())


def _collect_facts(mask: ChannelMask, records: Sequence[StepRecord]) -> list[tuple[str, str]]:
    num_layers, num_heads, head_dim = mask.channel_mask.shape
    known = mask.provenance
    cache = count_cache_bytes(mask.widths, head_dim, 1)
    empty = sum(width == 0 for layer in mask.widths for width in layer)
    removed = f"{mask.pruning_ratio:.1%}"
    if known and known.pruning_ratio_asked is not None:
        removed += f" (asked: {known.pruning_ratio_asked:.1%})"
    facts = [
        ("shape", f"{num_layers} layers, {num_heads} KV heads, head_dim {head_dim}"),
        ("K channels removed", removed),
        ("heads without any", f"{empty} of {num_layers * num_heads}; they see sink and recent window alone"),
        (
            "cache per pruned token",
            f"K {cache.key_pruned / cache.key_dense:.1%}, V {cache.value_pruned / cache.value_dense:.1%}, "
            f"together {1 - cache.saved:.1%} of the dense one",
        ),
    ]
    if known:
        facts.append(
            ("windows", f"sink {known.sink_size}, recent {known.recent_size}, flush {known.flush_size}")
        )
        if known.width_multiple is not None:
            facts.append(("widths", f"multiples of {known.width_multiple}"))
    if records:
        first = sum(record.stage == 1 for record in records)
        tokens = sum(record.num_tokens for record in records)
        answers = sum(record.num_answer_tokens for record in records)
        time = datetime.timedelta(seconds=round(sum(record.seconds for record in records)))
        facts += [
            ("steps", f"{first} + {len(records) - first} (stages 1 and 2)"),
            ("tokens", f"{tokens:,}, {answers:,} of them answers"),
            ("time in steps", str(time)),
        ]
        memory = max(record.gpu_bytes or 0 for record in records)
        if memory:
            facts.append(("peak GPU memory", f"{memory / 1e9:.1f} GB"))
    if known:
        facts.append(("made by", known.method))
        if known.seed is not None:
            facts.append(("seed", str(known.seed)))
        facts.append(("versions", ", ".join(f"{name} {v}" for name, v in known.versions.items())))
    return facts


def _show_widths(mask: ChannelMask) -> str:
    figure = _new_figure(min(9.0, max(3.2, 0.22 * mask.channel_mask.shape[0] + 1.2)))
    by_head, by_layer = figure.subplots(1, 2, width_ratios=[1.25, 1])
    draw_kept_by_head(by_head, mask.channel_mask)
    draw_kept_by_layer(by_layer, mask.channel_mask)
    caption = "Layers and KV heads in the model's own order; a head of 0 sees only sink and recent window."
    return _section("Where channels are kept", "heads", figure, caption)


def _show_pairs(mask: ChannelMask) -> str:
    figure = _new_figure(3.2)
    by_pair, widths = figure.subplots(1, 2, width_ratios=[1.6, 1])
    draw_kept_by_pair(by_pair, mask.channel_mask)
    draw_width_histogram(widths, mask.channel_mask)
    caption = "A pair is two channels that RoPE turns together, at a frequency that falls with i."
    return _section("Which channels, how many", "pairs", figure, caption)


def _show_training(records: Sequence[StepRecord]) -> str:
    if not records:
        return ""
    figure = _new_figure(5.4)
    loss, pruning = figure.subplots(2, 1, sharex=True)
    draw_distillation(loss, records)
    draw_pruning(pruning, records)
    caption = (
        "Of the steps that led to this mask. Thin: the loss of each step, whose samples differ in length and "
        "task. Thick: the running median. Dashed: where stage 2 begins."
    )
    return _section("Training", "training", figure, caption)


def _show_channels(mask: ChannelMask) -> str:
    num_layers, num_heads, _ = mask.channel_mask.shape
    figure = _new_figure(min(12.0, max(3.6, 0.045 * num_layers * num_heads + 1)))
    if mask.scaling_factors is None:
        draw_channel_mask(figure.subplots(), mask.channel_mask)
        caption = "A row per KV head, a column per channel."
    else:
        factors, kept = figure.subplots(1, 2, width_ratios=[1.12, 1])
        draw_scaling_factors(factors, mask.scaling_factors)
        draw_channel_mask(kept, mask.channel_mask)
        caption = "A row per KV head, a column per channel: as training ended, and what was selected from it."
    return _section("Every channel", "channels", figure, caption)


def _show_recipe(mask: ChannelMask) -> str:
    if mask.provenance is None or mask.provenance.recipe is None:
        return ""
    return f"<h2>Recipe</h2>\n<pre>{html.escape(mask.provenance.recipe)}</pre>"


def _new_figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained", dpi=100)


def _section(heading: str, name: str, figure: Figure, caption: str) -> str:
    heading, caption = html.escape(heading), html.escape(caption)
    return (
        f"<h2>{heading}</h2>\n<figure>\n{_render_svg(name, heading, figure)}"
        f"<figcaption>{caption}</figcaption>\n</figure>"
    )


def _render_svg(name: str, label: str, figure: Figure) -> str:
    """The figure as an element of a page: text in the page's colour, ids that no other figure has."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    svg = text[text.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
