"""Decode attention in TileLang for GPUs before Hopper, and for the CPU, where tests run it in plain loops.

The same walk over tiles as in kernel_hopper_leank, by 128 threads that load through cp.async and compute
with mma.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_leank import (
    FULL_ROW,
    WARPGROUP,
    KernelShape,
    begin_softmax,
    drop_pruned,
    find_limits,
    find_masks,
    hide_tokens,
    in_order,
    is_unseen,
    kernel_fp8,
    load_query,
    pool_types,
    scale_types,
    sinks_type,
    softmax_tile,
    store_segment,
    write_whole_weights,
)
from .kernel_line_leank import (
    TILE,
    Page,
    Seg,
    T,
    Tile,
    drops_values,
    find_pages,
    find_segments,
    has_values,
    load_tile,
    locate_segment,
    locate_tile,
    loops,
    stretch_bounds,
    weighs_apart,
)


def generic_attention(shape: KernelShape, cpu: bool = False) -> Any:
    """Return decode attention for GPUs before Hopper, or for the CPU.

    TileLang 0.1.15 cannot pipeline a loop of dynamic length through cp.async (the wait count must be static),
    so the ring of buffers is written out: every tile commits one group, which may be empty.
    """
    d, e, n = shape.head_dim, shape.chunk_size, shape.num_queries
    f, dv, num_values = shape.value_chunk, shape.value_rows, shape.num_values
    g, stages, dtype, size = shape.num_groups, shape.num_stages, shape.query_type, shape.load_tokens
    chunks, blocks = list(range(shape.max_chunks)), list(range(num_values))
    num_loads, value_spans = TILE // size, [(c, 0, f) for c in blocks]
    batch, heads, width = T.dynamic("batch, heads, width")
    layouts, all_chunks, entries, window_entries = T.dynamic("layouts, all_chunks, entries, window_entries")
    pools, scales = pool_types(shape, cpu), scale_types(shape)
    fp8, operand = shape.is_fp8, shape.product_type
    table_rows, plan_rows, programs = T.dynamic("table_rows, plan_rows, programs")
    has_sinks = shape.has_sinks
    shared, fragment, parallel, threads = loops(cpu, WARPGROUP)
    scalar = {"coalesced_width": T.int32(1)} if fp8 and not cpu else {}
    policy = {} if cpu else {"policy": FULL_ROW}
    options = {} if cpu else {"batch": n // 4}
    ahead = list(range(stages - 1))
    ring = () if cpu else (stages,)  # the CPU's gemm takes matrices alone

    def staged(buffer: Any, stage: Any) -> Any:
        return buffer if cpu else buffer[stage, :, :]

    def room(buffer: Any, first: int, last: int, start: int, stop: int, stage: Any) -> Any:
        return buffer[first:last, start:stop] if cpu else buffer[stage, first:last, start:stop]

    @T.macro
    def fetch(source: Any, target: Any) -> None:
        if cpu:
            T.copy(source, target)
        else:
            T.async_copy(source, target, annotations={"no_implicit_async_commit_wait": 1})

    @T.macro
    def commit() -> None:
        if not cpu:
            T.ptx_commit_group()

    @T.macro
    def load(
        tile: Any, pages: Any, seg: Any, t: Any, sink_size: Any, stage: Any, k: Any, v: Any, kept_keys: Any,
        values: Any, window_keys: Any, window_values: Any, page_table: Any, window_table: Any,
    ) -> None:  # fmt: skip
        locate_tile(tile, seg, t, sink_size)
        find_pages(pages, tile, seg, page_table, window_table, kept_keys, window_keys, size, num_values)
        load_tile(
            fetch, lambda *place: room(*place, stage), k, v, kept_keys, values, window_keys, window_values,
            tile, pages, seg, tile[Tile.WHOLE] != 0, value_spans,
        )  # fmt: skip

    def raise_top(scores: Any, top: Any) -> None:
        T.reduce_max(scores, top, dim=0, clear=False, **options)

    @T.macro
    def multiply_keys(k: Any, q: Any, c: int, stage: Any, scores: Any, wide: Any) -> None:
        if fp8:
            for i, j in parallel(TILE, e):
                wide[i, j] = kernel_fp8.from_fp8(k[c][i, j] if cpu else k[c][stage, i, j], operand)
            T.gemm(wide, q[c], scores, transpose_B=True, **policy)
        else:
            T.gemm(staged(k[c], stage), q[c], scores, transpose_B=True, **policy)

    @T.macro
    def multiply_values(v: Any, stage: Any, weights: Any, out: Any, wide: Any) -> None:
        if fp8:
            for i, j in parallel(dv, TILE):
                wide[i, j] = kernel_fp8.from_fp8(v[j, i] if cpu else v[stage, j, i], operand)
            T.gemm(wide, weights, out, transpose_B=True, **policy)
        else:
            T.gemm(staged(v, stage), weights, out, transpose_A=True, transpose_B=True, **policy)

    @T.prim_func
    def leank_attention(
        query: T.Tensor((batch, heads, width, d), dtype),
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
        seen: T.Tensor((batch, width), "int32"),
        pruned: T.Tensor((batch, width), "int32"),
        plan: T.Tensor((plan_rows, 2), "int32"),
        sinks: sinks_type(),
        parts: T.Tensor((programs, 2, n, d), "float32"),
        lse: T.Tensor((programs, 2, n), "float32"),
        output: T.Tensor((batch, heads, width, d), dtype),
        first: T.int32,
        columns: T.int32,
        sink_size: T.int32,
        scale: T.float32,
        early: T.int32,
    ):
        with T.Kernel(programs, **threads) as program:
            if not cpu:  # else loads would not be cp.async's, which take 16 bytes
                T.assume(kept_keys.strides[0] % (16 if fp8 else 8) == 0)
                T.assume(values.strides[0] % (16 if fp8 else 8) == 0)
                T.assume(window_keys.strides[0] % (16 if fp8 else 8) == 0)
                T.assume(window_values.strides[0] % (16 if fp8 else 8) == 0)
            q = [shared((n, e), operand) for _ in chunks]
            k = [shared((*ring, TILE, e), shape.stored_type) for _ in chunks]
            v = [shared((*ring, TILE, dv), shape.stored_type) for _ in blocks]
            weights = shared((n, TILE), operand)
            wide_k = fragment((TILE, e), operand) if fp8 else None
            wide_v = fragment((dv, TILE), operand) if fp8 else None
            limits = shared((2, n), "int32")
            scores = fragment((TILE, n), "float32")
            total = fragment((TILE, n), "float32")
            out = [fragment((dv, n), "float32") for _ in blocks]
            top = fragment((n,), "float32")
            earlier_top = fragment((n,), "float32")
            rescale = fragment((n,), "float32")
            sums = fragment((n,), "float32")
            seg = T.alloc_local((Seg.SIZE,), "int32")
            tile = T.alloc_local((Tile.SIZE,), "int32")
            pages = T.alloc_local((num_loads, Page.SIZE), "int32")
            masks = T.alloc_local((2,), "int32")
            span = T.alloc_local((2,), "int32")
            segments = T.alloc_local((2,), "int32")
            begin = T.alloc_local((1,), "int32")
            chunk = T.alloc_local((1,), "int32")
            stage = T.alloc_var("int32")
            num_heads = table_rows - 1
            stretch_bounds(span, program, programs, num_heads, table, plan, batch)
            find_segments(segments, span, begin, batch, num_heads, table, plan, cpu)
            if dv > f:
                for c in blocks:
                    T.fill(v[c], 0)
            for s in T.serial(segments[1]):
                locate_segment(seg, segments[0] + s, span, begin, num_heads, table, seen, plan, num_values)
                find_limits(parallel, limits, seg, seen, pruned, first, columns, sink_size, g)
                load_query(
                    parallel, chunks, q, seg, chunk, query, index, table, num_heads, first, columns, g,
                    in_order, key_scale if fp8 else None, scalar,
                )  # fmt: skip
                for c in blocks:
                    T.fill(out[c], 0)
                begin_softmax(parallel, top, total, seg, sinks if has_sinks else None, first, g)
                for r in ahead:
                    if seg[Seg.FIRST] + r < seg[Seg.STOP]:
                        load(
                            tile, pages, seg, seg[Seg.FIRST] + r, sink_size, r, k, v,
                            kept_keys, values, window_keys, window_values, page_table, window_table,
                        )  # fmt: skip
                    commit()
                for t in T.serial(seg[Seg.STOP] - seg[Seg.FIRST]):
                    if seg[Seg.FIRST] + t + stages - 1 < seg[Seg.STOP]:
                        load(
                            tile, pages, seg, seg[Seg.FIRST] + t + stages - 1, sink_size,
                            (t + stages - 1) % stages, k, v,
                            kept_keys, values, window_keys, window_values, page_table, window_table,
                        )  # fmt: skip
                    commit()
                    stage = t % stages
                    locate_tile(tile, seg, seg[Seg.FIRST] + t, sink_size)
                    if not cpu:
                        T.ptx_wait_group(stages - 1)
                        T.sync_threads()
                    T.clear(scores)
                    T.fill(masks, 0)
                    if tile[Tile.WHOLE] != 0:
                        find_masks(masks, tile, seg, limits, sink_size, num_values)
                        for c in chunks:
                            if (c >= seg[Seg.NUM_KEPT]) & (c < tile[Tile.CHUNKS]):
                                multiply_keys(k, q, c, stage, scores, wide_k)
                        if masks[0] != 0:
                            drop_pruned(parallel, scores, tile, limits, sink_size)
                    for c in chunks:
                        if c < seg[Seg.NUM_KEPT]:
                            multiply_keys(k, q, c, stage, scores, wide_k)
                    if masks[1] != 0:
                        hide_tokens(parallel, scores, tile, seg, limits, sink_size)
                        for c in blocks:
                            for i, j in parallel(TILE, dv):
                                if is_unseen(tile[Tile.TOKEN] + i, seg, limits, sink_size, c, num_values):
                                    if cpu:
                                        v[c][i, j] = T.cast(0, shape.stored_type)
                                    else:
                                        v[c][stage, i, j] = T.cast(0, shape.stored_type)
                    softmax_tile(parallel, scores, top, earlier_top, rescale, total, out, scale, raise_top)
                    for i, j in parallel(TILE, n):
                        weights[j, i] = T.cast(scores[i, j], operand)
                    if not cpu:
                        T.sync_threads()
                    for c in blocks:
                        if has_values(seg, c, num_values, (tile[Tile.WHOLE] != 0) & (masks[0] == 0)):
                            multiply_values(v[c], stage, weights, out[c], wide_v)
                    if weighs_apart(seg, masks, num_values):
                        if not cpu:
                            T.sync_threads()
                        write_whole_weights(parallel, weights, scores, tile, limits, sink_size)
                        if not cpu:
                            T.sync_threads()
                        for c in blocks:
                            if drops_values(seg, c, num_values):
                                multiply_values(v[c], stage, weights, out[c], wide_v)
                    if not cpu:
                        T.sync_threads()
                store_segment(
                    parallel, seg, span, program, T.if_then_else(s > 0, 1, 0), out, total, top, sums,
                    parts, lse, output, first, columns, g, options, in_order, value_scale if fp8 else None,
                    f,
                )  # fmt: skip

    return leank_attention
