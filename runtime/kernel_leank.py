"""What all kernels have in common, in TileLang: shapes they are compiled for, types of arguments, compiling.

What is compiled depends on `KernelShape` alone; batch, columns, lengths, widths, pages and the number of
instances are data or dynamic.
"""

import ctypes
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

try:
    import tilelang
except ImportError as error:
    raise ImportError(f"the decode kernels need tilelang (pip install tilelang): {error}") from error

from .kernel_key_leank import KernelKey, padded_values
from .kernel_line_leank import T
from .parts_leank import carries, load_part

NEG = -1e30  # a score that no softmax notices, finite so that differences of two are not NaN
WARP, WARPGROUP = 32, 128
FULL_ROW = T.GemmWarpPolicy.FullRow  # every warp takes 16 of the 64 tokens, or 16 channels of V

# Rounding to e4m3 and widening; None where a checkpoint carries no kernels of FP8 caches.
kernel_fp8: Any = load_part("kernel_fp8") if carries("kernel_fp8") else None


@dataclass(frozen=True)
class KernelShape(KernelKey):
    """What kernels are compiled for: what they are found by, and what of a device holds how much.

    Attributes:
        num_stages: Tiles in flight.
        num_instances: Program instances that a multiprocessor is to hold.
    """

    num_stages: int = 1
    num_instances: int = 1

    @property
    def query_type(self) -> str:
        """Of queries, as TileLang spells it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def stored_type(self) -> str:
        """Of K and V in memory; e4m3 is taken as bytes."""
        return "uint8" if self.is_fp8 else self.query_type

    @property
    def product_type(self) -> str:
        """Of the operands of matrix products: float16 holds every e4m3, and one instruction widens two."""
        return "float16" if self.is_fp8 and self.dtype != torch.float32 else self.query_type

    @property
    def head_threads(self) -> int:
        """Threads of a block that works on one head: two warps, if they leave no rest of its channels."""
        if self.head_dim % (2 * WARP) == 0:
            return 2 * WARP
        return self.head_dim & -self.head_dim if self.head_dim > WARPGROUP else WARPGROUP

    @property
    def begins_early(self) -> bool:
        """Whether attention is launched while the kernel ahead of it still runs.

        Three instances a multiprocessor were slower so, see KERNEL.md.
        """
        return self.num_instances < 3

    @property
    def num_values(self) -> int:
        """Chunks of V of a head, D / F: blocks of the second product."""
        return self.head_dim // self.value_chunk

    @property
    def value_rows(self) -> int:
        """Channels of a chunk of V in shared memory: rows of the second product come in 64."""
        return padded_values(self.value_chunk, self.value_chunk)

    @property
    def value_size(self) -> int:
        """Channels of V in shared memory."""
        return padded_values(self.head_dim, self.value_chunk)


def pool_types(shape: KernelShape, cpu: bool) -> list[Any]:
    """Return what the four pools of `StoreTensors` are to a kernel.

    Pools without rows arrive as placeholders, so no two need agree in pages and their sizes. Pages may be
    strided, but TileLang's CPU target knows no strides.
    """
    types = []
    for place, lanes in enumerate((shape.chunk_size, shape.value_chunk) * 2):
        pages, rows, page_size, stride = T.dynamic(
            f"pages_{place}, rows_{place}, page_size_{place}, stride_{place}"
        )
        size, strides = (pages, rows, page_size, lanes), (stride, page_size * lanes, lanes, 1)
        dtype = shape.stored_type
        types.append(T.Tensor(size, dtype) if cpu else T.StridedTensor(size, strides, dtype))
    return types


def mean_type(shape: KernelShape) -> Any:
    """Return what the mean of keys is to a kernel; one head of zeros stands for none."""
    rows, heads = T.dynamic("mean_rows, mean_heads")
    return T.Tensor((rows, heads, shape.head_dim), "float32")


def sinks_type() -> Any:
    """Return what the logits of sinks are to a kernel: of every row and column, or one for all."""
    return T.Tensor(T.dynamic("sink_rows, query_heads, sink_columns"), "float32")


def scale_types(shape: KernelShape) -> list[Any]:
    """Return what the scales of K and V are to a kernel; without FP8 they arrive as placeholders."""
    rows, heads = T.dynamic("scale_rows, scale_heads")
    return [T.Tensor((rows, heads, shape.head_dim), "float32") for _ in range(2)]


def compile_kernels(by_hand: list[Any], others: list[Any], arch: str) -> list[Any]:
    """Compile, or load from TileLang's cache on disk.

    TileLang's bounds checks are off: all loads stay within bounds, and the checks keep them from overlapping
    (the merge takes three times as long with them).

    Args:
        by_hand: TileLang functions that have all barriers that they need, so that none are added.
        others: Those that have not.
        arch: Compute capability, `sm_90a`.
    """
    keys, functions = tilelang.PassConfigKey, [*by_hand, *others]

    def compiled(place: int) -> Any:
        # Warp specialisation is written out where it is wanted.
        configs = {keys.TL_DISABLE_WARP_SPECIALIZED: True, keys.TL_DISABLE_SAFE_MEMORY_ACCESS: True}
        if place < len(by_hand):
            configs[keys.TL_DISABLE_THREAD_STORAGE_SYNC] = True
        target = {"kind": "cuda", "arch": arch}
        return tilelang.compile(functions[place], target=target, pass_configs=configs)

    # On stdout they tell of a kernel's beginning and end, and warn where two shapes have one in common.
    loggers = [logging.getLogger(f"tilelang.{name}") for name in ("jit.kernel", "cache.kernel_cache")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(compiled, range(len(functions))))
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        # Of what compiling took glibc keeps two gigabytes for these threads, which have ended.
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(0)
