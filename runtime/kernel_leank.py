"""Building blocks of the decode kernels, in TileLang: targets, masks, online softmax, a head's output.

The work of a launch is a line of tiles, in kernel_line_leank; heads that several program instances shared are
joined in kernel_merge_leank. The attention bodies are in kernel_hopper_leank and kernel_generic_leank.

**Products.** Operands are swapped: tokens are the M of the matrix products and the queries of a KV head,
those of all columns of the launch, their N, so nothing is padded to 64 queries and a tile's scores take four
registers of a thread for each eight of them. Query number q is of group q % G and column q // G.

What is compiled depends on `KernelShape` alone; batch, columns, lengths, widths, pages and the number of
instances are data or dynamic.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
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
from .kernel_line_leank import TILE, Head, Seg, T, Tile, drops_values
from .parts_leank import carries, load_part

NEG = -1e30  # a score that no softmax notices, finite so that differences of two are not NaN
WARP, WARPGROUP = 32, 128
FULL_ROW = T.GemmWarpPolicy.FullRow  # every warp takes 16 of the 64 tokens, or 16 channels of V

# Rounding to e4m3 and widening; None where a checkpoint carries no kernels of FP8 caches.
kernel_fp8: Any = load_part("kernel_fp8") if carries("kernel_fp8") else None

# Rows of `limits`: tokens that a query sees, and the first one of its recent tokens.
SEEN, RECENT = range(2)


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
        """Threads of a block that works on one head, which they may not leave a rest of."""
        return min(self.head_dim & -self.head_dim, WARPGROUP) if self.head_dim > WARPGROUP else WARPGROUP

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


@T.macro
def find_limits(
    parallel: Any, limits: Any, seg: Any, seen: Any, pruned: Any, first: Any, columns: Any, sink_size: Any,
    num_groups: int,
) -> None:  # fmt: skip
    """Fill `limits` for the queries of a segment; queries of padding see what the last column does."""
    for j in parallel(limits.shape[1]):
        limits[SEEN, j] = seen[seg[Seg.ROW], first + T.min(j // num_groups, columns - 1)]
        limits[RECENT, j] = sink_size + pruned[seg[Seg.ROW], first + T.min(j // num_groups, columns - 1)]


@T.macro
def find_masks(masks: Any, tile: Any, seg: Any, limits: Any, sink_size: Any, num_values: int) -> None:
    """Set `masks` for a whole tile: whether tokens of it are not whole, and whether some are not visible.

    Where V comes in chunks, dropped ones of tokens that are not whole are not visible either.
    """
    masks[0] = T.cast(
        (tile[Tile.TOKEN] < limits[RECENT, limits.shape[1] - 1]) & (tile[Tile.TOKEN] + TILE > sink_size),
        "int32",
    )
    masks[1] = T.cast((tile[Tile.TOKEN] + TILE > limits[SEEN, 0]), "int32") | (
        masks[0] if num_values > 1 else masks[0] & T.cast(seg[Seg.NUM_KEPT] == 0, "int32")
    )


def _is_whole(token: Any, recent: Any, sink_size: Any) -> Any:
    return (token < sink_size) | (token >= recent)


@T.macro
def drop_pruned(parallel: Any, scores: Any, tile: Any, limits: Any, sink_size: Any) -> None:
    """Keep dropped channels' scores where a query sees the token whole; others may be anything."""
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.if_then_else(
            _is_whole(tile[Tile.TOKEN] + i, limits[RECENT, j], sink_size), scores[i, j], 0.0
        )


@T.macro
def hide_tokens(parallel: Any, scores: Any, tile: Any, seg: Any, limits: Any, sink_size: Any) -> None:
    """Hide what a query does not see: tokens behind its own, in a head of width 0 pruned ones too."""
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.if_then_else(
            (tile[Tile.TOKEN] + i < limits[SEEN, j])
            & ((seg[Seg.NUM_KEPT] > 0) | _is_whole(tile[Tile.TOKEN] + i, limits[RECENT, j], sink_size)),
            scores[i, j],
            NEG,
        )


