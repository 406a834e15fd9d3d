"""Checks of a checkpoint: against itself, and against the model it was made from.

Nothing is loaded into a model. Weights are compared as bytes, a few megabytes at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    INDEX_NAME,
    Checkpoint,
    open_checkpoint,
    read_leank_config,
    read_leank_facts,
)
from leank_convert.errors import LeanKError
from leank_convert.export.config_json import FORMAT_VERSION, LEANK_KEYS, check_head_table
from leank_convert.export.plan import TensorEdit, check_unedited, plan_layer
from leank_convert.export.runtime_files import auto_map
from leank_convert.hub import resolve_model
from leank_convert.mask import MASK_FILE_NAME, check_mask_fits, load_mask
from leank_convert.safetensors_file import SafetensorsHeader
from leank_convert.verify.checks import Checks, Report
from leank_convert.windows import Windows

_BUFFER_BYTES = 8 << 20


def verify_weights(path: str | Path, source: str | Path | None) -> Report:
    """Check a checkpoint's digests, headers, shapes and masks, and its weights against their source.

    Args:
        path: The checkpoint's folder.
        source: The model it was made from, a folder or a hub id. Without it weights are not read.

    Raises:
        LeanKError: If `path` is no LeanK checkpoint, or `source` is no complete model.
    """
    folder = Path(path)
    config, leank = read_leank_config(folder)
    original = None if source is None else open_checkpoint(resolve_model(source))
    checks = Checks()
    holds = checks.holds
    sound = holds("config", lambda: _check_config(config, leank, folder))
    files = leank.get("files")
    checks.digests(folder, files if isinstance(files, dict) else {}, listed_in=CONFIG_NAME)
    sound &= holds("headers and index", lambda: _check_headers(folder))
    if sound:
        checkpoint = open_checkpoint(folder)
        facts = read_leank_facts(config, folder)
        sound = holds("tensor shapes", lambda: _check_shapes(checkpoint, facts))
        sound &= holds("channel masks", lambda: _check_channel_masks(checkpoint, facts, leank))
        holds("mask file", lambda: _check_mask_file(checkpoint, facts, leank))
        holds("header metadata", lambda: _check_metadata(checkpoint, leank))
        if original is not None and sound:
            _check_weights(checkpoint, original, facts, leank, holds)
    return checks.report(path, source)


def _check_config(config: Mapping[str, Any], leank: Mapping[str, Any], folder: Path) -> str:
    if leank.get("format_version") != FORMAT_VERSION:
        raise LeanKError(
            f"`leank.format_version` is {leank.get('format_version')}; this release knows {FORMAT_VERSION}"
        )
    if set(leank) != set(LEANK_KEYS):
        difference = sorted(set(leank) ^ set(LEANK_KEYS))
        raise LeanKError(f"the `leank` block has missing or unknown keys: {', '.join(difference)}")
    facts = read_leank_facts(config, folder)
    if config.get("auto_map") != auto_map(facts.architecture):
        raise LeanKError(f"`auto_map` is {config.get('auto_map')}")
    Windows(*(leank[key] for key in ("sink_size", "recent_size", "flush_size", "prune")))
    widths, permutations = leank["widths"], leank["head_permutation"]
    heads = range(facts.num_key_value_heads)
    for key in ("widths", "head_permutation"):
        check_head_table(leank, key, facts.num_hidden_layers, len(heads))
    for layer, (row, permutation) in enumerate(zip(widths, permutations, strict=True)):
        if row != sorted(row) or row[0] < 0 or row[-1] > facts.head_dim:
            raise LeanKError(f"`leank.widths[{layer}]` is {row}, not ascending within 0 and {facts.head_dim}")
        if sorted(permutation) != list(heads):
            raise LeanKError(f"`leank.head_permutation[{layer}]` is {permutation}, no permutation")
        # Stable: heads of one width keep the order they had.
        if any(a == b and i > j for (a, i), (b, j) in pairwise(zip(row, permutation, strict=True))):
            raise LeanKError(
                f"`leank.head_permutation[{layer}]` is {permutation}, not stable within a bucket"
            )
    reached = 1 - sum(map(sum, widths)) / (facts.num_hidden_layers * len(heads) * facts.head_dim)
    given = leank["pruning_ratio"]
    if not isinstance(given, int | float) or not math.isclose(reached, given, abs_tol=1e-9):
        raise LeanKError(f"`leank.pruning_ratio` is {given}; the widths give {reached}")
    if not isinstance(leank["files"], dict) or MASK_FILE_NAME not in leank["files"]:
        raise LeanKError(f"`leank.files` does not name `{MASK_FILE_NAME}`")
    return f"{config['model_type']}, pruning ratio {reached:.4f}"


def _check_headers(folder: Path) -> str:
    checkpoint = open_checkpoint(folder)
    index = checkpoint.index
    if index is not None:
        total, named = (index.get("metadata") or {}).get("total_size"), index["weight_map"].keys()
        held = {tensor for header in checkpoint.shards.values() for tensor in header.tensors}
        if total != checkpoint.num_data_bytes:
            raise LeanKError(
                f"`{INDEX_NAME}`: `total_size` is {total}; the shards hold {checkpoint.num_data_bytes} bytes"
            )
        if unnamed := sorted(held - named):
            raise LeanKError(f"`{INDEX_NAME}` does not name tensor `{unnamed[0]}`")
    return f"{len(checkpoint.shards)} files, {checkpoint.num_data_bytes} bytes of tensors"


def _check_shapes(checkpoint: Checkpoint, facts: ModelFacts) -> str:
    check_unedited(checkpoint, facts)
    for layer in range(facts.num_hidden_layers):
        plan_layer(checkpoint, facts, layer, tuple(range(facts.num_key_value_heads)))
    return f"{facts.num_hidden_layers} layers"


def _check_channel_masks(checkpoint: Checkpoint, facts: ModelFacts, leank: Mapping[str, Any]) -> str:
    for layer, row in enumerate(leank["widths"]):
        mask = _read_channel_mask(checkpoint, facts, layer)
        found = mask.sum(-1).tolist()
        if found != row:
            raise LeanKError(
                f"layer {layer}: `channel_mask` keeps {found} channels, `leank.widths` says {row}"
            )
    return f"{len(leank['widths'])} layers, widths as in config.json"


def _read_channel_mask(checkpoint: Checkpoint, facts: ModelFacts, layer: int) -> Tensor:
    name = facts.architecture.attention_tensor(layer, "channel_mask")
    shard = checkpoint.shard_of(name)
    if shard is None:
        raise LeanKError(f"tensor `{name}` is missing")
    header = checkpoint.shards[shard]
    info = header.tensors[name]
    if info.dtype != "BOOL" or info.shape != (facts.num_key_value_heads, facts.head_dim):
        raise LeanKError(f"tensor `{name}` is {info.dtype} {list(info.shape)}")
    if shard != checkpoint.shard_of(facts.architecture.attention_tensor(layer, "q_proj.weight")):
        raise LeanKError(f"tensor `{name}` is in `{shard}`, not in the file of its layer's q_proj")
    with header.path.open("rb") as file:
        values = _read(file, header.data_start + info.start, info.num_bytes)
    if values.max() > 1:
        raise LeanKError(f"tensor `{name}` holds bytes that are neither 0 nor 1")
    return torch.from_numpy(values.copy()).bool().view(info.shape)


def _check_mask_file(checkpoint: Checkpoint, facts: ModelFacts, leank: Mapping[str, Any]) -> str:
    path = checkpoint.folder / MASK_FILE_NAME
    mask = load_mask(path)
    check_mask_fits(mask, facts, mask_origin=str(path), model_origin=str(checkpoint.folder))
    for layer, permutation in enumerate(leank["head_permutation"]):
        if not mask.channel_mask[layer][permutation].equal(_read_channel_mask(checkpoint, facts, layer)):
            raise LeanKError(f"`{path}`: layer {layer} is not the `channel_mask` of the checkpoint's layer")
    return "the same channels, in the original head order"


def _check_metadata(checkpoint: Checkpoint, leank: Mapping[str, Any]) -> str:
    expected = {key: value for key, value in leank.items() if key != "files"}
    without = []
    for name, header in checkpoint.shards.items():
        if header.metadata.get("format") != "pt":
            raise LeanKError(f"`{name}`: its header metadata lacks `format`: `pt`")
        if "leank" not in header.metadata:
            without.append(name)
            continue
        try:
            found = json.loads(header.metadata["leank"])
        except ValueError:
            found = None
        if found != expected:
            raise LeanKError(f"`{name}`: its header metadata is not the `leank` block of config.json")
    if without:
        # What transformers' save_pretrained writes; config.json says it all.
        return f"none in `{without[0]}`" + (f" and {len(without) - 1} more" if without[1:] else "")
    return "every shard carries the facts of config.json"


def _check_weights(
    checkpoint: Checkpoint,
    original: Checkpoint,
    facts: ModelFacts,
    leank: Mapping[str, Any],
    holds: Callable[[str, Callable[[], str]], bool],
) -> None:
    edits: dict[str, TensorEdit] = {}

    def same_tensors() -> str:
        for layer, permutation in enumerate(leank["head_permutation"]):
            edits.update(
                (edit.tensor, edit) for edit in plan_layer(original, facts, layer, tuple(permutation))
            )
        masks = {
            facts.architecture.attention_tensor(layer, "channel_mask")
            for layer in range(facts.num_hidden_layers)
        }
        for name in original.shards.keys() ^ checkpoint.shards.keys():
            raise LeanKError(f"`{name}` is not a file of both folders")
        for name, header in original.shards.items():
            other = checkpoint.shards[name]
            if difference := sorted((other.tensors.keys() - masks) ^ header.tensors.keys()):
                raise LeanKError(f"`{name}`: tensor `{difference[0]}` is not in both folders' file")
            for tensor, info in header.tensors.items():
                found = other.tensors[tensor]
                if (found.dtype, found.shape) != (info.dtype, info.shape):
                    raise LeanKError(
                        f"tensor `{tensor}` is {found.dtype} {list(found.shape)}; "
                        f"its source is {info.dtype} {list(info.shape)}"
                    )
        return f"{sum(len(header.tensors) for header in original.shards.values())} tensors in the same files"

    if not holds("source: tensors", same_tensors):
        return
    for name, header in original.shards.items():
        holds(f"source: {name}", partial(_compare_shard, header, checkpoint.shards[name], edits))


def _compare_shard(
    source: SafetensorsHeader, written: SafetensorsHeader, edits: Mapping[str, TensorEdit]
) -> str:
    permuted = 0
    with source.path.open("rb") as reader, written.path.open("rb") as other:
        for name, info in source.tensors.items():
            edit = edits.get(name)
            found = written.data_start + written.tensors[name].start
            # A tensor is [runs, blocks, bytes]: rows are blocks of one run, columns are one run per row.
            runs = 1 if edit is None or edit.dim == 0 else info.shape[0]
            order = (0,) if edit is None else edit.permutation
            block = info.num_bytes // (runs * len(order))
            if not _equal_blocks(
                (reader, source.data_start + info.start), (other, found), runs, order, block
            ):
                claim = "is not the permutation of" if edit else "differs from"
                raise LeanKError(f"tensor `{name}` {claim} its source")
            permuted += edit is not None
    return f"{permuted} tensors permuted, {len(source.tensors) - permuted} byte for byte the same"


def _equal_blocks(
    source: tuple[BinaryIO, int],
    written: tuple[BinaryIO, int],
    runs: int,
    order: tuple[int, ...],
    block: int,
) -> bool:
    if block * len(order) > _BUFFER_BYTES:
        pairs = (
            (source[1] + (run * len(order) + old) * block, written[1] + (run * len(order) + new) * block)
            for run in range(runs)
            for new, old in enumerate(order)
        )
        return all(_equal_bytes(source[0], start, written[0], other, block) for start, other in pairs)
    run_bytes = block * len(order)
    runs_at_once = max(1, _BUFFER_BYTES // max(1, run_bytes))
    for first in range(0, runs, runs_at_once):
        count = min(runs_at_once, runs - first)
        before, after = (
            _read(file, start + first * run_bytes, count * run_bytes).reshape(count, len(order), block)
            for file, start in (source, written)
        )
        if not np.array_equal(before[:, list(order)], after):
            return False
    return True


def _equal_bytes(source: BinaryIO, start: int, written: BinaryIO, other: int, count: int) -> bool:
    for first in range(0, count, _BUFFER_BYTES):
        size = min(_BUFFER_BYTES, count - first)
        if not np.array_equal(_read(source, start + first, size), _read(written, other + first, size)):
            return False
    return True


def _read(file: BinaryIO, start: int, count: int) -> NDArray[np.uint8]:
    file.seek(start)
    return np.frombuffer(file.read(count), dtype=np.uint8)
