"""Files beside a model's weights: the mask's, and a LoRA adapter's, which is made for one order of heads."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

MASK_FILE = "channel_mask.safetensors"
_HUB_OPTIONS = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
OTHER_HEADS = (
    "KV heads are in another order, or V in another basis, than in the model that an adapter was made for; "
    "convert it by `leank-convert adapter ADAPTER --checkpoint CHECKPOINT -o NEW`, with "
    "`--trained-on-checkpoint` if it was trained on that"
)


def find_mask_file(source: str, config: PreTrainedConfig, options: Mapping[str, Any]) -> Path | None:
    """Find the file that a config's `leank` block names in a folder or a repository; None if it is not there.

    `options` are as in `find_file`, and so is what is returned.
    """
    if (commit := getattr(config, "_commit_hash", None)) is not None:
        options = {**options, "revision": commit}  # whatever is uploaded while the weights are loaded
    return find_file(source, MASK_FILE, options) if source and _digest(config.leank) else None


def find_file(source: str, name: str, options: Mapping[str, Any]) -> Path | None:
    """Find a file in a folder or a repository; None if it is not there.

    `options` are arguments of `from_pretrained`, of which those of the hub are taken. The path stays right
    where the process goes to another folder.
    """
    given = {key: value for key, value in options.items() if key in _HUB_OPTIONS and value is not None}
    try:
        found = cached_file(source, name, **given)
    except (OSError, ValueError):  # the latter of what is no repository's id
        return None
    return None if found is None else Path(found).absolute()


def is_mask_file(path: Path, block: Mapping[str, Any]) -> bool:
    """Return whether a path is still the file that a `leank` block names."""
    return path.is_file() and bool(hashlib.sha256(path.read_bytes()).hexdigest() == _digest(block))


def carry_mask_file(found: Path | None, block: Mapping[str, Any], folder: Path) -> bool:
    """Copy the file that a `leank` block names to another folder; return whether it is there."""
    if found is None or not is_mask_file(found, block):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / MASK_FILE
    if not copy.exists() or not copy.samefile(found):
        shutil.copyfile(found, copy)
    return True


def _digest(block: Mapping[str, Any]) -> Any:
    return block.get("files", {}).get(MASK_FILE)


def fits_heads(adapter: object, leank: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether an adapter changes the heads that it was trained on, in the directions that it was.

    That of the original does if no head has moved and V is in its own basis. One that `leank-convert adapter`
    made does for the order and the basis of one block. `adapter` is a folder, a repository, or what else
    `load_adapter` was given, `options` its other arguments.
    """
    orders = [list(order) for order in leank["head_permutation"]]
    is_folded = "value_widths" in leank and "value_basis" not in leank
    mask = leank.get("files", {}).get(MASK_FILE, "") if is_folded else None
    is_original = mask is None and all(order == sorted(order) for order in orders)
    found = find_file(str(adapter), _ADAPTER_WEIGHTS, options) if isinstance(adapter, str | Path) else None
    if found is None:
        return is_original
    try:
        with safe_open(found, "pt") as file:
            if "leank" not in (metadata := file.metadata() or {}):
                return is_original
            made_for = json.loads(metadata["leank"])
            return bool(made_for["head_permutation"] == orders and made_for.get("mask") == mask)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return is_original  # PEFT says what is wrong with it
