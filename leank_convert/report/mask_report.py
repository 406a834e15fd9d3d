"""The report of a mask: one HTML page that needs no other file, no network and no script."""

from __future__ import annotations

import datetime
import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from leank_convert.files import write_atomically
from leank_convert.head_layout import count_cache_bytes
from leank_convert.mask import ChannelMask
from leank_convert.report.figures import (
    draw_channel_mask,
    draw_distillation,
    draw_gates,
    draw_kept_by_head,
    draw_kept_by_layer,
    draw_kept_by_pair,
    draw_pruning,
    draw_scaling_factors,
    draw_width_histogram,
)
from leank_convert.report.page import Section, new_figure, render_page, rows_height

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leank_convert.train.log import StepRecord

REPORT_NAME = "report.html"


def write_report(
    mask: ChannelMask, records: Sequence[StepRecord], path: Path, gates: Tensor | None = None
) -> None:
    """Write the report of a mask; equal masks and logs give equal pages, with the same matplotlib.

    Args:
        mask: The mask; without scaling factors or provenance the page shows what there is.
        records: Every step of its training, of which those that led to this mask are shown; may be empty.
        path: The page, which appears whole or not at all.
        gates: Of the heads [L, H_kv, 1], if it was made by some.

    Raises:
        OSError: If it cannot be written.
    """
    asked = mask.provenance.pruning_ratio_asked if mask.provenance else None
    records = [
        record for record in records if record.stage < 2 or asked in (None, record.pruning_ratio_asked)
    ]
    # Where gates alone chose, all channels of a head are alike.
    by_channel = gates is None or mask.scaling_factors is not None
    sections = [_section_of_widths(mask)]
    if gates is not None:
        sections.append(_section_of_gates(gates))
    if by_channel:
        sections.append(_section_of_pairs(mask))
    if records:
        sections.append(_section_of_training(records))
    if by_channel:
        sections.append(_section_of_channels(mask))
    shown = [*(section.to_html() for section in sections), _render_recipe(mask)]
    title = f"LeanK mask of {mask.provenance.model}" if mask.provenance else "LeanK mask"
    write_atomically(path, render_page(title, _collect_facts(mask, records), shown).encode())


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
        if known.key_mean_tokens is not None:
            facts.append(("keys", f"cached less their mean over {known.key_mean_tokens:,} tokens"))
    if records:
        counts = Counter(record.stage for record in records)
        steps = [f"{counts[0]} (gates of heads)"] if counts[0] else []
        if counts[1] or counts[2]:
            steps.append(f"{counts[1]} + {counts[2]} (stages 1 and 2)")
        tokens = sum(record.num_tokens for record in records)
        answers = sum(record.num_answer_tokens for record in records)
        time = datetime.timedelta(seconds=round(sum(record.seconds for record in records)))
        facts += [
            ("steps", ", ".join(steps)),
            ("tokens", f"{tokens:,}, {answers:,} of them answers"),
            ("time in steps", str(time)),
        ]
        memory = max(record.gpu_bytes or 0 for record in records)
        if memory:
            facts.append(("peak GPU memory", f"{memory / 1e9:.1f} GB"))
    if known:
        if known.held_out:
            facts.append(("held-out answers", known.held_out.render()))
            facts += [("warning", warning) for warning in known.held_out.warnings]
        facts.append(("made by", known.method))
        if known.seed is not None:
            facts.append(("seed", str(known.seed)))
        facts.append(("versions", ", ".join(f"{name} {v}" for name, v in known.versions.items())))
    return facts


def _section_of_widths(mask: ChannelMask) -> Section:
    def draw() -> Figure:
        figure = new_figure(rows_height(mask.channel_mask.shape[0]))
        by_head, by_layer = figure.subplots(1, 2, width_ratios=[1.25, 1])
        draw_kept_by_head(by_head, mask.channel_mask)
        draw_kept_by_layer(by_layer, mask.channel_mask)
        return figure

    caption = "Layers and KV heads in the model's own order; a head of 0 sees only sink and recent window."
    return Section("Where channels are kept", "heads", draw, caption)


def _section_of_gates(gates: Tensor) -> Section:
    def draw() -> Figure:
        figure = new_figure(rows_height(gates.shape[0]))
        draw_gates(figure.subplots(), gates[..., 0])
        return figure

    caption = "How much a head needs more than sink and recent window; those that need most keep channels."
    return Section("What heads were chosen by", "gates", draw, caption)


def _section_of_pairs(mask: ChannelMask) -> Section:
    def draw() -> Figure:
        figure = new_figure(3.2)
        by_pair, widths = figure.subplots(1, 2, width_ratios=[1.6, 1])
        draw_kept_by_pair(by_pair, mask)
        draw_width_histogram(widths, mask.channel_mask)
        return figure

    caption = "A pair is two channels that RoPE turns together, at a frequency that falls with its number."
    return Section("Which channels, how many", "pairs", draw, caption)


def _section_of_training(records: Sequence[StepRecord]) -> Section:
    def draw() -> Figure:
        figure = new_figure(5.4)
        loss, pruning = figure.subplots(2, 1, sharex=True)
        draw_distillation(loss, records)
        draw_pruning(pruning, records)
        return figure

    caption = (
        "Of the steps that led to this mask. Thin: the loss of each step, whose samples differ in length and "
        "task. Thick: the running median. Dashed: where a stage begins."
    )
    return Section("Training", "training", draw, caption)


def _section_of_channels(mask: ChannelMask) -> Section:
    num_layers, num_heads, _ = mask.channel_mask.shape

    def draw() -> Figure:
        figure = new_figure(min(12.0, max(3.6, 0.045 * num_layers * num_heads + 1)))
        if mask.scaling_factors is None:
            draw_channel_mask(figure.subplots(), mask.channel_mask)
        else:
            factors, kept = figure.subplots(1, 2, width_ratios=[1.12, 1])
            draw_scaling_factors(factors, mask.scaling_factors)
            draw_channel_mask(kept, mask.channel_mask)
        return figure

    caption = "A row per KV head, a column per channel"
    caption += (
        "." if mask.scaling_factors is None else (": as training ended, and what was selected from it.")
    )
    return Section("Every channel", "channels", draw, caption)


def _render_recipe(mask: ChannelMask) -> str:
    if mask.provenance is None or mask.provenance.recipe is None:
        return ""
    return f"<h2>Recipe</h2>\n<pre>{html.escape(mask.provenance.recipe)}</pre>"
