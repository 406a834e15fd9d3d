"""Report of a mask and of its training: one HTML page that needs no other file, network or script."""

from __future__ import annotations

import datetime
import html
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from leank_convert.files import write_atomically
from leank_convert.mask import ChannelMask
from leank_convert.report import figures
from leank_convert.report.distribution import MaskAnalysis, analyze_mask
from leank_convert.report.mask_sections import describe_mask, list_mask_sections
from leank_convert.report.page import Section, new_figure, panels, render_page, rows_height

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from leank_convert.train.log import StepRecord

REPORT_NAME = "report.html"


def write_report(
    mask: ChannelMask, records: Sequence[StepRecord], path: Path, gates: Tensor | None = None
) -> None:
    """Write the report of a mask as a page; equal masks and logs give equal pages, with the same matplotlib.

    Without scaling factors or provenance the page shows what there is. Of the records, every step of its
    training or none, those that led to this mask are shown; gates are of its heads [L, H_kv, 1].

    Raises:
        OSError: If it cannot be written.
    """
    asked = mask.provenance.pruning_ratio_asked if mask.provenance else None
    records = [
        record for record in records if record.stage < 2 or asked in (None, record.pruning_ratio_asked)
    ]
    analysis = analyze_mask(mask)
    sections = [section.to_html() for section in _list_sections(mask, analysis, records, gates)]
    title = f"LeanK mask of {mask.provenance.model}" if mask.provenance else "LeanK mask"
    text = mask.provenance.recipe if mask.provenance else None
    recipe = "" if text is None else f"<h2>Recipe</h2>\n<pre>{html.escape(text)}</pre>"
    page = render_page(title, [*_collect_facts(mask, analysis, records)], [*sections, recipe])
    write_atomically(path, page.encode())


def _collect_facts(
    mask: ChannelMask, analysis: MaskAnalysis, records: Sequence[StepRecord]
) -> Iterator[tuple[str, str]]:
    known = mask.provenance
    yield from describe_mask(analysis, known.pruning_ratio_asked if known else None)
    if known:
        yield "windows", f"sink {known.sink_size}, recent {known.recent_size}, flush {known.flush_size}"
        if known.width_multiple is not None:
            yield "widths", f"multiples of {known.width_multiple}"
        if known.key_mean_tokens is not None:
            yield "keys", f"cached less their mean over {known.key_mean_tokens:,} tokens"
        if mask.value_widths is not None:
            asked = known.value_pruning_ratio_asked
            told = "" if asked is None else f" (asked: {asked:.1%})"
            yield "V", f"{mask.value_pruning_ratio:.1%} removed{told}, in a basis of its own"
    if records:
        counts = Counter(record.stage for record in records)
        steps = [f"{counts[0]} (gates of heads)"] if counts[0] else []
        if counts[1] or counts[2]:
            steps.append(f"{counts[1]} + {counts[2]} (stages 1 and 2)")
        steps += [f"{counts[3]} (gates of V)"] if counts[3] else []
        yield "steps", ", ".join(steps)
        answers = sum(record.num_answer_tokens for record in records)
        yield "tokens", f"{sum(record.num_tokens for record in records):,}, {answers:,} of them answers"
        yield "time in steps", str(datetime.timedelta(seconds=round(sum(one.seconds for one in records))))
        if memory := max(record.gpu_bytes or 0 for record in records):
            yield "peak GPU memory", f"{memory / 1e9:.1f} GB"
    if known:
        if known.held_out:
            yield "held-out answers", known.held_out.render()
            yield from (("warning", warning) for warning in known.held_out.warnings)
        yield "made by", known.method
        if known.seed is not None:
            yield "seed", str(known.seed)
        yield "versions", ", ".join(f"{name} {v}" for name, v in known.versions.items())
        made = f"; of a mask alone, first `leank-convert export {known.model} -o OUT`"
        yield "next step", f"`leank-convert evaluate OUT` compares answers with dense ones{made}"


def _list_sections(
    mask: ChannelMask, analysis: MaskAnalysis, records: Sequence[StepRecord], gates: Tensor | None
) -> list[Section]:
    channels, factors = mask.channel_mask, mask.scaling_factors
    num_layers, num_heads, _ = channels.shape
    sections = list_mask_sections(mask, analysis)
    every = Section(
        "Every channel",
        "channels",
        lambda: panels(
            min(12.0, max(3.6, 0.045 * num_layers * num_heads + 1)),
            *([] if factors is None else [(figures.draw_scaling_factors, factors)]),
            (figures.draw_channel_mask, channels),
            width_ratios=None if factors is None else [1.12, 1],
        ),
        "A row per KV head, a column per channel"
        + ("." if factors is None else ": as training ended, and what was selected from it."),
    )
    training = Section(
        "Training",
        "training",
        lambda: _draw_training(records),
        "Of the steps that led to this mask. Thin: the loss of each step, whose samples differ in length and "
        "task. Thick: the running median. Dashed: where a stage begins.",
    )
    if gates is not None:
        per_head = gates[..., 0]
        sections.append(
            Section(
                "What heads were chosen by",
                "gates",
                lambda: panels(rows_height(num_layers), (figures.draw_by_head, per_head, "Gates", "gate")),
                "How much a head needs more than sink and recent window; those that need most keep channels.",
            )
        )
    if records:
        sections.append(training)
    # Where gates alone chose, all channels of a head are alike.
    return sections if gates is not None and factors is None else [*sections, every]


def _draw_training(records: Sequence[StepRecord]) -> Figure:
    figure = new_figure(5.4)
    loss, pruning = figure.subplots(2, 1, sharex=True)
    figures.draw_distillation(loss, records)
    figures.draw_pruning(pruning, records)
    return figure
