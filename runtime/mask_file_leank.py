"""Mask file of a checkpoint: finding it in a folder or on the hub, reading key means, copying it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from .configuration_leank import LeanKSettings

MASK_FILE = "channel_mask.safetensors"
_KEY_MEAN = "key_mean"
_HUB_OPTIONS = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
_HINT = "copy or export the checkpoint again"


def load_key_means(
    config: PreTrainedConfig, settings: LeanKSettings, source: str, options: Mapping[str, Any]
) -> list[torch.Tensor] | None:
    """Read the mean of keys of a checkpoint, by its folder or hub id; None if it has none.

    Of every pruned layer, in the checkpoint's head order `[1, H_kv, D]`, fp32, on the CPU. `options` are
    arguments of `from_pretrained`, of which those of the hub are taken. Raises a ValueError if the file is
    missing or is not the one that was exported, or its tensor makes no sense.
    """
    if not settings.has_key_mean:
        return None
    block: dict[str, Any] = config.leank
    given = {name: value for name, value in options.items() if name in _HUB_OPTIONS and value is not None}
    if (commit := getattr(config, "_commit_hash", None)) is not None:
        given["revision"] = commit  # whatever is uploaded while the weights are loaded
    path = find_mask_file(source, block, given)
    if path is None:
        raise ValueError(
            f"`{source}`: `{MASK_FILE}`, which holds the mean of keys, is missing or not the file that was "
            f"exported; {_HINT}"
        )
    try:
        mean = load(path.read_bytes())[_KEY_MEAN]
    except (KeyError, SafetensorError) as error:
        raise ValueError(f"`{path}` holds no tensor `{_KEY_MEAN}` that can be read; {_HINT}") from error
    shape = tuple(settings.channel_masks.shape)
    if mean.dtype != torch.float16 or tuple(mean.shape) != shape or not bool(mean.isfinite().all()):
        raise ValueError(
            f"`{path}`: `{_KEY_MEAN}` is {mean.dtype} {list(mean.shape)}, not finite float16 {list(shape)}; "
            f"{_HINT}"
        )
    orders = block["head_permutation"]  # the file has the heads in the model's own order
    return [own[list(order)].float()[None] for own, order in zip(mean, orders, strict=True)]


def find_mask_file(source: str, block: Mapping[str, Any], options: Mapping[str, Any]) -> Path | None:
    """Find the file that a `leank` block names in a folder or a repository; None if it is not that file."""
    digest = block.get("files", {}).get(MASK_FILE)
    try:
        found = cached_file(source, MASK_FILE, **options) if source and digest else None
    except OSError:
        found = None
    if found is None or hashlib.sha256(Path(found).read_bytes()).hexdigest() != digest:
        return None
    return Path(found)


def carry_mask_file(source: str, block: Mapping[str, Any], folder: Path) -> bool:
    """Copy the file that a `leank` block names to another folder; return whether it is there."""
    found = find_mask_file(source, block, {})
    if found is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / MASK_FILE
    if not copy.exists() or not copy.samefile(found):
        shutil.copyfile(found, copy)
    return True
