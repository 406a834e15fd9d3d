"""LoRA adapters on a checkpoint: which ones were made for its order of KV heads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

_WEIGHTS = "adapter_model.safetensors"


def fits_heads(adapter: object, head_permutation: Sequence[Sequence[int]]) -> bool:
    """Return whether an adapter changes the heads that it was trained on.

    Args:
        adapter: Its folder, or what else `load_adapter` was given.
        head_permutation: The checkpoint's, `[pruned layer][new] = old`.

    Returns:
        True if no head has moved, or `leank-convert adapter` made the adapter for this order.
    """
    if all(list(order) == sorted(order) for order in head_permutation):
        return True
    if not isinstance(adapter, str | Path) or not (Path(adapter) / _WEIGHTS).is_file():
        return False
    try:
        with safe_open(Path(adapter) / _WEIGHTS, "pt") as file:
            made_for = json.loads((file.metadata() or {})["leank"])["head_permutation"]
    except (SafetensorError, ValueError, KeyError, TypeError):
        return False
    return bool(made_for == [list(order) for order in head_permutation])
