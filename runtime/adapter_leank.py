"""LoRA adapters on a checkpoint: which ones were made for its order of KV heads, and its basis of V."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .mask_file_leank import MASK_FILE

_WEIGHTS = "adapter_model.safetensors"


def fits_heads(adapter: object, leank: Mapping[str, Any]) -> bool:
    """Return whether an adapter changes the heads that it was trained on, in the directions that it was.

    That of the original does if no head has moved and V is in its own basis. One that `leank-convert adapter`
    made (its folder, or what else `load_adapter` was given) does for the order and the basis of one block.
    """
    orders = [list(order) for order in leank["head_permutation"]]
    is_folded = "value_widths" in leank and "value_basis" not in leank
    mask = leank["files"][MASK_FILE] if is_folded else None
    is_original = mask is None and all(order == sorted(order) for order in orders)
    if not isinstance(adapter, str | Path) or not (Path(adapter) / _WEIGHTS).is_file():
        return is_original
    try:
        with safe_open(Path(adapter) / _WEIGHTS, "pt") as file:
            if "leank" not in (metadata := file.metadata() or {}):
                return is_original
            made_for = json.loads(metadata["leank"])
            return bool(made_for["head_permutation"] == orders and made_for.get("mask") == mask)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return is_original  # PEFT says what is wrong with it
