"""Optional parts of the runtime: files that only some models need, and which of them a checkpoint carries.

An export leaves out the files that its config does not need, and their lines in `CARRIED`.
"""

from __future__ import annotations

import importlib
from typing import Any

# transformers copies the files that lines of this form name, also within a string. Imports would load every
# part at once, and kernels need tilelang.
CARRIED = """
from .kernel_fp8_leank import kernels of FP8 caches
from .mixed_cache_leank import layers without full attention
from .model_constants_leank import scales, mean of keys, basis of V
from .sinks_leank import attention sinks
"""


def carries(name: str) -> bool:
    """Return whether this checkpoint has the file `name`_leank.py."""
    return f"\nfrom .{name}_leank import " in CARRIED


def load_part(name: str) -> Any:
    """Import the file `name`_leank.py, or raise a ValueError if this checkpoint does not carry it."""
    if not carries(name):
        raise ValueError(
            f"the checkpoint lacks the runtime file `{name}_leank.py`, which it needs; export it again"
        )
    return importlib.import_module(f".{name}_leank", __package__)
