"""Recipes derived from a model's shape and a device's memory, by the rules in docs/training.md."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml

from leank_convert.device import choose_device
from leank_convert.errors import LeanKError, RecipeError, cut
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import DERIVED, parse_recipe
from leank_convert.train.model import ModelFiles, count_bytes, open_model
from leank_convert.windows import derive_windows

PRUNING_RATIO = 0.7
# As SmolLM2-135M-Instruct was trained.
_SCHEDULE: Mapping[str, Any] = {
    "stage1": {"steps": 600, "learning_rate": 0.02, "l1_weight": 0.1},
    "stage2": {"steps": 100, "learning_rate": 0.002, "validation_contexts": 8},
}
_QUESTIONS = 4
_CPU_SCHEDULE: Mapping[str, Any] = {
    "stage1": {"steps": 280, "learning_rate": 0.04, "l1_weight": 0.1},
    "stage2": {"steps": 40, "learning_rate": 0.004, "validation_contexts": 4},
    "values": {"steps": 80, "learning_rate": 0.04, "l1_weight": 0.2},
}
_CPU_LENGTH = 2048

_LEAST_POSITIONS = 2048
_LEAST_LENGTH = 1024  # of a sample of so many questions; the shortest that there is has about 700 tokens
# Of a GPU's free memory; the rest is for what the allocator cannot use, and for what was not counted.
_USABLE = 0.9
_SHORTENED = 16  # steps in which contexts are shortened, to a quarter
# What no key contradicts: to read `--set` and flags before the model is known.
_BLANK = "{windows: {sink_size: 0, recent_size: 0}, data: {min_length: 1, max_length: 16777216}}"


def derive_recipe(
    model: str | Path,
    overrides: Sequence[str] = (),
    *,
    flags: Mapping[str, object] = MappingProxyType({}),
    device: str | torch.device | None = None,
) -> Recipe:
    """Derive a recipe for a model and a device, with overrides and flags as `load_recipe` takes them.

    LeanKError if the model cannot be found, read or converted, or has too few positions; also as
    `load_recipe`.
    """
    name = f"derived for {model}"
    chosen = choose_device(device)
    given = parse_recipe(name, _BLANK, overrides, flags=flags, training=True)  # before a model is fetched
    files = open_model(model, given.model)
    positions = files.facts.max_position_embeddings
    if positions < _LEAST_POSITIONS:
        raise LeanKError(
            f"model `{files.name}` has {positions} positions (`max_position_embeddings`): too few to "
            "derive a recipe from",
            hint="write one, with windows that leave something to prune, and name it with `--recipe FILE`",
        )
    room = _find_room(chosen)
    first = None
    for candidate in _propose(files, chosen):
        text = _write(files, candidate, chosen, room)
        try:
            found = parse_recipe(name, text, overrides, flags=flags, training=True)
        except RecipeError:
            if first is None:
                raise
            continue  # it is shorter than an override allows
        first = first or found
        if room is None or count_bytes(files, found, chosen)["total"] <= room:
            return found
    assert first is not None
    return first


def _propose(files: ModelFiles, device: torch.device) -> Iterator[dict[str, Any]]:
    """What would be best, then what needs less and less memory."""
    positions, head_dim = files.facts.max_position_embeddings, files.facts.head_dim
    windows = derive_windows(positions)
    if positions >= 131072:
        shortest, longest = 16384, 98304  # the paper's, for Llama-3.1-8B
    elif positions >= 32768:
        shortest, longest = 4096, 32768  # the paper's, for Qwen2.5-7B
    else:
        shortest, longest = max(_LEAST_LENGTH, positions // 8), positions - positions // 16
    if device.type != "cuda":
        longest = min(longest, max(_CPU_LENGTH, 4 * (windows.sink_size + windows.recent_size)))
    for offload in (False, True):
        for part in range(_SHORTENED, _SHORTENED // 4 - 1, -1):
            length = longest * part // _SHORTENED
            yield {
                "model": {"id": files.name},
                "windows": windows.sizes,
                "pruning_ratio": PRUNING_RATIO,
                # A quarter of head_dim for the usual ones; the decode kernel works on 16 channels at a time.
                "width_multiple": gcd(32 if head_dim >= 128 else min(16, max(1, head_dim // 4)), head_dim),
                "rounding": "budget",
                "data": {
                    "tasks": ["retrieval", "multi_value"],
                    "min_length": min(shortest, length // 2),
                    "max_length": length,
                    "questions_per_context": _QUESTIONS,
                },
                **(_SCHEDULE if device.type == "cuda" else _CPU_SCHEDULE),
                "offload_context": offload,
            }


def _find_room(device: torch.device) -> int | None:
    """Bytes that training may fill on a GPU; None on a device that is not judged."""
    if device.type != "cuda":
        return None
    # Processes that train together have to derive the same, and each takes from what the others see free.
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return int(_USABLE * torch.cuda.get_device_properties(device).total_memory)
    return int(_USABLE * torch.cuda.mem_get_info(device)[0])


def _write(files: ModelFiles, document: Mapping[str, Any], device: torch.device, room: int | None) -> str:
    facts = files.facts
    where = (
        str(device) if room is None else f"{torch.cuda.get_device_name(device)}, {room / 1e9:.1f} GB usable"
    )
    shape = (
        f"{facts.num_hidden_layers} layers, {facts.num_key_value_heads} KV heads of {facts.head_dim} channels"
    )
    origin = "is SmolLM2-135M-Instruct's" if device.type == "cuda" else "is a short one, as for a CPU"
    opening = (
        f"{cut(files.name)}, which has no packaged recipe. NOT EVALUATED on this model.",
        "",
        f"  from   {facts.model_type}: {shape}, {facts.max_position_embeddings} positions",
        f"  for    {where}",
        "  rules  windows and lengths from the positions, width_multiple from the channels, lengths and",
        f"         offload_context from the memory; the schedule {origin}",
        "",
        "Measure what it gives by `leank-convert evaluate OUT`; repeat it by `--recipe` and this file.",
    )
    comment = "\n# ".join(opening).replace("# \n", "#\n")
    return f"{DERIVED}{comment}\n\n{yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)}"
