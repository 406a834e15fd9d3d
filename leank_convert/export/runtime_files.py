"""Runtime files of a checkpoint: those that its config needs, found as data, never imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.resources import files
from typing import Any

from leank_convert.families import Architecture
from leank_convert.leank_block import KEY_MEAN_KEY, LAYERS_KEY, VALUE_BASIS_KEY

_PARTS_FILE = "parts_leank.py"
# Files that only some checkpoints carry.
PARTS = ("kernel_fp8_leank.py", "mixed_cache_leank.py", "model_constants_leank.py", "sinks_leank.py")


def needed_parts(architecture: Architecture, leank: Mapping[str, Any]) -> set[str]:
    """Names of the files among `PARTS` that a checkpoint of this family with this `leank` block needs."""
    given = (leank.get(key) for key in ("kv_scales", KEY_MEAN_KEY, VALUE_BASIS_KEY))
    has_constants = any(value is not None for value in given)
    needed = (leank.get("kv_dtype") == "fp8", LAYERS_KEY in leank, has_constants, architecture.sinks)
    return {name for name, is_needed in zip(PARTS, needed, strict=True) if is_needed}


def read_runtime_files(parts: Collection[str] = PARTS) -> dict[str, bytes]:
    """Read the files of the runtime that travel with a checkpoint that needs these `parts`, by name."""
    found = {
        entry.name: entry.read_bytes()
        for entry in sorted(files("leank_convert._runtime").iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith("_leank.py")
    }
    left_out = set(PARTS) - set(parts)
    # The runtime reads in this file what it has, and transformers what to copy.
    lines = found[_PARTS_FILE].decode().splitlines(keepends=True)
    absent = tuple(f"from .{name.removesuffix('.py')} import " for name in left_out)
    found[_PARTS_FILE] = "".join(line for line in lines if not line.startswith(absent)).encode()
    return {name: content for name, content in found.items() if name not in left_out}


def auto_map(architecture: Architecture) -> dict[str, str]:
    """The classes that transformers' auto classes find in a checkpoint of this family."""
    return {
        "AutoConfig": f"configuration_leank.LeanK{architecture.config_class}",
        "AutoModel": f"modeling_leank.LeanK{architecture.base_class}",
        "AutoModelForCausalLM": f"modeling_leank.LeanK{architecture.causal_lm_class}",
    }
