"""LoRA adapters on a checkpoint: which ones were made for its order of KV heads, and its basis of V."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .mask_file_leank import MASK_FILE, find_file

_WEIGHTS = "adapter_model.safetensors"
OTHER_HEADS = (
    "KV heads are in another order, or V in another basis, than in the model that an adapter was made for; "
    "convert it by `leank-convert adapter ADAPTER --checkpoint CHECKPOINT -o NEW`, with "
    "`--trained-on-checkpoint` if it was trained on that"
)


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
    found = find_file(str(adapter), _WEIGHTS, options) if isinstance(adapter, str | Path) else None
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
