"""Report of a mask's analysis: text, numbers, and a page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    is_onnx_folder,
    ratios_hint,
    read_config,
    read_leank_config,
    read_leank_facts,
)
from leank_convert.errors import LeanKError
from leank_convert.export.publish import check_replaceable, staged_folder
from leank_convert.files import user_path, write_atomically
from leank_convert.folders import check_folder
from leank_convert.head_layout import bytes_of
from leank_convert.leank_block import read_block
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, load_own_mask, resolve_mask
from leank_convert.report import figures
from leank_convert.report.distribution import MaskAnalysis
from leank_convert.report.mask_sections import describe_mask, list_mask_sections
from leank_convert.report.page import Section, panels, render_page, rows_height
from leank_convert.tables import listing

if TYPE_CHECKING:
    from leank_convert.analyze.measurement import Measurement

_PAGE_NAME = "analysis.html"
_PAIRS_PER_LINE = 8


def load_artifact(artifact: str) -> tuple[ChannelMask, int, str | None]:
    """Load a mask by its file, hub id or folder, and tell the bytes of a number, and what caches store.

    Both are a checkpoint's or a graph's; of a mask alone they are 2 and None, numbers as they come.

    Raises:
        LeanKError: If there is no mask, it cannot be read, or it is not the checkpoint's own.
    """
    folder = user_path(artifact)
    path = resolve_mask(artifact)
    if not path.exists():
        what = f"holds no `{MASK_FILE_NAME}`" if folder.is_dir() else "does not exist"
        named = "name a mask file, the folder of a training run, or a converted checkpoint"
        raise LeanKError(f"`{artifact}` {what}", hint=ratios_hint(folder) or named)
    dtype = leank = None
    if folder.is_dir() and (folder / CONFIG_NAME).exists():
        config = read_config(folder)
        dtype = config.get("dtype") or config.get("torch_dtype")
        if "leank" in config:
            _, leank = read_leank_config(folder)
            read_block(leank, read_leank_facts(config, folder), origin=str(folder / CONFIG_NAME))
    elif is_onnx_folder(folder):
        from leank_convert.onnx.description import read_description  # imports transformers

        dtype = read_description(folder).content["dtype"]
    mask = load_mask(path) if leank is None else load_own_mask(folder, leank)
    return mask, bytes_of(str(dtype)), None if leank is None else leank.get("kv_dtype")


@dataclass(frozen=True)
class AnalysisReport:
    """The analysis of a mask, as a person or a program reads it."""

    mask: ChannelMask
    analysis: MaskAnalysis  # the distribution of its channels
    measured: Measurement | None  # statistics of its model, None if nothing was measured
    origin: str  # what the user called the mask

    @cached_property
    def facts(self) -> list[tuple[str, str]]:
        """The analysis in short, as names and values."""
        model = [] if self.analysis.model is None else [("model", self.analysis.model)]
        measured = [] if self.measured is None else _describe_measured(self.measured)
        return [*model, ("mask", self.origin), *describe_mask(self.analysis), *measured]

    def to_dict(self) -> dict[str, Any]:
        """The numbers as JSON-ready data."""
        measured = None if self.measured is None else self.measured.to_dict()
        return {**self.analysis.to_dict(), "measured": measured}

    def write(self, out: Path) -> Path:
        """Write a page that opens offline, and the numbers, into a folder, whole or not; return the page.

        LeanKError if the folder already holds something; OSError if it cannot be written.
        """
        check_writable(out)
        title = f"Analysis of {self.analysis.model or Path(self.origin).name}"
        measured = [] if self.measured is None else _list_measured_sections(self.mask, self.measured)
        sections = [*list_mask_sections(self.mask, self.analysis), *measured]
        page = render_page(title, self.facts, [section.to_html() for section in sections])
        with staged_folder(out, overwrite=False) as partial:
            write_atomically(partial / _PAGE_NAME, page.encode())
            numbers = json.dumps(self.to_dict(), indent=1)
            write_atomically(partial / "analysis.json", f"{numbers}\n".encode())
        return out / _PAGE_NAME

    def to_text(self) -> str:
        """The facts, then tables by RoPE pair and by layer."""
        analysis, facts = self.analysis, self.facts
        lines = listing(facts)
        named = {outlier.pair for outlier in analysis.outliers}
        lines += ["", "pair  kept (%)" + ("; * marks an outlier" if named else "")]
        for start in range(0, len(analysis.kept_by_pair), _PAIRS_PER_LINE):
            cells = (
                f"{100 * share:>6.1f}{'*' if pair in named else ' '}"
                for pair, share in enumerate(analysis.kept_by_pair[start : start + _PAIRS_PER_LINE], start)
            )
            lines.append(f"{start:>4}  {''.join(cells)}".rstrip())
        digits = max(5, len(str(analysis.head_dim)))
        rows = [("layer", "kept (%)", "width 0", "widths by head")]
        for layer, (share, empty, widths) in enumerate(
            zip(analysis.kept_by_layer, analysis.empty_by_layer, analysis.widths, strict=True)
        ):
            of_heads = "".join(f"{width:<{digits}}" for width in widths)
            rows.append((f"{layer:>5}", f"{100 * share:>8.1f}", f"{empty:>7}", of_heads))
        return "\n".join([*lines, "", *listing(rows)]) + "\n"


def check_writable(out: Path) -> None:
    """Refuse a folder that already holds something, or cannot be one; raises LeanKError."""
    if check_folder(out).exists() and any(out.iterdir()):
        raise LeanKError(f"`{out}` already exists", hint="name another folder by `--out`, or remove this one")
    check_replaceable(out, overwrite=False)


def _describe_measured(measured: Measurement) -> Iterator[tuple[str, str]]:
    lengths = ", ".join(f"{length:,}" for length in measured.lengths)
    prompts = f"{', '.join(measured.tasks)} at {lengths} tokens"
    centred = "; keys less their mean" if measured.centred else ""
    yield "measured on", f"{prompts}, {measured.num_samples} of each{centred}"
    for name, table in (("tasks", measured.between_tasks), ("lengths", measured.between_lengths)):
        others = [value for row, values in enumerate(table) for value in values[:row]]
        if others:
            text = f"Pearson correlation of channel norms {min(others):.3f} to {max(others):.3f}"
            yield f"between {name}", text
    means = {"of width 0": measured.ratio_of_empty, "with channels": measured.ratio_of_others}
    told = [f"{mean:.3f} of heads {name}" for name, mean in means.items() if mean is not None]
    yield "high frequencies", f"mean ratio {', '.join(told) or '-, as no layer is rotated'}"


def _list_measured_sections(mask: ChannelMask, measured: Measurement) -> list[Section]:
    names = [f"{length:,}" for length in measured.lengths]
    ratios, title = measured.high_frequency_ratio, "High-frequency ratio by head"
    top = max(1.0, float(ratios.nan_to_num().max()))
    return [
        Section(
            "Are the same channels large everywhere?",
            "staticity",
            lambda: panels(
                0.5 * max(len(measured.tasks), len(names)) + 1.2,
                (figures.draw_correlation, measured.between_tasks, measured.tasks, "Between tasks"),
                (figures.draw_correlation, measured.between_lengths, names, "Between lengths (tokens)"),
            ),
            "Pearson correlation of the channels' norm ratios over all layers and heads: a channel's part in "
            "the products of the last 32 queries with all keys. Near 1, one mask can serve all.",
        ),
        Section(
            "High frequencies",
            "frequencies",
            lambda: panels(
                rows_height(len(mask.channel_mask)),
                (figures.draw_by_head, ratios, title, "high-frequency ratio", top),
                (figures.draw_ratio_by_width, ratios, mask.channel_mask.sum(-1)),
            ),
            "The norm of a head's attention logits from the faster half of the RoPE pairs alone, against "
            "that of all. By the paper, heads with a high ratio look at what is near and matter little far "
            "away.",
        ),
    ]
