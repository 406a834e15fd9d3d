"""Which kernels serve a decode step: found once per device and shape, checked on first use."""

from __future__ import annotations

import importlib.util
import threading

import torch
from transformers.utils import logging

from .decode_kernels_leank import DTYPES, DecodeKernels, KernelKey, plan_tiles
from .selfcheck_leank import disagreement

__all__ = ["DecodeKernels", "KernelKey", "find_kernels", "plan_tiles"]

logger = logging.get_logger(__name__)

_found: dict[KernelKey, DecodeKernels | None] = {}
_LOCK = threading.Lock()  # models of one process may decode in threads of their own


def find_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    num_groups: int,
    chunk_size: int,
    max_chunks: int,
) -> DecodeKernels | None:
    """Return the kernels for a device, a dtype and a shape, None if plain torch must do.

    The first call for a shape compiles them, or loads them from TileLang's cache on disk, and holds them to
    the reference on a small case; if that fails, one warning says so.

    Args:
        device: As in `KernelKey`, as are the others.
        dtype: See there.
        head_dim: See there.
        num_groups: See there.
        chunk_size: See there.
        max_chunks: See there.
    """
    if device.type != "cuda":
        return None
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    key = KernelKey(device, dtype, head_dim, num_groups, chunk_size, max_chunks)
    if key not in _found:
        with _LOCK:
            if key not in _found:
                _found[key] = _make_kernels(key)
    return _found[key]


def _unsupported(key: KernelKey) -> str | None:
    """Return why no kernel can serve a shape, None if one can."""
    if key.dtype not in DTYPES:
        return f"kernels serve bfloat16 and float16, not {str(key.dtype).removeprefix('torch.')}"
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
    return None


def _make_kernels(key: KernelKey) -> DecodeKernels | None:
    reason = _unsupported(key)
    if reason is None:
        try:
            with torch.cuda.device(key.device):
                kernels = DecodeKernels(key)
                error = disagreement(kernels)
            if error <= 2 * torch.finfo(key.dtype).eps:
                return kernels
            reason = f"the compiled kernel disagrees with the reference by {error:.1e} of the output"
        except torch.OutOfMemoryError:
            raise  # it says nothing about the kernels, and may pass
        except Exception as exception:  # whatever a compiler or driver may raise
            reason = f"{type(exception).__name__}: {str(exception).strip()[-300:]}"
    logger.warning(
        "LeanK's decode kernels are not used on %s, plain torch decodes instead and is slower: %s",
        key.device,
        reason,
    )
    return None
