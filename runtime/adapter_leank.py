"""LoRA adapters on a checkpoint: which ones were made for its order of KV heads, and its basis of V."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from .mask_file_leank import MASK_FILE

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def fits_heads(adapter: object, config: PreTrainedConfig) -> bool:
    """Return whether an adapter changes the heads that it was trained on, in the directions that it was.

    That of the original does if no head has moved and V is in its own basis. One that `leank-convert adapter`
    made (its folder, or what else `load_adapter` was given) does for the order and the basis of one block,
    and one that was trained on the checkpoint does.
    """
    leank: Mapping[str, Any] = config.leank
    orders = [list(order) for order in leank["head_permutation"]]
    is_folded = "value_widths" in leank and "value_basis" not in leank
    mask = leank.get("files", {}).get(MASK_FILE, "") if is_folded else None
    is_original = mask is None and all(order == sorted(order) for order in orders)
    if not isinstance(adapter, str | Path) or not (Path(adapter) / _WEIGHTS).is_file():
        return is_original
    try:
        with safe_open(Path(adapter) / _WEIGHTS, "pt") as file:
            if "leank" in (metadata := file.metadata() or {}):
                made_for = json.loads(metadata["leank"])
                return bool(made_for["head_permutation"] == orders and made_for.get("mask") == mask)
        base = json.loads((Path(adapter) / _CONFIG).read_bytes())["base_model_name_or_path"]
        return is_original or _absolute(base) == _absolute(config.name_or_path or "")
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return is_original  # PEFT says what is wrong with it


def _absolute(source: str) -> str:
    """Return a folder's path in one spelling, a repository's id as it is."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source
