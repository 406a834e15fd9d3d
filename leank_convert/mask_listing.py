"""Listing of the packaged masks: of which model, how much they prune, by whom made, how evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leank_convert.mask import load_mask
from leank_convert.masks import list_masks, percent
from leank_convert.tables import listing

_EXPLANATION = """
pruned: the percent of the model's K channels that was asked to go, and what is
gone.
windows: first tokens and last tokens that keep all channels.
testbed: the toy in the package; its figures say nothing of other models.

`leank-convert export MODEL -o OUT` takes the mask of MODEL. `--pruning-ratio`
picks one of several, with `--value-pruning-ratio` one that prunes V, too;
`--mask` takes one by its name.
`leank-convert inspect NAME` shows all that is known of a mask.
"""
_TOLD = ("model", "sink_size", "recent_size", "flush_size", "source", "evaluated")


def render_masks(*, as_json: bool = False) -> str:
    """Render the packaged masks: a table for people, or a JSON list; LeanKError if a file is damaged."""
    listed = [_describe(path) for path in list_masks()]
    if as_json:
        return json.dumps(listed)
    rows: list[tuple[str, ...]] = [("mask", "pruned", "windows", "made by")]
    for mask in listed:
        pruned = f"{100 * mask['pruning_ratio_asked']:g}%: {mask['pruning_ratio']:.1%}"
        rows.append((mask["name"], pruned, f"{mask['sink_size']}, {mask['recent_size']}", mask["made_by"]))
        if removed := mask["value_pruning_ratio"]:
            rows.append((f"V pruned, too: {removed:.1%}",))
        rows += [(f"model: {mask['model']}",), (f"evaluated: {mask['evaluated']}",)]
    return "\n".join(listing(rows)) + "\n" + _EXPLANATION


def _describe(path: Path) -> dict[str, Any]:
    mask = load_mask(path)
    known = mask.provenance
    assert known is not None  # every packaged mask has it
    return {
        "name": path.stem,
        "pruning_ratio_asked": float(percent(path)) / 100,  # the ratio that picks it
        "pruning_ratio": mask.pruning_ratio,
        "value_pruning_ratio": 0.0 if mask.value_widths is None else mask.value_pruning_ratio,
        "made_by": known.maker,
        **{key: getattr(known, key) for key in _TOLD},
    }
