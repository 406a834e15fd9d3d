"""Mask file of a checkpoint: finding it in a folder or on the hub, reading what a cache needs, copying it."""

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
_HUB_OPTIONS = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
_HINT = "copy or export the checkpoint again"


def load_mask_tensors(
    config: PreTrainedConfig, settings: LeanKSettings, source: str, options: Mapping[str, Any]
) -> tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]:
    """Read the mean of keys and the basis of V of a checkpoint, by its folder or hub id; None for none.

    Of every pruned layer, in the checkpoint's head order, `[1, H_kv, D]` and `[H_kv, D, D]` with a
    direction per column, fp32, on the CPU. `options` are arguments of `from_pretrained`, of which those of
    the hub are taken. Raises a ValueError if the file is missing or is not the one that was exported, or a
    tensor makes no sense.
    """
    if not (settings.has_key_mean or settings.has_value_basis):
        return None, None
    shape = tuple(settings.channel_masks.shape)
    wanted: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {}
    if settings.has_key_mean:
        wanted["key_mean"] = "the mean of keys", torch.float16, shape
    if settings.has_value_basis:
        wanted["value_basis"] = "the basis of V", torch.float32, (*shape, shape[-1])
    block: dict[str, Any] = config.leank
    given = {name: value for name, value in options.items() if name in _HUB_OPTIONS and value is not None}
    if (commit := getattr(config, "_commit_hash", None)) is not None:
        given["revision"] = commit  # whatever is uploaded while the weights are loaded
    path = find_mask_file(source, block, given)
    if path is None:
        held = " and ".join(name for name, *_ in wanted.values())
        raise ValueError(
            f"`{source}`: `{MASK_FILE}`, which holds {held}, is missing or not the file that was exported; "
            f"{_HINT}"
        )
    found: dict[str, list[torch.Tensor]] = {}
    for name, (_, dtype, expected) in wanted.items():
        try:
            tensor = load(path.read_bytes())[name]
        except (KeyError, SafetensorError) as error:
            raise ValueError(f"`{path}` holds no tensor `{name}` that can be read; {_HINT}") from error
        if tensor.dtype != dtype or tuple(tensor.shape) != expected or not bool(tensor.isfinite().all()):
            raise ValueError(
                f"`{path}`: `{name}` is {tensor.dtype} {list(tensor.shape)}, not finite "
                f"{str(dtype).removeprefix('torch.')} {list(expected)}; {_HINT}"
            )
        orders = block["head_permutation"]  # the file has the heads in the model's own order
        found[name] = [own[list(order)].float() for own, order in zip(tensor, orders, strict=True)]
    means = found.get("key_mean")
    return None if means is None else [mean[None] for mean in means], found.get("value_basis")


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
