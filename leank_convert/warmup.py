"""`warmup`: compile and check a checkpoint's kernels on this machine, so that a server never compiles."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from leank_convert.benchmark.subject import Runtime
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError

_COMPUTED_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def warm_up(checkpoint: Path, device: str | None) -> dict[str, Any]:
    """Compile what decoding from a checkpoint needs, into tilelang's cache on disk. Reads no weights.

    Args:
        checkpoint: A converted checkpoint's folder.
        device: A CUDA device; None for the current one.

    Returns:
        JSON-ready facts of what was compiled.

    Raises:
        LeanKError: If there is no GPU, or the kernels cannot be used on it.
    """
    if not checkpoint.is_dir():
        raise LeanKError(f"`{checkpoint}` is no folder", hint="warmup takes a converted checkpoint's folder")
    if device is None and not torch.cuda.is_available():
        raise LeanKError(
            "there is no CUDA device to compile the kernels for",
            hint="run it on the machine that will serve the checkpoint; on a CPU nothing needs compiling",
        )
    chosen = choose_device(device or "cuda")
    if chosen.type != "cuda":
        raise LeanKError(f"kernels are compiled for `cuda` devices, not for `{chosen.type}`")
    runtime = Runtime(checkpoint)
    config = runtime.config
    settings = runtime.module("configuration_leank").read_settings(config)
    name = str(config.dtype or "bfloat16").removeprefix("torch.")
    if name not in _COMPUTED_DTYPES:
        raise LeanKError(
            f"`{checkpoint}` is stored in {name}; kernels compute in {' and '.join(_COMPUTED_DTYPES)}",
            hint='load it with `dtype="bfloat16"`, or export it from a source in that dtype',
        )
    began = time.perf_counter()
    kernels = runtime.find_kernels(chosen, _COMPUTED_DTYPES[name])
    if kernels is None:
        raise LeanKError(
            f"the kernels of `{checkpoint}` cannot be used on `{torch.cuda.get_device_name(chosen)}`",
            hint="a warning above says why; decoding works without them, in plain torch",
            exit_code=1,
        )
    return {
        "checkpoint": str(checkpoint),
        "device": torch.cuda.get_device_name(chosen),
        "dtype": name,
        "head_dim": settings.head_dim,
        "num_key_value_groups": config.num_attention_heads // config.num_key_value_heads,
        "chunk_size": runtime.chunk_size,
        "shapes": len(kernels),
        "seconds": time.perf_counter() - began,
        "cache": os.environ.get("TILELANG_CACHE_DIR", str(Path("~/.tilelang/cache").expanduser())),
    }


def render_warm_up(facts: dict[str, Any]) -> str:
    """One sentence for a person."""
    return (
        f"compiled and checked in {facts['seconds']:.1f} s on {facts['device']}: {facts['dtype']}, head_dim "
        f"{facts['head_dim']}, {facts['num_key_value_groups']} query heads per KV head, chunks of "
        f"{facts['chunk_size']}, {facts['shapes']} layer {'shape' if facts['shapes'] == 1 else 'shapes'}; "
        f"kept in {facts['cache']}"
    )
