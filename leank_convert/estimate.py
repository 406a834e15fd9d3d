"""Estimate for a model that is not converted: the bytes of its cache, dense and pruned.

Arithmetic on its config.json alone; what a mask keeps of V is known when there is one, so V counts whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import CONFIG_NAME, is_onnx_folder
from leank_convert.errors import LeanKError
from leank_convert.files import read_json, user_path
from leank_convert.head_layout import (
    BYTES_PER_ELEMENT,
    BytesPerToken,
    bytes_of,
    count_row_bytes,
    describe_layers,
)
from leank_convert.hub import TESTBED, download_file, is_hub_id, known_name, resolve_model
from leank_convert.recipe_file import load_recipe, packaged_recipe
from leank_convert.text_part import read_text_part
from leank_convert.windows import Windows, derive_windows

# The paper's.
_PRUNING_RATIO = 0.7
_VALUE_PRUNING_RATIO = 0.5  # of V, in a recipe that prunes it
_LENGTHS = (8192, 32768, 131072)

WINDOW_SIZES = ("sink_size", "recent_size", "flush_size")
Row = tuple[str, str]  # a label and its text


def find_config(path: str | Path) -> Path | None:
    """The config.json of what may be a model that is not converted: a folder, the file, a hub id, `testbed`.

    Raises:
        LeanKError: If the hub does not give it, or has a checkpoint of that id.
    """
    if str(path) == TESTBED:
        return resolve_model(TESTBED) / CONFIG_NAME
    named = user_path(path)
    file = named / CONFIG_NAME if named.is_dir() else named
    if file.name == CONFIG_NAME and file.is_file() and not is_onnx_folder(file.parent):
        return None if "leank" in read_json(file) else file
    if named.exists() or not is_hub_id(str(path)):
        return None
    file = download_file(str(path), CONFIG_NAME)
    if "leank" in read_json(file):
        raise LeanKError(
            f"`{path}` on the hub is a LeanK checkpoint already",
            hint=f"download it (`hf download {path} --local-dir DIR`), then inspect the folder",
        )
    return file


def estimate_model(path: str | Path, config_file: Path) -> dict[str, Any]:
    """Describe a model and its cache by its config.json, JSON-ready; LeanKError if it is none of ours."""
    config = read_json(config_file)
    text = read_text_part(config, config_file)
    config = text or config
    facts = read_model_facts(config, origin=str(config_file))
    is_local = str(path) != TESTBED and user_path(path).exists()
    known = known_name(config_file.parent if is_local else path)
    name = None if known is None else packaged_recipe(known)
    ratio, windows = _PRUNING_RATIO, derive_windows(facts.max_position_embeddings)
    if name is not None:
        recipe = load_recipe(name)
        ratio = recipe.pruning_ratio if isinstance(recipe.pruning_ratio, float) else _PRUNING_RATIO
        windows = Windows(**recipe.windows.model_dump())
    element_bytes = bytes_of(facts.dtype)
    part = math.prod(facts.mask_shape) * element_bytes
    pruned = round((1 - ratio) * part)
    cache = BytesPerToken(part, part, pruned, part, part, part)
    positions = facts.max_position_embeddings
    return {
        "kind": "model",
        "path": str(path),
        "model_type": facts.model_type,
        "part_of_larger": text is not None,
        "num_hidden_layers": facts.num_hidden_layers,
        "layers": describe_layers(facts, cache, windows, element_bytes) if facts.is_mixed else None,
        "num_key_value_heads": facts.num_key_value_heads,
        "head_dim": facts.head_dim,
        "positions": positions,
        "recipe": name,
        "pruning_ratio": ratio,
        "windows": windows.sizes,
        "element_bytes": element_bytes,
        "element_bytes_assumed": facts.dtype not in BYTES_PER_ELEMENT,
        "bytes_per_token": {
            "key_dense": part,
            "value_dense": part,
            "key_pruned": pruned,
            "saved": cache.saved,
        },
        "with_values_pruned": None
        if facts.architecture.gated
        else {
            "value_pruning_ratio": _VALUE_PRUNING_RATIO,
            "saved": replace(cache, value_pruned=round((1 - _VALUE_PRUNING_RATIO) * part)).saved,
        },
        "bytes_per_row": {
            str(length): count_row_bytes(facts, cache, windows, length, element_bytes)
            for length in [length for length in _LENGTHS if length <= positions] or [positions]
        },
    }


def list_estimate_rows(facts: Mapping[str, Any]) -> Iterator[Row]:
    """List what `estimate_model` found in rows for a person."""
    cache = facts["bytes_per_token"]
    layers, heads = facts["num_hidden_layers"], facts["num_key_value_heads"]
    yield "model", f"{facts['path']} ({facts['model_type']}), not converted"
    if facts["part_of_larger"]:
        yield "", "the text model of a larger one, which also reads images"
    shape = f"{layers} layers, {heads} KV heads, head_dim {facts['head_dim']}"
    yield "shape", f"{shape}, {facts['positions']:,} positions"
    if facts["layers"]:
        yield "layers", facts["layers"]
    yield "recipe", facts["recipe"] or "none packaged: `train` derives one"
    assumed = " (assumed)" if facts["element_bytes_assumed"] else ""
    yield "bytes per number", f"{facts['element_bytes']}{assumed}"
    windows = ", ".join(f"{key} {size}" for key, size in facts["windows"].items())
    yield "windows", f"{windows}: tokens that keep everything"
    of_layers = ", of layers with full attention" if facts["layers"] else ""
    yield "bytes per token", f"dense K {cache['key_dense']:,}, V {cache['value_dense']:,}{of_layers}"
    pruned = f"at pruning ratio {facts['pruning_ratio']:g} K {cache['key_pruned']:,}, V at most as before"
    yield "", f"{pruned}: at least {cache['saved']:.1%} saved"
    if both := facts["with_values_pruned"]:
        ratio = both["value_pruning_ratio"]
        yield "", f"with V at `value_pruning_ratio` {ratio:g}, too: {both['saved']:.1%} saved"
    for length, row in facts["bytes_per_row"].items():
        dense, pruned = (_write_size(row[side]) for side in ("dense", "pruned"))
        yield f"{int(length):,} tokens", f"dense {dense}, pruned at most {pruned}"


def _write_size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
