"""Mask file of a checkpoint: finding it in a folder or on the hub, copying it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

MASK_FILE = "channel_mask.safetensors"


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
