"""Listing of the packaged masks: of which model, how much they prune, by whom made, how evaluated."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass

from leank_convert.errors import LeanKError
from leank_convert.mask import load_mask
from leank_convert.masks import list_masks, percent

_EXPLANATION = """
pruned: the percent of the model's K channels that was asked to go, and what is gone.
windows: first tokens and last tokens that keep all channels.
testbed: the toy that ships with the package; its figures say nothing of other models.

`leank-convert export MODEL -o OUT` takes the mask of MODEL; `--pruning-ratio` picks one of several, `--mask`
takes one by its name. `leank-convert inspect NAME` shows all that is known of it.
"""


@dataclass(frozen=True)
class ListedMask:
    """A packaged mask in brief.

    Attributes:
        name: What `--mask` takes.
        model: Hub id, or `testbed`.
        pruning_ratio_asked: The ratio that picks it.
        pruning_ratio: The fraction of channels that it removes.
        sink_size: First tokens that keep every channel.
        recent_size: Last tokens that keep every channel.
        flush_size: Tokens pruned at once.
        made_by: Who made it.
        source: Where it was published, under what copyright and licence; None for the project's own.
        evaluated: How it was evaluated.
    """

    name: str
    model: str
    pruning_ratio_asked: float
    pruning_ratio: float
    sink_size: int
    recent_size: int
    flush_size: int
    made_by: str
    source: str | None
    evaluated: str


def describe_masks() -> list[ListedMask]:
    """Read what the listing shows of every packaged mask.

    Raises:
        LeanKError: If a file is damaged.
    """
    listed = []
    for path in list_masks():
        mask = load_mask(path)
        known = mask.provenance
        if known is None:
            raise LeanKError(f"mask `{path}` does not say what model it is for")
        listed.append(
            ListedMask(
                name=path.stem,
                model=known.model,
                pruning_ratio_asked=float(percent(path)) / 100,
                pruning_ratio=mask.pruning_ratio,
                sink_size=known.sink_size,
                recent_size=known.recent_size,
                flush_size=known.flush_size,
                made_by=known.maker,
                source=known.source,
                evaluated=known.evaluated,
            )
        )
    return listed


def render_masks(*, as_json: bool = False) -> str:
    """The packaged masks: a table for people, or a JSON list."""
    listed = describe_masks()
    if as_json:
        return json.dumps([asdict(mask) for mask in listed])
    rows = [("mask", "model", "pruned", "windows", "made by")]
    rows += [
        (
            mask.name,
            mask.model,
            f"{100 * mask.pruning_ratio_asked:g}%: {mask.pruning_ratio:.1%}",
            f"{mask.sink_size}, {mask.recent_size}",
            mask.made_by,
        )
        for mask in listed
    ]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{size}}" for cell, size in zip(row, sizes, strict=True)) for row in rows]
    told = ["", *(_indent(f"evaluated: {mask.evaluated}") for mask in listed)]
    return (
        "\n".join(line.rstrip() + more for line, more in zip(lines, told, strict=True)) + "\n" + _EXPLANATION
    )


def _indent(text: str) -> str:
    """A text below a row, in lines that a terminal has room for."""
    return "\n" + textwrap.fill(text, 110, initial_indent="    ", subsequent_indent="    ")
