"""What the decode kernels share: the shape they are compiled for, queries in, results out, merge and append.

Attention is one launch for all heads of a layer: a fixed number of program instances share the tiles by bytes
(see tiles_leank). Operands are swapped: tokens are the M of the matrix products and the at most 16 queries of
a KV head their N, so nothing is padded to 64 queries and a tile's scores take four registers of a thread.

    kernel_hopper_leank    one warp loads tiles through TMA, one warpgroup computes with wgmma
    kernel_generic_leank   128 threads load through cp.async and compute with mma; in plain loops on
                           the CPU, for tests

What is compiled depends on `KernelShape` alone; batch, lengths, widths, capacity and the number of instances
are data or dynamic.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from dataclasses import dataclass
from typing import Any

try:
    import tilelang.language as T  # noqa: N812
except ImportError as error:
    raise ImportError(f"the decode kernels need tilelang (pip install tilelang): {error}") from error

from .tiles_leank import (
    BEGIN,
    COST,
    DROPPED,
    END,
    HEAD,
    KEPT,
    NEG,
    NUM_KEPT,
    ROW,
    head_begin,
    stretch_bounds,
)

_PARTS = 16  # parts that the merge loads before it uses the first
WARPGROUP = 128
FULL_ROW = T.GemmWarpPolicy.FullRow  # every warp takes 16 of the 64 tokens, or 16 channels of V


@dataclass(frozen=True)
class KernelShape:
    """What a kernel is compiled for.

    Attributes:
        head_dim: Channels of a key, D.
        num_groups: Query heads per KV head, G.
        chunk_size: Channels of a chunk, E.
        max_chunks: Most chunks of one head, kept and dropped together.
        dtype: Of queries and cache, as TileLang spells it.
        num_stages: Tiles in flight.
    """

    head_dim: int
    num_groups: int
    chunk_size: int
    max_chunks: int
    dtype: str
    num_stages: int

    @property
    def num_queries(self) -> int:
        """Columns of the matrix products: query heads of one KV head, padded to 8 or 16."""
        return 8 if self.num_groups <= 8 else 16

    @property
    def value_size(self) -> int:
        """Channels of V in shared memory: rows of the second product come in 64."""
        return -(-self.head_dim // 64) * 64


@T.macro
def load_query(
    parallel: Any, chunks: Any, shared: Any, seg: Any, chunk: Any, query: Any, index: Any, table: Any,
    num_heads: Any, num_groups: Any,
) -> None:  # fmt: skip
    """Gather the channels of a segment's queries into `shared`, chunk by chunk; zeros pad lanes and heads."""
    for c in chunks:
        chunk[0] = T.if_then_else(
            c < seg[NUM_KEPT], seg[KEPT] + c, table[num_heads, 0] + seg[DROPPED] + c - seg[NUM_KEPT]
        )
        chunk[0] = T.min(chunk[0], index.shape[1] - 1)  # a head with fewer chunks does not read the rest
        for i, j in parallel(shared[c].shape[0], shared[c].shape[1]):
            lane = index[T.if_then_else(index.shape[0] > 1, seg[ROW], 0), chunk[0], j]
            shared[c][i, j] = T.if_then_else(
                (i < num_groups) & (lane >= 0),
                query[
                    seg[ROW],
                    seg[HEAD] * num_groups + T.min(i, num_groups - 1),
                    T.max(lane, 0) % query.shape[2],
                ],
                T.cast(0, query.dtype),
            )