def is_unseen(token: Any, seg: Any, limits: Any, sink_size: Any, chunk: int, num_values: int) -> Any:
    """Return whether no query sees a token's chunk of V: a weight of 0 times NaN would be NaN."""
    return (token >= seg[Seg.LENGTH]) | (
        drops_values(seg, chunk, num_values) & (token >= sink_size) & (token < limits[RECENT, 0])
    )


@T.macro
def write_whole_weights(
    parallel: Any, weights: Any, scores: Any, tile: Any, limits: Any, sink_size: Any
) -> None:
    """Write weights as V's dropped chunks take them, zeros where a query does not see the token whole."""
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        weights[j, i] = T.cast(
            T.if_then_else(_is_whole(tile[Tile.TOKEN] + i, limits[RECENT, j], sink_size), scores[i, j], 0.0),
            weights.dtype,
        )


@T.macro
def begin_softmax(
    parallel: Any, top: Any, total: Any, seg: Any, sinks: Any, first: Any, num_groups: int
) -> None:
    """Begin a running softmax, with the sinks of a head in the segment of its first tile.

    `top` and `total` are as in `softmax_tile`: a sink is counted in the place of the first token. `sinks` are
    their logits, times log2 e; None without any.
    """
    if sinks is None:
        T.fill(total, 0)
        T.fill(top, NEG)
    else:
        for j in parallel(top.shape[0]):
            top[j] = T.if_then_else(
                seg[Seg.FIRST] == 0,
                sinks[
                    T.min(seg[Seg.ROW], sinks.shape[0] - 1),
                    seg[Seg.HEAD] * num_groups + j % num_groups,
                    T.min(first + j // num_groups, sinks.shape[2] - 1),
                ],
                NEG,
            )
        for i, j in parallel(total.shape[0], total.shape[1]):
            total[i, j] = T.if_then_else((seg[Seg.FIRST] == 0) & (i == 0), 1.0, 0.0)


@T.macro
def softmax_tile(
    parallel: Any, scores: Any, top: Any, earlier_top: Any, rescale: Any, total: Any, out: Any,
    scale: Any, raise_top: Any,
) -> None:  # fmt: skip
    """Turn a tile's scores into weights under the running maximum, and rescale what came before.

    Args:
        parallel: `T.Parallel`, or `T.grid` on the CPU.
        scores: Tokens by queries `[TILE, N]`; weights afterwards.
        top: Running maximum per query `[N]`, in units of log 2.
        earlier_top: Its value before this tile `[N]`.
        rescale: Factor on what came before `[N]`.
        total: Sums of weights `[TILE, N]`, one per token place: added up at the end, not per tile.
        out: Weighted values, of every chunk of V `[F, N]`.
        scale: Factor on the scores, times log2 e.
        raise_top: Raises `top` to the greatest of these scores.
    """
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = scores[i, j] * scale
    T.copy(top, earlier_top)
    raise_top(scores, top)
    for j in parallel(scores.shape[1]):
        rescale[j] = T.exp2(earlier_top[j] - top[j])
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.exp2(scores[i, j] - top[j])
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        total[i, j] = total[i, j] * rescale[j] + scores[i, j]
    for c in list(range(len(out))):
        for i, j in parallel(out[c].shape[0], out[c].shape[1]):
            out[c][i, j] = out[c][i, j] * rescale[j]


def in_order(place: Any) -> Any:
    """Return what lies at a place of a product where nothing is rearranged: what comes at that place."""
    return place


def _times_scale(number: Any, scale: Any, seg: Any, channel: Any, dtype: str) -> Any:
    """Return a query's channel times its scale, as it is without scales."""
    if scale is None:
        return number
    row = T.if_then_else(scale.shape[0] > 1, seg[Seg.ROW], 0)
    return T.cast(T.cast(number, "float32") * scale[row, seg[Seg.HEAD], channel], dtype)


@T.macro
def load_query(
    parallel: Any, chunks: Any, shared: Any, seg: Any, chunk: Any, query: Any, index: Any, table: Any,
    num_heads: Any, first: Any, columns: Any, num_groups: int, lane_of: Any, key_scale: Any,
    one_by_one: Any,
) -> None:  # fmt: skip
    """Gather the channels of a segment's queries into `shared`, chunk by chunk; zeros pad both.

    `lane_of` gives the lane of a place of the product; queries are multiplied by `key_scale` if there is one.
    """
    for c in chunks:
        chunk[0] = T.if_then_else(
            c < seg[Seg.NUM_KEPT],
            seg[Seg.KEPT] + c,
            table[num_heads, Head.KEPT] + seg[Seg.DROPPED] + c - seg[Seg.NUM_KEPT],
        )
        chunk[0] = T.min(chunk[0], index.shape[1] - 1)  # a head with fewer chunks does not read the rest
        for i, j in parallel(shared[c].shape[0], shared[c].shape[1], **one_by_one):
            lane = index[T.if_then_else(index.shape[0] > 1, seg[Seg.ROW], 0), chunk[0], lane_of(j)]
            shared[c][i, j] = T.if_then_else(
                (i < columns * num_groups) & (lane >= 0),
                _times_scale(
                    query[
                        seg[Seg.ROW],
                        seg[Seg.HEAD] * num_groups + i % num_groups,
                        first + T.min(i // num_groups, columns - 1),
                        T.max(lane, 0) % query.shape[3],
                    ],
                    key_scale,
                    seg,
                    T.max(lane, 0) % query.shape[3],
                    shared[c].dtype,
                ),
                T.cast(0, shared[c].dtype),
            )


@T.macro
def store_segment(
    parallel: Any, seg: Any, span: Any, program: Any, part: Any, out: Any, total: Any, top: Any, sums: Any,
    parts: Any, lse: Any, output: Any, first: Any, columns: Any, num_groups: int, reduce_options: Any,
    channel_of: Any, value_scale: Any, value_chunk: int,
) -> None:  # fmt: skip
    """Write a segment's result: to the output if this instance saw all of the head, else as a part.

    `channel_of` gives the channel in its chunk of a row of one of `out`, which are multiplied by
    `value_scale` if there is one.
    """
    blocks = list(range(len(out)))
    T.reduce_sum(total, sums, dim=0, **reduce_options)
    for j in parallel(sums.shape[0]):
        sums[j] = T.max(sums[j], 1e-30)
    for c in blocks:
        for i, j in parallel(out[c].shape[0], out[c].shape[1]):
            out[c][i, j] = out[c][i, j] / sums[j]
        if value_scale is not None:
            for i, j in parallel(out[c].shape[0], out[c].shape[1]):
                out[c][i, j] = (
                    out[c][i, j]
                    * value_scale[
                        T.if_then_else(value_scale.shape[0] > 1, seg[Seg.ROW], 0),
                        seg[Seg.HEAD],
                        T.min(c * value_chunk + channel_of(i), value_scale.shape[2] - 1),
                    ]
                )
    if (seg[Seg.BEGIN] >= span[0]) & (seg[Seg.END] <= span[1]):
        for c in blocks:
            for i, j in parallel(out[c].shape[0], out[c].shape[1]):
                if (j < columns * num_groups) & (channel_of(i) < value_chunk):
                    output[
                        seg[Seg.ROW],
                        seg[Seg.HEAD] * num_groups + j % num_groups,
                        first + j // num_groups,
                        c * value_chunk + channel_of(i),
                    ] = T.cast(out[c][i, j], output.dtype)
    else:
        for c in blocks:
            for i, j in parallel(out[c].shape[0], out[c].shape[1]):
                if channel_of(i) < value_chunk:
                    parts[program, part, j, c * value_chunk + channel_of(i)] = out[c][i, j]
        for j in parallel(sums.shape[0]):
            lse[program, part, j] = T.log2(sums[j]) + top[j]


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
