"""Decode attention in TileLang, twice: for Hopper, and for other GPUs and the CPU.

Both walk the stretch of tiles that a program instance takes (see kernel_leank): for every head of a row that
the stretch touches they load its queries, run over its tiles with a running softmax, and write the result.

    hopper_attention     one warp loads tiles through TMA, one warpgroup computes with wgmma
    generic_attention    128 threads load through cp.async and compute with mma; in plain loops on the
                         CPU, for tests
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

try:
    import tilelang.language as T  # noqa: N812
except ImportError as error:
    raise ImportError(f"the decode kernels need tilelang (pip install tilelang): {error}") from error

from .kernel_leank import (
    CHUNKS,
    DROPPED,
    FIRST,
    FULL_ROW,
    KEPT,
    NEG,
    NUM_KEPT,
    ROW,
    SEG_SIZE,
    SLOT,
    STOP,
    TILE,
    TILE_SIZE,
    TOKEN,
    VALID,
    VALUE_ROW,
    WARPGROUP,
    WINDOW_ROW,
    KernelShape,
    find_segments,
    load_query,
    locate_segment,
    locate_tile,
    softmax_tile,
    store_segment,
    stretch_bounds,
)


def hopper_attention(shape: KernelShape) -> Any:
    """Return decode attention for sm_90a: TMA and wgmma, warp-specialised by hand.

    TileLang's own warp specialisation cannot place branches over chunks (layout inference fails), and a loop
    of one turn may deadlock in it.
    """
    d, e, n, dv = shape.head_dim, shape.chunk_size, shape.num_queries, shape.value_size
    g, stages, dtype = shape.num_groups, shape.num_stages, shape.dtype
    chunks = list(range(shape.max_chunks))
    batch, heads, kept, dropped = T.dynamic("batch, heads, kept, dropped")
    value_rows, window_rows, layouts, all_chunks = T.dynamic("value_rows, window_rows, layouts, all_chunks")
    # Tensors of no rows arrive as placeholders, so K and V need not agree in length.
    capacity, value_capacity, slots, value_slots = T.dynamic("capacity, value_capacity, slots, value_slots")
    table_rows, plan_rows, programs = T.dynamic("table_rows, plan_rows, programs")
    options = {"batch": 2}

    @T.prim_func
    def leank_attention_hopper(
        query: T.Tensor((batch, heads, d), dtype),
        kept_keys: T.Tensor((batch, kept, capacity, e), dtype),
        values: T.Tensor((batch, value_rows, value_capacity, d), dtype),
        window_keys: T.Tensor((batch, dropped, slots, e), dtype),
        window_values: T.Tensor((batch, window_rows, value_slots, d), dtype),
        index: T.Tensor((layouts, all_chunks, e), "int32"),
        table: T.Tensor((table_rows, 8), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        pruned_lengths: T.Tensor((batch,), "int32"),
        plan: T.Tensor((plan_rows, 2), "int32"),
        parts: T.Tensor((programs, 2, n, d), "float32"),
        lse: T.Tensor((programs, 2, n), "float32"),
        output: T.Tensor((batch, heads, d), dtype),
        sink_size: T.int32,
        ring_size: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(programs, threads=WARPGROUP + 32) as program:
            q = [T.alloc_shared((n, e), dtype) for _ in chunks]
            k = [T.alloc_shared((stages, TILE, e), dtype) for _ in chunks]
            v = T.alloc_shared((stages, TILE, dv), dtype)
            weights = T.alloc_shared((n, TILE), dtype)
            ready = T.alloc_barrier([32] * stages)
            free = T.alloc_barrier([WARPGROUP] * stages)
            scores = T.alloc_fragment((TILE, n), "float32")
            total = T.alloc_fragment((TILE, n), "float32")
            out = T.alloc_fragment((dv, n), "float32")
            top = T.alloc_fragment((n,), "float32")
            earlier_top = T.alloc_fragment((n,), "float32")
            rescale = T.alloc_fragment((n,), "float32")
            sums = T.alloc_fragment((n,), "float32")
            seg = T.alloc_local((SEG_SIZE,), "int32")
            tile = T.alloc_local((TILE_SIZE,), "int32")
            span = T.alloc_local((2,), "int32")
            segments = T.alloc_local((2,), "int32")
            begin = T.alloc_local((1,), "int32")
            chunk = T.alloc_local((1,), "int32")
            stage = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            num_heads = table_rows - 1
            T.pdl_sync()  # launched while the append still ran
            T.pdl_trigger()  # the merge may be launched, and waits for the parts where it needs them
            stretch_bounds(span, program, programs, num_heads, table, plan, batch)
            find_segments(segments, span, begin, batch, num_heads, table, plan)
            if T.get_thread_binding() >= WARPGROUP:
                for s in T.serial(segments[1]):
                    locate_segment(
                        seg, segments[0] + s, span, begin, num_heads, sink_size, ring_size,
                        table, lengths, pruned_lengths, plan,
                    )  # fmt: skip
                    for t in T.serial(seg[STOP] - seg[FIRST]):
                        locate_tile(tile, seg, seg[FIRST] + t, sink_size)
                        T.mbarrier_wait_parity(free[stage], phase ^ 1)
                        for c in chunks:
                            if c < seg[NUM_KEPT]:
                                T.tma_copy(
                                    kept_keys[seg[ROW], seg[KEPT] + c, tile[TOKEN] : tile[TOKEN] + TILE, 0:e],
                                    k[c][stage, :, :],
                                    barrier=ready[stage],
                                )
                            else:
                                if c < tile[CHUNKS]:
                                    T.tma_copy(
                                        window_keys[
                                            seg[ROW],
                                            seg[DROPPED] + c - seg[NUM_KEPT],
                                            tile[SLOT] : tile[SLOT] + TILE,
                                            0:e,
                                        ],
                                        k[c][stage, :, :],
                                        barrier=ready[stage],
                                    )
                        if seg[NUM_KEPT] > 0:
                            T.tma_copy(
                                values[seg[ROW], seg[VALUE_ROW], tile[TOKEN] : tile[TOKEN] + TILE, 0:dv],
                                v[stage, :, :],
                                barrier=ready[stage],
                            )
                        else:
                            T.tma_copy(
                                window_values[
                                    seg[ROW], seg[WINDOW_ROW], tile[SLOT] : tile[SLOT] + TILE, 0:dv
                                ],
                                v[stage, :, :],
                                barrier=ready[stage],
                            )
                        T.mbarrier_arrive(ready[stage])
                        stage += 1
                        if stage == stages:
                            stage = 0
                            phase = phase ^ 1
            else:
                for s in T.serial(segments[1]):
                    locate_segment(
                        seg, segments[0] + s, span, begin, num_heads, sink_size, ring_size,
                        table, lengths, pruned_lengths, plan,
                    )  # fmt: skip
                    load_query(T.Parallel, chunks, q, seg, chunk, query, index, table, num_heads, g)
                    T.fill(out, 0)
                    T.fill(total, 0)
                    T.fill(top, NEG)
                    T.fence_proxy_async()
                    T.sync_threads(1, WARPGROUP)
                    for t in T.serial(seg[STOP] - seg[FIRST]):
                        locate_tile(tile, seg, seg[FIRST] + t, sink_size)
                        T.mbarrier_wait_parity(ready[stage], phase)
                        T.clear(scores)
                        for c in chunks:
                            if c < tile[CHUNKS]:
                                T.wgmma_gemm(
                                    k[c][stage, :, :], q[c], scores, transpose_B=True, policy=FULL_ROW
                                )
                        if tile[VALID] < TILE:  # a weight of 0 times NaN would be NaN
                            for i, j in T.Parallel(TILE, dv):
                                if i >= tile[VALID]:
                                    v[stage, i, j] = T.cast(0, dtype)
                        T.wait_wgmma(0)
                        softmax_tile(
                            T.Parallel,
                            scores,
                            top,
                            earlier_top,
                            rescale,
                            total,
                            out,
                            tile[VALID],
                            scale,
                            options,
                        )
                        for i, j in T.Parallel(TILE, n):
                            weights[j, i] = T.cast(scores[i, j], dtype)
                        T.fence_proxy_async()
                        T.sync_threads(1, WARPGROUP)
                        T.wgmma_gemm(
                            v[stage, :, :], weights, out, transpose_A=True, transpose_B=True, policy=FULL_ROW
                        )
                        T.wait_wgmma(0)
                        T.mbarrier_arrive(free[stage])
                        stage += 1
                        if stage == stages:
                            stage = 0
                            phase = phase ^ 1
                    store_segment(
                        T.Parallel, seg, span, program, T.if_then_else(s > 0, 1, 0), out, total, top, sums,
                        parts, lse, output, g, options,
                    )  # fmt: skip

    return leank_attention_hopper


def generic_attention(shape: KernelShape, cpu: bool = False) -> Any:
    """Return decode attention for GPUs before Hopper, or for the CPU.

    TileLang 0.1.15 cannot pipeline a loop of dynamic length through cp.async (the wait count must be static),
    so the ring of buffers is written out: every tile commits the same number of groups, some of them empty.
    """
    d, e, n, dv = shape.head_dim, shape.chunk_size, shape.num_queries, shape.value_size
    g, stages, dtype = shape.num_groups, shape.num_stages, shape.dtype
    chunks = list(range(shape.max_chunks))
    batch, heads, kept, dropped = T.dynamic("batch, heads, kept, dropped")
    value_rows, window_rows, layouts, all_chunks = T.dynamic("value_rows, window_rows, layouts, all_chunks")
    # Tensors of no rows arrive as placeholders, so K and V need not agree in length.
    capacity, value_capacity, slots, value_slots = T.dynamic("capacity, value_capacity, slots, value_slots")
    table_rows, plan_rows, programs = T.dynamic("table_rows, plan_rows, programs")
    shared, fragment = (T.alloc_local, T.alloc_local) if cpu else (T.alloc_shared, T.alloc_fragment)
    parallel = T.grid if cpu else T.Parallel
    policy = {} if cpu else {"policy": FULL_ROW}
    options = {} if cpu else {"batch": 2}
    threads = {} if cpu else {"threads": WARPGROUP}
    ahead = list(range(stages - 1))
    ring = () if cpu else (stages,)  # the CPU's gemm takes matrices alone

    def staged(buffer: Any, stage: Any) -> Any:
        return buffer if cpu else buffer[stage, :, :]

    def value_columns(buffer: Any, stage: Any) -> Any:
        return buffer[:, 0:d] if cpu else buffer[stage, :, 0:d]

    @T.macro
    def load(source: Any, target: Any) -> None:
        if cpu:
            T.copy(source, target)
        else:
            T.async_copy(source, target)

    @T.macro
    def commit() -> None:
        if not cpu:
            T.ptx_commit_group()

    @T.macro
    def load_tile(
        tile: Any, seg: Any, t: Any, sink_size: Any, stage: Any, k: Any, v: Any,
        kept_keys: Any, values: Any, window_keys: Any, window_values: Any,
    ) -> None:  # fmt: skip
        locate_tile(tile, seg, t, sink_size)
        for c in chunks:
            if c < seg[NUM_KEPT]:
                load(
                    kept_keys[seg[ROW], seg[KEPT] + c, tile[TOKEN] : tile[TOKEN] + TILE, 0:e],
                    staged(k[c], stage),
                )
            else:
                if c < tile[CHUNKS]:
                    load(
                        window_keys[
                            seg[ROW], seg[DROPPED] + c - seg[NUM_KEPT], tile[SLOT] : tile[SLOT] + TILE, 0:e
                        ],
                        staged(k[c], stage),
                    )
                else:
                    commit()
        if seg[NUM_KEPT] > 0:
            load(
                values[seg[ROW], seg[VALUE_ROW], tile[TOKEN] : tile[TOKEN] + TILE, 0:d],
                value_columns(v, stage),
            )
        else:
            load(
                window_values[seg[ROW], seg[WINDOW_ROW], tile[SLOT] : tile[SLOT] + TILE, 0:d],
                value_columns(v, stage),
            )

    @T.prim_func
    def leank_attention(
        query: T.Tensor((batch, heads, d), dtype),
        kept_keys: T.Tensor((batch, kept, capacity, e), dtype),
        values: T.Tensor((batch, value_rows, value_capacity, d), dtype),
        window_keys: T.Tensor((batch, dropped, slots, e), dtype),
        window_values: T.Tensor((batch, window_rows, value_slots, d), dtype),
        index: T.Tensor((layouts, all_chunks, e), "int32"),
        table: T.Tensor((table_rows, 8), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        pruned_lengths: T.Tensor((batch,), "int32"),
        plan: T.Tensor((plan_rows, 2), "int32"),
        parts: T.Tensor((programs, 2, n, d), "float32"),
        lse: T.Tensor((programs, 2, n), "float32"),
        output: T.Tensor((batch, heads, d), dtype),
        sink_size: T.int32,
        ring_size: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(programs, **threads) as program:
            q = [shared((n, e), dtype) for _ in chunks]
            k = [shared((*ring, TILE, e), dtype) for _ in chunks]
            v = shared((*ring, TILE, dv), dtype)
            weights = shared((n, TILE), dtype)
            scores = fragment((TILE, n), "float32")
            total = fragment((TILE, n), "float32")
            out = fragment((dv, n), "float32")
            top = fragment((n,), "float32")
            earlier_top = fragment((n,), "float32")
            rescale = fragment((n,), "float32")
            sums = fragment((n,), "float32")
            seg = T.alloc_local((SEG_SIZE,), "int32")
            tile = T.alloc_local((TILE_SIZE,), "int32")
            span = T.alloc_local((2,), "int32")
            segments = T.alloc_local((2,), "int32")
            begin = T.alloc_local((1,), "int32")
            chunk = T.alloc_local((1,), "int32")
            stage = T.alloc_var("int32")
            num_heads = table_rows - 1
            stretch_bounds(span, program, programs, num_heads, table, plan, batch)
            find_segments(segments, span, begin, batch, num_heads, table, plan)
            if dv > d:
                T.fill(v, 0)
            for s in T.serial(segments[1]):
                locate_segment(
                    seg, segments[0] + s, span, begin, num_heads, sink_size, ring_size,
                    table, lengths, pruned_lengths, plan,
                )  # fmt: skip
                load_query(parallel, chunks, q, seg, chunk, query, index, table, num_heads, g)
                T.fill(out, 0)
                T.fill(total, 0)
                T.fill(top, NEG)
                for r in ahead:
                    if seg[FIRST] + r < seg[STOP]:
                        load_tile(
                            tile, seg, seg[FIRST] + r, sink_size, r, k, v,
                            kept_keys, values, window_keys, window_values,
                        )  # fmt: skip
                    else:
                        for _ in [*chunks, 0]:
                            commit()
                for t in T.serial(seg[STOP] - seg[FIRST]):
                    if seg[FIRST] + t + stages - 1 < seg[STOP]:
                        load_tile(
                            tile, seg, seg[FIRST] + t + stages - 1, sink_size,
                            (t + stages - 1) % stages, k, v,
                            kept_keys, values, window_keys, window_values,
                        )  # fmt: skip
                    else:
                        for _ in [*chunks, 0]:
                            commit()
                    stage = t % stages
                    locate_tile(tile, seg, seg[FIRST] + t, sink_size)
                    if not cpu:
                        T.ptx_wait_group((stages - 1) * (len(chunks) + 1))
                        T.sync_threads()
                    T.clear(scores)
                    for c in chunks:
                        if c < tile[CHUNKS]:
                            T.gemm(staged(k[c], stage), q[c], scores, transpose_B=True, **policy)
                    if tile[VALID] < TILE:  # a weight of 0 times NaN would be NaN
                        for i, j in parallel(TILE, dv):
                            if i >= tile[VALID]:
                                if cpu:
                                    v[i, j] = T.cast(0, dtype)
                                else:
                                    v[stage, i, j] = T.cast(0, dtype)
                    softmax_tile(
                        parallel, scores, top, earlier_top, rescale, total, out, tile[VALID], scale, options
                    )
                    for i, j in parallel(TILE, n):
                        weights[j, i] = T.cast(scores[i, j], dtype)
                    if not cpu:
                        T.sync_threads()
                    T.gemm(staged(v, stage), weights, out, transpose_A=True, transpose_B=True, **policy)
                    if not cpu:
                        T.sync_threads()
                store_segment(
                    parallel, seg, span, program, T.if_then_else(s > 0, 1, 0), out, total, top, sums,
                    parts, lse, output, g, options,
                )  # fmt: skip

    return leank_attention
