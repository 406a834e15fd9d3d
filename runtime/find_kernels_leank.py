"""Decode kernel lookup by device and shape, with a self-check against the reference before first use."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers.utils import logging as transformers_logging

from .decode_kernels_leank import DecodeKernels
from .kernel_key_leank import KERNEL_DTYPES, KernelKey, padded_values, queries_at_once
from .parts_leank import carries
from .self_check_leank import disagreement

logger = transformers_logging.get_logger(__name__)

_Made = TypeVar("_Made")

_found: dict[KernelKey, DecodeKernels | None] = {}
_LOCK = threading.Lock()  # models of one process may decode in threads of their own


def kernel_key(device: torch.device, dtype: torch.dtype, *, num_columns: int = 1, **shape: Any) -> KernelKey:
    """Return what kernels of a CUDA device are found by.

    `num_columns` are a row's new tokens, at most `MAX_DRAFT`; `shape` are the key's other fields.
    """
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    head_dim, num_groups = shape["head_dim"], shape["num_groups"]
    value_size = padded_values(head_dim, shape.get("value_chunk") or head_dim)
    num_queries = queries_at_once(num_columns, num_groups, value_size, device)
    return KernelKey(device, dtype, num_queries=num_queries, **shape)


def find_kernels(device: torch.device, dtype: torch.dtype, **shape: Any) -> DecodeKernels | None:
    """Return the kernels for a device, a dtype and a shape, None if plain torch must do.

    The first call for a shape compiles them, or loads them from TileLang's cache on disk, and holds them to
    the reference on a small case; if that fails, one warning says so. The arguments are `kernel_key`'s.
    """
    if device.type != "cuda":
        return None
    key = kernel_key(device, dtype, **shape)
    if key not in _found:
        with _LOCK:
            if key not in _found:
                _found[key] = _make_kernels(key)
    return _found[key]


def _unsupported(key: KernelKey) -> str | None:
    """Return why no kernel can serve a shape, None if one can."""
    if key.dtype not in KERNEL_DTYPES:
        return f"kernels serve bfloat16 and float16, not {str(key.dtype).removeprefix('torch.')}"
    if key.cache_dtype == torch.uint8:
        return "no kernels serve an int4 cache"
    if key.cache_dtype not in (None, torch.float8_e4m3fn):
        return f"no kernels serve a cache of {str(key.cache_dtype).removeprefix('torch.')}"
    if key.is_fp8 and not carries("kernel_fp8"):
        return "this checkpoint carries no kernels of FP8 caches (export it with `--kv-dtype fp8`)"
    if importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed (pip install tilelang)"
    capability = torch.cuda.get_device_capability(key.device)
    if capability < (8, 0):
        return f"{torch.cuda.get_device_name(key.device)} is older than compute capability 8.0"
    if key.chunk_size not in (16, 32) or key.head_dim % 16 or key.head_dim > 256 or key.num_groups > 16:
        return (
            f"head_dim {key.head_dim}, {key.num_groups} query heads per KV head, chunks of {key.chunk_size}: "
            "kernels serve head_dim 64 to 256, at most 16 query heads per KV head, chunks of 16 or 32"
        )
    if key.value_chunk % 16 or key.value_chunk < key.chunk_size:  # loads are of 16 bytes, also FP8's
        least = f"of a multiple of 16 channels, {key.chunk_size} or more"
        return f"kernels serve V in chunks {least}, not of {key.value_chunk}"
    return None


def _make_kernels(key: KernelKey) -> DecodeKernels | None:
    def find_fault(kernels: DecodeKernels) -> str:
        error = disagreement(kernels)
        fault = f"the compiled kernel disagrees with the reference by {error:.1e} of the output"
        return "" if error <= 2 * torch.finfo(key.dtype).eps else fault

    told = f"LeanK's decode kernels are not used on {key.device}, plain torch decodes instead and is slower"
    reason = _unsupported(key)
    if reason is not None:
        logger.warning("%s: %s", told, reason)
        return None
    with torch.cuda.device(key.device):
        return make_checked(lambda: DecodeKernels(key), find_fault, told)


def make_checked(make: Callable[[], _Made], find_fault: Callable[[_Made], str], told: str) -> _Made | None:
    """Make what may serve in place of plain torch; None, with a warning, if that fails or it has a fault.

    `find_fault` returns what is wrong, "" for nothing; `told` is what the warning says before that.
    """
    try:
        made = make()
        reason = find_fault(made)
        if not reason:
            return made
    except torch.OutOfMemoryError:
        raise  # it says nothing about what was made, and may pass
    except Exception as exception:  # whatever a compiler or driver may raise
        reason = f"{type(exception).__name__}: {str(exception).strip()[-300:]}"
    logger.warning("%s: %s", told, reason)
    return None
