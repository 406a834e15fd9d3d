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

    True if no head has moved and V is in its own basis, or if `leank-convert adapter` made the adapter (its
    folder, or what else `load_adapter` was given) for the order and the basis of this `leank` block.
    """
    orders = [list(order) for order in leank["head_permutation"]]
    is_folded = "value_widths" in leank and "value_basis" not in leank
    mask = leank["files"][MASK_FILE] if is_folded else None
    if mask is None and all(order == sorted(order) for order in orders):
        return True
    if not isinstance(adapter, str | Path) or not (Path(adapter) / _WEIGHTS).is_file():
        return False
    try:
        with safe_open(Path(adapter) / _WEIGHTS, "pt") as file:
            made_for = json.loads((file.metadata() or {})["leank"])
            return bool(made_for["head_permutation"] == orders and made_for.get("mask") == mask)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return False