@T.macro
def store_segment(
    parallel: Any, seg: Any, span: Any, program: Any, part: Any, out: Any, total: Any, top: Any, sums: Any,
    parts: Any, lse: Any, output: Any, num_groups: Any, reduce_options: Any,
) -> None:  # fmt: skip
    """Write a segment's result: to the output if this instance saw all of the head, else as a part."""
    T.reduce_sum(total, sums, dim=0, **reduce_options)
    for j in parallel(sums.shape[0]):
        sums[j] = T.max(sums[j], 1e-30)
    for i, j in parallel(out.shape[0], out.shape[1]):
        out[i, j] = out[i, j] / sums[j]
    if (seg[BEGIN] >= span[0]) & (seg[END] <= span[1]):
        for i, j in parallel(out.shape[0], out.shape[1]):
            if (j < num_groups) & (i < output.shape[2]):
                output[seg[ROW], seg[HEAD] * num_groups + j, i] = T.cast(out[i, j], output.dtype)
    else:
        for i, j in parallel(out.shape[0], out.shape[1]):
            if i < output.shape[2]:
                parts[program, part, j, i] = out[i, j]
        for j in parallel(sums.shape[0]):
            lse[program, part, j] = T.log2(sums[j]) + top[j]


def merge_parts(shape: KernelShape, cpu: bool = False, overlap: bool = False) -> Any:
    """Return the kernel that merges the parts of heads which several program instances shared.

    With `overlap` it is launched while attention still runs, which GPUs before Hopper cannot.
    """
    d, n, g, dtype = shape.head_dim, shape.num_queries, shape.num_groups, shape.dtype
    batch, heads, table_rows, plan_rows, programs = T.dynamic("batch, heads, table_rows, plan_rows, programs")
    fragment = T.alloc_local if cpu else T.alloc_fragment
    parallel = T.grid if cpu else T.Parallel
    threads = {} if cpu else {"threads": min(d, WARPGROUP)}

    @T.prim_func
    def leank_merge(
        table: T.Tensor((table_rows, 8), "int32"),
        plan: T.Tensor((plan_rows, 2), "int32"),
        parts: T.Tensor((programs, 2, n, d), "float32"),
        lse: T.Tensor((programs, 2, n), "float32"),
        output: T.Tensor((batch, heads, d), dtype),
    ):
        with T.Kernel(heads, batch, **threads) as (query_head, row):
            part = fragment((_PARTS, d), "float32")
            total = fragment((d,), "float32")
            part_lse = T.alloc_local((_PARTS,), "float32")
            span = T.alloc_local((2,), "int32")
            begin = T.alloc_local((1,), "int32")
            head = T.alloc_var("int32")
            per_program = T.alloc_var("int32")
            stop = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
            program = T.alloc_var("int32")
            top = T.alloc_var("float32", init=NEG)
            earlier_top = T.alloc_var("float32")
            weight = T.alloc_var("float32")
            sum_of_weights = T.alloc_var("float32", init=0.0)
            num_heads = table_rows - 1
            head = query_head // g
            stretch_bounds(span, 0, programs, num_heads, table, plan, batch)
            per_program = T.max(span[1], 1)
            head_begin(begin, row, head, num_heads, table, plan)
            stop = (
                begin[0]
                + (plan[row + 1, 0] - plan[row, 0]) * table[head, COST]
                + (plan[row + 1, 1] - plan[row, 1]) * table[num_heads, COST]
            )
            first = begin[0] // per_program
            last = (stop - 1) // per_program
            T.fill(total, 0)
            if overlap:
                T.pdl_sync()  # all above ran while attention still did
            if stop > begin[0]:
                if last > first:
                    for i in T.serial((last - first + _PARTS) // _PARTS):
                        earlier_top = top
                        for p in T.unroll(_PARTS):
                            program = T.min(first + i * _PARTS + p, last)
                            # The first instance ends with this head, unless it also began with it.
                            part_lse[p] = lse[
                                program,
                                T.if_then_else((program == first) & (program * per_program < begin[0]), 1, 0),
                                query_head % g,
                            ]
                            if first + i * _PARTS + p > last:
                                part_lse[p] = NEG
                            for j in parallel(d):
                                part[p, j] = parts[
                                    program,
                                    T.if_then_else(
                                        (program == first) & (program * per_program < begin[0]), 1, 0
                                    ),
                                    query_head % g,
                                    j,
                                ]
                        for p in T.unroll(_PARTS):
                            top = T.max(top, part_lse[p])
                        weight = T.exp2(earlier_top - top)
                        sum_of_weights = sum_of_weights * weight
                        for j in parallel(d):
                            total[j] = total[j] * weight
                        for p in T.unroll(_PARTS):
                            weight = T.exp2(part_lse[p] - top)
                            sum_of_weights += weight
                            for j in parallel(d):
                                total[j] = total[j] + weight * part[p, j]
                    for j in parallel(d):
                        output[row, query_head, j] = T.cast(total[j] / sum_of_weights, dtype)
            else:  # a row without tokens
                for j in parallel(d):
                    output[row, query_head, j] = T.cast(0, dtype)

    return leank_merge


def append_tokens(shape: KernelShape, cpu: bool = False, overlap: bool = False) -> Any:
    """Return the kernel that adds one token per row: kept channels to the store, the rest to the window.

    It is the flush too: kept channels lie in the store from the start, so pruning moves nothing. `overlap` as
    in `merge_parts`.
    """
    d, e, dtype = shape.head_dim, shape.chunk_size, shape.dtype
    batch, heads, kept, dropped = T.dynamic("batch, heads, kept, dropped")
    value_rows, window_rows, layouts, all_chunks = T.dynamic("value_rows, window_rows, layouts, all_chunks")
    # Tensors of no rows arrive as placeholders, so K and V need not agree in length.
    capacity, value_capacity, slots, value_slots = T.dynamic("capacity, value_capacity, slots, value_slots")
    table_rows, flags = T.dynamic("table_rows, flags")
    parallel = T.grid if cpu else T.Parallel
    threads = {} if cpu else {"threads": WARPGROUP}

    @T.prim_func
    def leank_append(
        keys: T.Tensor((batch, heads, d), dtype),
        new_values: T.Tensor((batch, heads, d), dtype),
        kept_keys: T.Tensor((batch, kept, capacity, e), dtype),
        values: T.Tensor((batch, value_rows, value_capacity, d), dtype),
        window_keys: T.Tensor((batch, dropped, slots, e), dtype),
        window_values: T.Tensor((batch, window_rows, value_slots, d), dtype),
        index: T.Tensor((layouts, all_chunks, e), "int32"),
        table: T.Tensor((table_rows, 8), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        valid: T.Tensor((flags,), "uint8"),
        sink_size: T.int32,
        ring_size: T.int32,
    ):
        with T.Kernel(heads, batch, **threads) as (head, row):
            token = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            kept_chunk = T.alloc_var("int32")
            num_kept = T.alloc_var("int32")
            dropped_chunk = T.alloc_var("int32")
            num_chunks = T.alloc_var("int32")
            if overlap:
                T.pdl_trigger()  # attention may be launched, and waits for the end of this
            token = lengths[row] - 1
            slot = T.if_then_else(token < sink_size, token, sink_size + (token - sink_size) % ring_size)
            kept_chunk = table[head, 0]
            num_kept = table[head, 1]
            dropped_chunk = table[head, 3]
            num_chunks = num_kept + table[head, 4]
            if (valid[T.if_then_else(flags > 1, row, 0)] != 0) & (token >= 0):
                for c, j in parallel(shape.max_chunks, e):
                    if c < num_chunks:
                        chunk = T.if_then_else(
                            c < num_kept,
                            kept_chunk + c,
                            table[table_rows - 1, 0] + dropped_chunk + c - num_kept,
                        )
                        lane = index[T.if_then_else(layouts > 1, row, 0), chunk, j]
                        channel = T.if_then_else(
                            lane >= 0, keys[row, head, T.max(lane, 0) % d], T.cast(0, dtype)
                        )
                        if c < num_kept:
                            kept_keys[row, kept_chunk + c, token, j] = channel
                        else:
                            window_keys[row, dropped_chunk + c - num_kept, slot, j] = channel
                if num_kept > 0:
                    for j in parallel(d):
                        values[row, table[head, 2], token, j] = new_values[row, head, j]
                else:
                    for j in parallel(d):
                        window_values[row, table[head, 5], slot, j] = new_values[row, head, j]

    return leank_append
