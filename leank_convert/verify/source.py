"""Checks of a checkpoint against the model that it was made from: tensors, config.json, companions.

Nothing is loaded into a model. Weights are compared as bytes, where their files are mapped into memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

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
from leank_convert.errors import LeanKError, cut, first_line
from leank_convert.export.companions import find_tokenizer_class, has_tokenizer, names_class
from leank_convert.export.fold import is_folded
from leank_convert.export.plan import TensorEdit, plan_edits
from leank_convert.families import Architecture
from leank_convert.files import read_json_if_there, sha256_of
from leank_convert.kv_scales import name_scale_tensors
from leank_convert.leank_block import VALUE_BASIS_KEY, VALUE_WIDTHS_KEY
from leank_convert.mask import MASK_FILE_NAME, load_mask
from leank_convert.safetensors_file import SafetensorsHeader
from leank_convert.trust import check_code
from leank_convert.value_weights import check_values_belong, is_folded_into
from leank_convert.verify.checks import Checks

# Keys of config.json that an export changes on purpose, and what transformers notes down when it saves one.
_CHANGED_KEYS = {"model_type", "architectures", "auto_map", "leank"}
_NOTED_KEYS = {"transformers_version", "_name_or_path"}


def compare_with_source(
    checks: Checks, checkpoint: Checkpoint, original: Checkpoint, facts: ModelFacts, leank: Mapping[str, Any]
) -> None:
    """Compare everything that a checkpoint, which agrees with itself, takes over from its source."""
    holds = checks.holds
    edits = checks.value("source: tensors", lambda: _compare_headers(checkpoint, original, facts, leank))
    if edits is not None:
        for name, header in original.shards.items():
            holds(f"source: {name}", partial(_compare_shard, header, checkpoint, edits))
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
    found, expected = (read_json_if_there(holder / TOKENIZER_CONFIG_NAME) for holder in (folder, source))
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


def _compare_headers(
    checkpoint: Checkpoint, original: Checkpoint, facts: ModelFacts, leank: Mapping[str, Any]
) -> tuple[dict[str, TensorEdit], str]:
    """Compare which tensors there are, and in which files; gives the edits that an export makes."""
    basis = None
    if VALUE_WIDTHS_KEY in leank:
        path = checkpoint.folder / MASK_FILE_NAME
        mask = load_mask(path)
        basis, known = mask.value_basis, mask.provenance
        if known is not None:
            origins = {"mask_origin": str(path), "model_origin": str(original.folder)}
            # Where no weights are named, the tensors will tell whether these are the source.
            check_values_belong(known, original, facts, name=known.model, **origins)
        if is_folded_into(original, facts) == (VALUE_BASIS_KEY in leank):
            is_there, folds = ("there", "folds") if VALUE_BASIS_KEY in leank else ("missing", "cannot fold")
            raise LeanKError(
                f"`{checkpoint.folder / CONFIG_NAME}`: `leank.{VALUE_BASIS_KEY}` is {is_there}, and an "
                f"export of this source {folds} the basis of V into its weights"
            )
    edits = plan_edits(original, facts, leank["head_permutation"], basis)
    is_scaled = leank.get("kv_scales") is not None
    added = {name for layer in name_scale_tensors(facts) for name in layer if is_scaled}
    # By name: whoever saves a checkpoint anew may deal tensors to files in another way.
    ours, theirs = (
        {name: info for header in folder.shards.values() for name, info in header.tensors.items()}
        for folder in (original, checkpoint)
    )
    if difference := sorted((theirs.keys() - added) ^ ours.keys()):
        raise LeanKError(f"tensor `{difference[0]}` is not in both folders")
    for name, info in ours.items():
        found = theirs[name]
        if (found.dtype, found.shape) != (info.dtype, info.shape):
            raise LeanKError(
                f"tensor `{name}` is {found.dtype} {list(found.shape)}; its source is {info.dtype} "
                f"{list(info.shape)}"
            )
    return edits, f"{len(ours)} tensors as the source has them"


def _compare_shard(source: SafetensorsHeader, written: Checkpoint, edits: Mapping[str, TensorEdit]) -> str:
    permuted, folded = 0, 0
    ours: Any = safe_open(source.path, "pt")
    others: dict[str, Any] = {name: safe_open(header.path, "pt") for name, header in written.shards.items()}
    for name, tensor in source.tensors.items():
        edit, holder = edits.get(name), others[str(written.shard_of(name))]
        try:
            same = _equal(ours.get_tensor(tensor.stored_name or name), holder.get_tensor(name), edit)
        except SafetensorError as error:  # of a dtype that torch has not
            raise LeanKError(f"tensor `{name}` cannot be compared: {first_line(error)}") from error
        if not same:
            claim = "is not the permutation of" if edit else "differs from"
            if edit and edit.bases:
                claim = "is not the fold of the mask's basis of V into"
            raise LeanKError(f"tensor `{name}` {claim} its source")
        permuted += edit is not None
        folded += edit is not None and edit.bases is not None
    of_them = f", a basis of V folded into {folded} of them" if folded else ""
    return f"{permuted} tensors permuted{of_them}, {len(source.tensors) - permuted} byte for byte the same"


def _equal(source: Tensor, written: Tensor, edit: TensorEdit | None) -> bool:
    """Whether one tensor has the bytes of another, or their fold, its blocks in the order of the edit."""
    if edit is not None and edit.bases is not None:
        ours, theirs = (tensor.chunk(len(edit.permutation), edit.dim) for tensor in (source, written))
        return all(
            torch.equal(ours[old].view(torch.uint8), theirs[new].view(torch.uint8))
            if (basis := edit.bases[old]) is None
            else is_folded(_matrix(ours[old]), _matrix(theirs[new]), basis, edit.dim)
            for new, old in enumerate(edit.permutation)
        )
    # A tensor is [runs, blocks, bytes]: rows are blocks of one run, columns are one run per row.
    order = (0,) if edit is None else edit.permutation
    runs = 1 if edit is None else edit.count_runs(source.shape)
    before, after = (
        tensor.flatten().view(torch.uint8).view(runs, len(order), tensor.nbytes // (runs * len(order)))
        for tensor in (source, written)
    )
    return all(torch.equal(before[:, old], after[:, new]) for new, old in enumerate(order))


def _matrix(tensor: Tensor) -> Tensor:
    """A weight as it is, a bias as a column."""
    return tensor if tensor.ndim == 2 else tensor[:, None]
