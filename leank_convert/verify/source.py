"""Checks of a checkpoint against the model that it was made from: tensors, config.json, companions.

Nothing is loaded into a model. Weights are compared as bytes, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    DIGESTS_NAME,
    TOKENIZER_CONFIG_NAME,
    Checkpoint,
    find_companions,
)
from leank_convert.config_class import complete_config
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.errors import LeanKError, cut
from leank_convert.export.companions import (
    find_tokenizer_class,
    has_tokenizer,
    names_class,
    read_tokenizer_config,
)
from leank_convert.export.plan import TensorEdit, plan_edits
from leank_convert.families import Architecture
from leank_convert.files import sha256_of
from leank_convert.kv_scales import name_scale_tensors
from leank_convert.safetensors_file import SafetensorsHeader
from leank_convert.trust import check_code

_BUFFER_BYTES = 8 << 20
# Keys of config.json that an export changes on purpose, and what transformers notes down when it saves one.
_CHANGED_KEYS = {"model_type", "architectures", "auto_map", "leank"}
_NOTED_KEYS = {"transformers_version", "_name_or_path"}


def compare_with_source(
    checkpoint: Checkpoint,
    original: Checkpoint,
    facts: ModelFacts,
    leank: Mapping[str, Any],
    holds: Callable[[str, Callable[[], str]], bool],
) -> None:
    """Compare everything that a checkpoint takes over from its source.

    Args:
        checkpoint: A checkpoint that agrees with itself.
        original: The model it was made from.
        facts: The checkpoint's.
        leank: The `leank` block of its config.json.
        holds: Makes one check.
    """
    _compare_weights(checkpoint, original, facts, leank, holds)
    holds("source: config", lambda: _compare_config(checkpoint, original, facts.architecture, leank))
    if (checkpoint.folder / DIGESTS_NAME).exists():  # else transformers wrote them anew
        holds("source: companions", lambda: _compare_companions(checkpoint.folder, original.folder))
    holds("runtime files", lambda: _check_runtime(checkpoint.folder))


def _compare_config(
    checkpoint: Checkpoint, original: Checkpoint, architecture: Architecture, leank: Mapping[str, Any]
) -> str:
    overrides = leank["config_overrides"]
    expected = _complete(apply_config_overrides(original.config, overrides), architecture, original)
    found = _complete(checkpoint.config, architecture, checkpoint)
    compared = sorted((expected.keys() | found.keys()) - _CHANGED_KEYS - _NOTED_KEYS)
    for key in compared:
        if expected.get(key) != found.get(key):
            raise LeanKError(
                f"`{checkpoint.folder / CONFIG_NAME}`: `{key}` is {cut(found.get(key))}; by its source it is "
                f"{cut(expected.get(key))}"
            )
    return f"{len(compared)} keys as the source has them" + (
        f", {len(overrides)} overridden" if overrides else ""
    )


def _compare_companions(folder: Path, source: Path) -> str:
    found, expected = find_companions(folder)[0], find_companions(source)[0]
    for name in sorted((found.keys() ^ expected.keys()) - {TOKENIZER_CONFIG_NAME}):
        where = folder if name in found else source
        raise LeanKError(f"`{where / name}` is not in both folders")
    for name, path in found.items():
        if name != TOKENIZER_CONFIG_NAME and sha256_of(path) != sha256_of(expected[name]):
            raise LeanKError(f"`{path}` differs from its source's")
    _compare_tokenizer_config(folder, source)
    return f"{len(found)} files as the source has them"


def _compare_tokenizer_config(folder: Path, source: Path) -> None:
    found, expected = (read_tokenizer_config(holder) for holder in (folder, source))
    named, own = found.get("tokenizer_class"), expected.get("tokenizer_class")
    for key in sorted((found.keys() | expected.keys()) - {"tokenizer_class", "auto_map"}):
        if found.get(key) != expected.get(key):
            raise LeanKError(
                f"`{folder / TOKENIZER_CONFIG_NAME}`: `{key}` is {cut(found.get(key))}; its source's is "
                f"{cut(expected.get(key))}"
            )
    holds = named == own
    # Whether a name was needed, and which, is what transformers makes of the source: of one that has no
    # tokenizer, an empty one of some class.
    if has_tokenizer(find_companions(source)[0]) and not (holds and named is not None):
        with suppress(LeanKError):
            holds = names_class(folder, found, find_tokenizer_class(source))
    if not holds:
        raise LeanKError(
            f"`{folder / TOKENIZER_CONFIG_NAME}`: `tokenizer_class` is {cut(named)}, not that of its source"
        )


def _check_runtime(folder: Path) -> str:
    check_code(folder)
    return "of this release"


def _complete(config: Mapping[str, Any], architecture: Architecture, origin: Checkpoint) -> dict[str, Any]:
    """A config with every default in it, so that one which transformers saved anew compares the same."""
    values = {key: value for key, value in config.items() if key not in _CHANGED_KEYS}
    return complete_config(values, architecture, origin=str(origin.folder / CONFIG_NAME))


def _compare_weights(
    checkpoint: Checkpoint,
    original: Checkpoint,
    facts: ModelFacts,
    leank: Mapping[str, Any],
    holds: Callable[[str, Callable[[], str]], bool],
) -> None:
    edits: dict[str, TensorEdit] = {}

    def same_tensors() -> str:
        edits.update(plan_edits(original, facts, leank["head_permutation"]))
        added: set[str] = set()
        if leank.get("kv_scales") is not None:
            added.update(name for layer in name_scale_tensors(facts) for name in layer)
        for name in original.shards.keys() ^ checkpoint.shards.keys():
            raise LeanKError(f"`{name}` is not a file of both folders")
        for name, header in original.shards.items():
            other = checkpoint.shards[name]
            if difference := sorted((other.tensors.keys() - added) ^ header.tensors.keys()):
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
