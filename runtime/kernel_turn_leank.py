"""Kernels of turns, many new tokens of a row, in TileLang: a row laid out densely, and attention to it.

    leank_copy_rows     K and V of rows and of their new tokens, zeros for what is pruned
    leank_attend_turn   attention to these, causal, which reads of pruned tokens what a head keeps alone

One block copies a tile of tokens of one head: chunks are put in the order of channels in shared memory.

Attention is flash attention for Hopper: one warp loads through TMA, two warpgroups take 64 queries of a KV
head each. While the values of one tile are weighed, the softmax of the next one is at work. Where queries are
few, several blocks share a head's tokens, and leave a part each with its log-sum-exp.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_key_leank import TILE
from .kernel_key_leank import TURN_QUERIES as QUERIES
from .kernel_key_leank import TURN_TOKENS as TOKENS
from .kernel_leank import FULL_ROW, NEG, WARP, WARPGROUP, KernelShape, kernel_fp8, pool_types, scale_types
from .kernel_line_leank import Head, T, loops, next_stage, place_in_ring

_MAX_STAGES = 4
_LN_2 = 0.6931471805599453
# As T.exp2, but numbers below 2^-126 are zero.
_EXP2_SOURCE = """
static __device__ __forceinline__ float leank_exp2(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}
"""


def _is_whole(token: Any, sink_size: Any, pruned: Any) -> Any:
    return (token < sink_size) | (token >= sink_size + pruned)


def _has_whole(token: Any, sink_size: Any, pruned: Any) -> Any:
    """Return whether of the tokens that attention takes at once, from this one on, some may not be pruned."""
    return (token < sink_size) | (token + TOKENS > sink_size + pruned)


def copy_rows(shape: KernelShape, cpu: bool = False, *, for_kernel: bool = False) -> Any:
    """Return the kernel that copies rows of a cache whose pages are tiles, and new tokens behind them.

    `for_kernel` copies for `leank_attend_turn`: of all heads, K chunk by chunk as it is stored, and nothing
    that it does not read. Else K of heads that see pruned tokens is copied in the order of channels.
    """
    d, e, f, dtype = shape.head_dim, shape.chunk_size, shape.value_chunk, shape.query_type
    blocks, slots = list(range(shape.num_values)), list(range(shape.max_chunks if for_kernel else d // e))
    width = len(slots) * e
    batch, layouts, all_chunks = T.dynamic("batch, layouts, all_chunks")
    entries, window_entries, table_rows = T.dynamic("entries, window_entries, table_rows")
    rows, tokens, heads, all_heads, columns = T.dynamic("rows, tokens, heads, all_heads, columns")
    pools, scales = pool_types(shape, cpu), scale_types(shape)
    line = 16 // (1 if shape.is_fp8 else 2)  # numbers of 16 bytes
    shared, fragment, parallel, threads = loops(cpu, WARPGROUP)

    def widened(stored: Any, scale: Any, row: Any, head: Any, channel: Any) -> Any:
        if not shape.is_fp8:
            return stored
        number = T.cast(kernel_fp8.from_fp8(stored, shape.product_type), "float32")
        return T.cast(number * scale[T.if_then_else(scale.shape[0] > 1, row, 0), head, channel], dtype)

    def place_of(slot: Any, lane: Any, channel: Any) -> Any:
        return slot * e + lane if for_kernel else channel

    @T.prim_func
    def leank_copy_rows(
        kept_keys: pools[0],
        values: pools[1],
        window_keys: pools[2],
        window_values: pools[3],
        index: T.Tensor((layouts, all_chunks, e), "int32"),
        table: T.Tensor((table_rows, 10), "int32"),
        page_table: T.Tensor((batch, entries), "int32"),
        window_table: T.Tensor((batch, window_entries), "int32"),
        key_scale: scales[0],
        value_scale: scales[1],
        new_keys: T.Tensor((rows, all_heads, columns, d), dtype),
        new_values: T.Tensor((rows, all_heads, columns, d), dtype),
        dense_keys: T.Tensor((rows, tokens, heads, width), dtype),
        dense_values: T.Tensor((rows, tokens, heads, d), dtype),
        first_row: T.int32,
        pruned: T.int32,
        sink_size: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens, TILE), all_heads, rows, **threads) as (block, head, number):
            if not cpu:  # else loads would not take 16 bytes
                T.assume(kept_keys.strides[0] % line == 0)
                T.assume(values.strides[0] % line == 0)
                T.assume(window_keys.strides[0] % line == 0)
                T.assume(window_values.strides[0] % line == 0)
            tile = shared((TILE, width), dtype)
            chunk = fragment((TILE, e), shape.stored_type)
            # Variables, as all loads of a page share them.
            row, layout, length = [T.alloc_var("int32") for _ in range(3)]
            page = T.alloc_var("int32", init=0)
            window_page = T.alloc_var("int32", init=0)
            num_kept, num_dropped, dropped, num_values, place = [T.alloc_var("int32") for _ in range(5)]
            written = T.alloc_var("int32", init=len(slots))
            row = first_row + number
            layout = T.if_then_else(layouts > 1, row, 0)
            length = tokens - columns
            num_kept = table[head, Head.NUM_KEPT]
            num_dropped = table[head, Head.NUM_DROPPED]
            dropped = table[table_rows - 1, Head.KEPT] + table[head, Head.DROPPED]
            num_values = table[head, Head.KEPT_VALUES]
            place = head if for_kernel else table[head, Head.SEEING]
            if for_kernel:
                written = T.if_then_else(
                    _has_whole(T.truncdiv(block * TILE, TOKENS) * TOKENS, sink_size, pruned),
                    num_kept + num_dropped,
                    num_kept,
                )
            if (place >= 0) & (written > 0):
                for i, j in parallel(TILE, width):
                    tile[i, j] = T.cast(0, dtype)
                if block * TILE < length:
                    page = page_table[row, block]
                    for c in T.serial(num_kept):
                        for i, j in parallel(TILE, e):
                            chunk[i, j] = kept_keys[page, table[head, Head.KEPT] + c, i, j]
                        for i, j in parallel(TILE, e):
                            channel = index[layout, table[head, Head.KEPT] + c, j]
                            if channel >= 0:
                                tile[i, place_of(c, j, T.max(channel, 0) % d)] = widened(
                                    chunk[i, j], key_scale, row, head, T.max(channel, 0) % d
                                )
                    if (block * TILE < sink_size) | (block * TILE + TILE > sink_size + pruned):
                        window_page = window_table[row, block]
                        for c in T.serial(num_dropped):
                            for i, j in parallel(TILE, e):
                                chunk[i, j] = window_keys[window_page, table[head, Head.DROPPED] + c, i, j]
                            for i, j in parallel(TILE, e):
                                channel = index[layout, dropped + c, j]
                                if (channel >= 0) & _is_whole(block * TILE + i, sink_size, pruned):
                                    tile[i, place_of(num_kept + c, j, T.max(channel, 0) % d)] = widened(
                                        chunk[i, j], key_scale, row, head, T.max(channel, 0) % d
                                    )
                if block * TILE + TILE > length:
                    for c in T.serial(num_kept + num_dropped):
                        for i, j in parallel(TILE, e):
                            channel = index[
                                layout,
                                T.if_then_else(
                                    c < num_kept, table[head, Head.KEPT] + c, dropped + c - num_kept
                                ),
                                j,
                            ]
                            if (channel >= 0) & (block * TILE + i >= length) & (block * TILE + i < tokens):
                                tile[i, place_of(c, j, T.max(channel, 0) % d)] = new_keys[
                                    number,
                                    head,
                                    T.max(T.min(block * TILE + i - length, columns - 1), 0),
                                    T.max(channel, 0) % d,
                                ]
                for c in slots:
                    if c < written:
                        for i, j in parallel(TILE, e):
                            if block * TILE + i < tokens:
                                dense_keys[number, block * TILE + i, place, c * e + j] = tile[i, c * e + j]
                for b in blocks:
                    if b < num_values:
                        for i, j in parallel(TILE, f):
                            if block * TILE + i < length:
                                dense_values[number, block * TILE + i, place, b * f + j] = widened(
                                    values[page, table[head, Head.VALUE] + b, i, j],
                                    value_scale, row, head, b * f + j,
                                )  # fmt: skip
                    else:
                        for i, j in parallel(TILE, f):
                            if block * TILE + i < length:
                                if _is_whole(block * TILE + i, sink_size, pruned):
                                    dense_values[number, block * TILE + i, place, b * f + j] = widened(
                                        window_values[
                                            window_page, table[head, Head.WINDOW_VALUE] + b - num_values, i, j
                                        ],
                                        value_scale, row, head, b * f + j,
                                    )  # fmt: skip
                                else:
                                    dense_values[number, block * TILE + i, place, b * f + j] = T.cast(
                                        0, dtype
                                    )
                if block * TILE + TILE > length:
                    for i, j in parallel(TILE, d):
                        if (block * TILE + i >= length) & (block * TILE + i < tokens):
                            dense_values[number, block * TILE + i, place, j] = new_values[
                                number, head, block * TILE + i - length, j
                            ]

    return leank_copy_rows


def attend_turn(shape: KernelShape, per_block: int) -> Any:
    """Return the kernel of attention to rows laid out densely, given a block's bytes of shared memory."""
    d, e, g, dtype = shape.head_dim, shape.chunk_size, shape.num_groups, shape.query_type
    chunks, threads = list(range(shape.max_chunks)), 2 * WARPGROUP
    width = shape.max_chunks * e
    # Beside the queries K and V; barriers are few.
    stages = min((per_block - 2 * QUERIES * width - 1024) // (2 * TOKENS * (width + d)), _MAX_STAGES)
    num_parts, num_rows, heads, columns, tokens = T.dynamic("parts, rows, heads, columns, tokens")
    layouts, all_chunks, table_rows = T.dynamic("layouts, all_chunks, table_rows")

    def exp2(exponent: Any) -> Any:
        return T.call_extern("float32", "leank_exp2", exponent)

    def find_token(tile: Any, begin: Any, hidden: Any) -> Any:
        """Return the first token of one of the tiles that a head sees."""
        return T.if_then_else(tile < begin, tile, tile + hidden) * TOKENS

    @T.prim_func
    def leank_attend_turn(
        query: T.Tensor((num_rows, heads * g, columns, d), dtype),
        keys: T.Tensor((num_rows, tokens, heads, width), dtype),
        values: T.Tensor((num_rows, tokens, heads, d), dtype),
        index: T.Tensor((layouts, all_chunks, e), "int32"),
        table: T.Tensor((table_rows, 10), "int32"),
        parts: T.Tensor((num_parts, num_rows, heads * g, columns, d), "float32"),
        lse: T.Tensor((num_parts, num_rows, heads * g, columns), "float32"),
        first_row: T.int32,
        pruned: T.int32,
        sink_size: T.int32,
        scale: T.float32,
    ):
        blocks = T.ceildiv(columns * g, QUERIES)
        with T.Kernel(blocks, heads * num_parts, num_rows, threads=threads + WARPGROUP) as (block, y, row):
            q = [T.alloc_shared((QUERIES, e), dtype) for _ in chunks]
            k = [T.alloc_shared((stages, TOKENS, e), dtype) for _ in chunks]
            v = T.alloc_shared((stages, TOKENS, d), dtype)
            ready = T.alloc_barrier([WARP] * stages)
            free = T.alloc_barrier([threads] * stages)
            scores = T.alloc_fragment((QUERIES, TOKENS), "float32")
            weights = T.alloc_fragment((QUERIES, TOKENS), dtype)
            out = T.alloc_fragment((QUERIES, d), "float32")
            top, earlier_top, rescale = [T.alloc_fragment((QUERIES,), "float32") for _ in range(3)]
            sums, total = [T.alloc_fragment((QUERIES,), "float32") for _ in range(2)]
            T.import_source(_EXP2_SOURCE)
            head, part, kept, every, layout, seen = [T.alloc_var("int32") for _ in range(6)]
            begin, hidden, first, count, token = [T.alloc_var("int32") for _ in range(5)]
            stage = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            before = T.alloc_var("int32", init=0)
            head = y % heads
            part = T.truncdiv(y, heads)
            kept = table[head, Head.NUM_KEPT]
            every = kept + table[head, Head.NUM_DROPPED]
            layout = T.if_then_else(layouts > 1, first_row + row, 0)
            seen = tokens - columns + T.min(T.truncdiv(block * QUERIES, g) + 1, columns)  # by the first query
            # Tiles of pruned tokens, which a head of width 0 does not see, and where they begin.
            begin = T.ceildiv(sink_size, TOKENS)
            hidden = T.if_then_else(kept > 0, 0, T.max(T.truncdiv(sink_size + pruned, TOKENS) - begin, 0))
            count = T.min(T.truncdiv((block + 1) * QUERIES - 1, g) + 1, columns) + tokens - columns
            count = T.ceildiv(count, TOKENS) - hidden
            first = T.ceildiv(count, num_parts) * part
            count = T.max(T.min(count - first, T.ceildiv(count, num_parts)), 0)
            if T.get_thread_binding() >= threads:
                T.dec_max_nreg(24)
                for t in T.serial(T.if_then_else(T.get_thread_binding() < threads + WARP, count, 0)):
                    token = find_token(first + t, begin, hidden)
                    T.mbarrier_wait_parity(free[stage], phase ^ 1)
                    for c in chunks:
                        if (c < kept) | ((c < every) & _has_whole(token, sink_size, pruned)):
                            T.tma_copy(
                                keys[row, token : token + TOKENS, head, c * e : c * e + e],
                                k[c][place_in_ring(stage, stages), :, :],
                                barrier=ready[stage],
                            )
                    T.tma_copy(
                        values[row, token : token + TOKENS, head, 0:d],
                        v[place_in_ring(stage, stages), :, :],
                        barrier=ready[stage],
                    )
                    T.mbarrier_arrive(ready[stage])
                    next_stage(stage, phase, stages)
            else:
                T.inc_max_nreg(240)
                for c in chunks:
                    for i, j in T.Parallel(QUERIES, e):
                        channel = index[
                            layout,
                            T.min(
                                T.if_then_else(
                                    c < kept,
                                    table[head, Head.KEPT] + c,
                                    table[table_rows - 1, Head.KEPT] + table[head, Head.DROPPED] + c - kept,
                                ),
                                all_chunks - 1,  # a head of fewer chunks does not read the rest
                            ),
                            j,
                        ]
                        q[c][i, j] = T.if_then_else(
                            channel >= 0,
                            query[
                                row,
                                head * g + (block * QUERIES + i) % g,
                                T.min(T.truncdiv(block * QUERIES + i, g), columns - 1),
                                T.max(channel, 0) % d,
                            ],
                            T.cast(0, dtype),
                        )
                T.fill(out, 0)
                T.fill(total, 0)
                T.fill(top, NEG / 2)  # far from what is hidden: a difference is taken of rounded products
                T.fill(weights, 0)
                T.fence_proxy_async()
                T.sync_threads(1, threads)
                for t in T.serial(count):
                    token = find_token(first + t, begin, hidden)
                    T.mbarrier_wait_parity(ready[stage], phase)
                    T.clear(scores)
                    for c in chunks:
                        if (c < kept) | ((c < every) & _has_whole(token, sink_size, pruned)):
                            T.wgmma_gemm(q[c], k[c][stage, :, :], scores, transpose_B=True, policy=FULL_ROW)
                    if t > 0:
                        T.wgmma_gemm(weights, v[before, :, :], out, policy=FULL_ROW)
                        T.wait_wgmma(1)
                    else:
                        T.wait_wgmma(0)
                    if (token + TOKENS > seen) | ((kept == 0) & (token < sink_size + pruned)):
                        for i, j in T.Parallel(QUERIES, TOKENS):
                            scores[i, j] = T.if_then_else(
                                (token + j <= tokens - columns + T.truncdiv(block * QUERIES + i, g))
                                & ((kept > 0) | _is_whole(token + j, sink_size, pruned)),
                                scores[i, j],
                                NEG,
                            )
                    T.copy(top, earlier_top)
                    T.reduce_max(scores, top, dim=1, clear=False)
                    for i in T.Parallel(QUERIES):
                        rescale[i] = exp2((earlier_top[i] - top[i]) * scale)
                    for i, j in T.Parallel(QUERIES, TOKENS):
                        scores[i, j] = exp2(scores[i, j] * scale - top[i] * scale)
                    T.reduce_sum(scores, sums, dim=1)
                    for i in T.Parallel(QUERIES):
                        total[i] = total[i] * rescale[i] + sums[i]
                    T.wait_wgmma(0)
                    if t > 0:
                        T.mbarrier_arrive(free[before])
                    for i, j in T.Parallel(QUERIES, d):
                        out[i, j] *= rescale[i]
                    T.copy(scores, weights)
                    before = stage
                    next_stage(stage, phase, stages)
                if count > 0:
                    T.wgmma_gemm(weights, v[before, :, :], out, policy=FULL_ROW)
                    T.wait_wgmma(0)
                for i, j in T.Parallel(QUERIES, d):
                    if block * QUERIES + i < columns * g:
                        parts[
                            part,
                            row,
                            head * g + (block * QUERIES + i) % g,
                            T.truncdiv(block * QUERIES + i, g),
                            j,
                        ] = out[i, j] / T.max(total[i], 1e-30)
                for i in T.Parallel(QUERIES):
                    if block * QUERIES + i < columns * g:
                        lse[
                            part,
                            row,
                            head * g + (block * QUERIES + i) % g,
                            T.truncdiv(block * QUERIES + i, g),
                        ] = (T.log2(T.max(total[i], 1e-30)) + top[i] * scale) * _LN_2

    return leank_attend_turn
