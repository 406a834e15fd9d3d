"""Decode attention in TileLang for Hopper: one warp loads through TMA, one warpgroup computes with wgmma.

Program instances walk the stretch of tiles that they take (see kernel_leank): for every head of a row that
the stretch touches they load its queries, run over its tiles with a running softmax, and write the result.

One token and drafts differ in the number of columns alone, which is data. A whole tile takes its dropped
channels first, so that their scores can be dropped where a token is not whole, before the others are added.
The body for other GPUs, kernel_generic_leank, does the same.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_leank import (
    FULL_ROW,
    WARP,
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
    stretch_bounds,
    weighs_apart,
)

# In steps of at most so many tokens K and V are the first to leave L2, where what other kernels read stays.
_FEW_TOKENS = 16

# The greatest score of every query, of all warps: one barrier, where TileLang's reduction takes four. It is
# read before the barrier that weights wait at, so that the next tile may write it anew.
_TOP_SOURCE = r"""
template <int kQueries>
__device__ __forceinline__ void leank_raise_top(const float *scores, float *top, void *shared) {
  float *greatest = static_cast<float *>(shared);
  constexpr int kEights = kQueries / 8;
  int lane = threadIdx.x % 32, place = lane % 4 * 2;
  float2 *written = reinterpret_cast<float2 *>(greatest + threadIdx.x / 32 * kQueries);
  float most[2 * kEights];
#pragma unroll
  for (int i = 0; i < 2 * kEights; ++i) {
    most[i] = fmaxf(scores[i / 2 * 4 + i % 2], scores[i / 2 * 4 + i % 2 + 2]);
#pragma unroll
    for (int apart = 16; apart >= 4; apart /= 2)
      most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffff, most[i], apart));
  }
  if (lane < 4) {
#pragma unroll
    for (int i = 0; i < kEights; ++i)
      written[i * 4 + lane] = make_float2(most[2 * i], most[2 * i + 1]);
  }
  asm volatile("bar.sync 2, 128;" ::: "memory");
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      float2 other = *reinterpret_cast<const float2 *>(greatest + warp * kQueries + i * 8 + place);
      top[2 * i] = fmaxf(top[2 * i], other.x);
      top[2 * i + 1] = fmaxf(top[2 * i + 1], other.y);
    }
  }
}
"""


def hopper_attention(shape: KernelShape) -> Any:
    """Return decode attention for sm_90a: TMA and wgmma, warp-specialised by hand.

    TileLang's own warp specialisation cannot place branches over chunks (layout inference fails), and a loop
    of one turn may deadlock in it. It is compiled without TileLang's own barriers, which it would put into
    every tile: the reduction's keep threads together wherever shared memory is written again.

    What needs no kernel of this step's layer is read before the wait for the one ahead where `early` says
    that plan, counts and tables are older than that one's own wait.
    """
    d, e, n = shape.head_dim, shape.chunk_size, shape.num_queries
    f, dv, num_values = shape.value_chunk, shape.value_rows, shape.num_values
    g, stages, dtype, size = shape.num_groups, shape.num_stages, shape.query_type, shape.load_tokens
    chunks, blocks = list(range(shape.max_chunks)), list(range(num_values))
    loads = list(range(TILE // size))
    fp8, operand = shape.is_fp8, shape.product_type
    # A box of TMA is 128 bytes wide; TileLang cuts wider ones where they take all rows of a buffer.
    box = 128 if fp8 and dv % 128 == 0 else 64
    spans = [(0, dv)] if size == TILE else [(start, start + box) for start in range(0, dv, box)]
    columns_of_v = [(c, start, stop) for c in blocks for start, stop in spans]
    lane_of = (lambda place: kernel_fp8.lane_of_place(place, e)) if fp8 else in_order
    channel_of = (lambda row: kernel_fp8.channel_of_row(row, dv)) if fp8 else in_order
    # Loops that convert are no vectors, and TileLang warns where it tries.
    scalar = {"coalesced_width": T.int32(1)} if fp8 else {}
    batch, heads, width = T.dynamic("batch, heads, width")
    layouts, all_chunks, entries, window_entries = T.dynamic("layouts, all_chunks, entries, window_entries")
    pools, scales = pool_types(shape, False), scale_types(shape)
    table_rows, plan_rows, programs = T.dynamic("table_rows, plan_rows, programs")
    has_sinks = shape.has_sinks
    options = {"batch": n // 4}  # as many as a thread has: one pair of barriers for all

    @T.macro
    def multiply_keys(k: Any, q: Any, c: int, stage: Any, scores: Any, wide: Any) -> None:
        if fp8:
            T.wait_wgmma(1)  # the product before the last has read its operand
            T.call_extern("handle", f"leank_widen_keys<{e}>", k[c].data, stage, wide[c % 2].data)
            T.wgmma_gemm(wide[c % 2], q[c], scores, transpose_B=True, policy=FULL_ROW)
        else:
            T.wgmma_gemm(k[c][stage, :, :], q[c], scores, transpose_B=True, policy=FULL_ROW)
            T.wait_wgmma(0)  # in flight over a branch, ptxas waits after each of its instructions

    @T.macro
    def multiply_values(v: Any, weights: Any, out: Any, wide: Any) -> None:
        if fp8:
            T.wgmma_gemm(wide, weights, out, transpose_B=True, policy=FULL_ROW)
        else:
            T.wgmma_gemm(v, weights, out, transpose_A=True, transpose_B=True, policy=FULL_ROW)
        if num_values > 1:
            T.wait_wgmma(0)  # as above

    @T.macro
    def wait() -> None:
        if shape.begins_early:
            T.pdl_sync()

    @T.macro
    def look_up(
        pages: Any, tile: Any, seg: Any, ahead: Any, page_table: Any, window_table: Any, kept_keys: Any,
        window_keys: Any, sink_size: Any,
    ) -> None:  # fmt: skip
        index = T.alloc_var("int32")
        index = seg[Seg.FIRST] + ahead + T.get_thread_binding() % WARP
        if index < seg[Seg.STOP]:
            locate_tile(tile, seg, index, sink_size)
            find_pages(pages, tile, seg, page_table, window_table, kept_keys, window_keys, size, num_values)

    @T.prim_func
    def leank_attention_hopper(
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
        with T.Kernel(programs, threads=WARPGROUP + 32) as program:
            T.annotate_min_blocks_per_sm(shape.num_instances)
            q = [T.alloc_shared((n, e), operand) for _ in chunks]
            k = [T.alloc_shared((stages, TILE, e), shape.stored_type) for _ in chunks]
            v = [T.alloc_shared((stages, TILE, dv), shape.stored_type) for _ in blocks]
            weights = T.alloc_shared((n, TILE), operand)
            wide_k = [T.alloc_fragment((TILE, e), operand) for _ in range(2)] if fp8 else None
            wide_v = [T.alloc_fragment((dv, TILE), operand) if fp8 else None for _ in blocks]
            greatest = T.alloc_shared((WARPGROUP // 32, n), "float32")
            T.import_source(_TOP_SOURCE + kernel_fp8.WIDEN_SOURCE if fp8 else _TOP_SOURCE)
            if fp8:
                T.annotate_layout({block: kernel_fp8.swizzle_values(block) for block in v})
            limits = T.alloc_shared((2, n), "int32")
            ready = T.alloc_barrier([32] * stages)
            free = T.alloc_barrier([WARPGROUP] * stages)
            scores = T.alloc_fragment((TILE, n), "float32")
            total = T.alloc_fragment((TILE, n), "float32")
            out = [T.alloc_fragment((dv, n), "float32") for _ in blocks]
            top = T.alloc_fragment((n,), "float32")
            earlier_top = T.alloc_fragment((n,), "float32")
            rescale = T.alloc_fragment((n,), "float32")
            sums = T.alloc_fragment((n,), "float32")
            seg = T.alloc_local((Seg.SIZE,), "int32")
            tile = T.alloc_local((Tile.SIZE,), "int32")
            pages = T.alloc_local((len(loads), Page.SIZE), "int32")
            lane_pages = T.alloc_local((len(loads), Page.SIZE), "int32")
            next_pages = T.alloc_local((len(loads), Page.SIZE), "int32")
            masks = T.alloc_local((2,), "int32")
            span = T.alloc_local((2,), "int32")
            segments = T.alloc_local((2,), "int32")
            begin = T.alloc_local((1,), "int32")
            chunk = T.alloc_local((1,), "int32")
            stage = T.alloc_var("int32", init=0)
            phase = T.alloc_var("int32", init=0)
            num_heads = table_rows - 1
            if early == 0:
                wait()
            T.pdl_trigger()  # the merge may be launched, and waits for the parts where it needs them
            stretch_bounds(span, program, programs, num_heads, table, plan, batch)
            find_segments(segments, span, begin, batch, num_heads, table, plan, False)
            if segments[1] == 0:
                wait()  # no kernel may end before the one ahead of it
            if T.get_thread_binding() >= WARPGROUP:
                for s in T.serial(segments[1]):
                    locate_segment(
                        seg, segments[0] + s, span, begin, num_heads, table, seen, plan, num_values
                    )
                    # Every lane looks up the pages of one tile, of the next 32 while these are loaded: where
                    # pages lie takes divisions and a read that others wait for.
                    look_up(
                        next_pages, tile, seg, 0, page_table, window_table, kept_keys, window_keys, sink_size
                    )
                    wait()  # launched while the append still ran; tables are older
                    for t in T.serial(seg[Seg.STOP] - seg[Seg.FIRST]):
                        if t % WARP == 0:
                            T.copy(next_pages, lane_pages)
                            look_up(
                                next_pages, tile, seg, t + WARP, page_table, window_table, kept_keys,
                                window_keys, sink_size,
                            )  # fmt: skip
                        for b in loads:
                            for place in range(Page.SIZE):
                                pages[b, place] = T.shfl_sync(lane_pages[b, place], t % WARP)
                        tile[Tile.CHUNKS] = seg[Seg.NUM_KEPT] + T.if_then_else(
                            seg[Seg.FIRST] + t < seg[Seg.PRUNED_TILES], 0, seg[Seg.NUM_DROPPED]
                        )
                        T.mbarrier_wait_parity(free[stage], phase ^ 1)
                        for few, policy in ((True, "evict_first"), (False, None)):
                            if (batch * width <= _FEW_TOKENS) == few:
                                load_tile(
                                    lambda source, target, stage=stage, policy=policy: T.tma_copy(
                                        source, target, barrier=ready[stage], eviction_policy=policy
                                    ),
                                    lambda buffer, a, b, start, stop, stage=stage: buffer[
                                        stage, a:b, start:stop
                                    ],
                                    k, v, kept_keys, values, window_keys, window_values, tile, pages, seg,
                                    seg[Seg.FIRST] + t >= seg[Seg.PRUNED_TILES], columns_of_v,
                                )  # fmt: skip
                        T.mbarrier_arrive(ready[stage])
                        stage += 1
                        if stage == stages:
                            stage = 0
                            phase = phase ^ 1
            else:
                for s in T.serial(segments[1]):
                    locate_segment(
                        seg, segments[0] + s, span, begin, num_heads, table, seen, plan, num_values
                    )
                    find_limits(T.Parallel, limits, seg, seen, pruned, first, columns, sink_size, g)
                    wait()
                    load_query(
                        T.Parallel, chunks, q, seg, chunk, query, index, table, num_heads, first, columns, g,
                        lane_of, key_scale if fp8 else None, scalar,
                    )  # fmt: skip
                    for c in blocks:
                        T.fill(out[c], 0)
                    begin_softmax(T.Parallel, top, total, seg, sinks if has_sinks else None, first, g)
                    T.fence_proxy_async()
                    T.sync_threads(1, WARPGROUP)
                    for t in T.serial(seg[Seg.STOP] - seg[Seg.FIRST]):
                        locate_tile(tile, seg, seg[Seg.FIRST] + t, sink_size)
                        T.mbarrier_wait_parity(ready[stage], phase)
                        T.clear(scores)
                        T.fill(masks, 0)
                        if tile[Tile.WHOLE] != 0:
                            find_masks(masks, tile, seg, limits, sink_size, num_values)
                            for c in chunks:
                                if (c >= seg[Seg.NUM_KEPT]) & (c < tile[Tile.CHUNKS]):
                                    multiply_keys(k, q, c, stage, scores, wide_k)
                            if fp8:
                                T.wait_wgmma(0)
                            if masks[0] != 0:
                                T.wait_wgmma(0)  # for ptxas, too: nothing is in flight
                                drop_pruned(T.Parallel, scores, tile, limits, sink_size)
                        for c in chunks:
                            if c < seg[Seg.NUM_KEPT]:
                                multiply_keys(k, q, c, stage, scores, wide_k)
                        if fp8:
                            for c in blocks:
                                if has_values(seg, c, num_values, tile[Tile.WHOLE] != 0):
                                    T.call_extern(
                                        "handle", f"leank_widen_values<{dv // 64}>", v[c].data, stage,
                                        wide_v[c].data,
                                    )  # fmt: skip
                        T.wait_wgmma(0)
                        if fp8:  # all of it is in registers
                            T.mbarrier_arrive(free[stage])
                        if masks[1] != 0:
                            hide_tokens(T.Parallel, scores, tile, seg, limits, sink_size)
                            for c in blocks:
                                if fp8:
                                    for i, j in T.Parallel(dv, TILE):
                                        if is_unseen(
                                            tile[Tile.TOKEN] + j, seg, limits, sink_size, c, num_values
                                        ):
                                            wide_v[c][i, j] = T.cast(0, operand)
                                else:
                                    for i, j in T.Parallel(TILE, dv):
                                        if is_unseen(
                                            tile[Tile.TOKEN] + i, seg, limits, sink_size, c, num_values
                                        ):
                                            v[c][stage, i, j] = T.cast(0, dtype)
                        softmax_tile(
                            T.Parallel, scores, top, earlier_top, rescale, total, out, scale,
                            lambda scores, top: T.call_extern(
                                "handle", f"leank_raise_top<{n}>", scores.data, top.data, greatest.data
                            ),
                        )  # fmt: skip
                        for i, j in T.Parallel(TILE, n):
                            weights[j, i] = T.cast(scores[i, j], operand)
                        T.fence_proxy_async()
                        T.sync_threads(1, WARPGROUP)
                        for c in blocks:
                            if has_values(seg, c, num_values, (tile[Tile.WHOLE] != 0) & (masks[0] == 0)):
                                multiply_values(v[c][stage, :, :], weights, out[c], wide_v[c])
                        T.wait_wgmma(0)
                        if weighs_apart(seg, masks, num_values):
                            T.sync_threads(1, WARPGROUP)  # all have read the weights
                            write_whole_weights(T.Parallel, weights, scores, tile, limits, sink_size)
                            T.fence_proxy_async()
                            T.sync_threads(1, WARPGROUP)
                            for c in blocks:
                                if drops_values(seg, c, num_values):
                                    multiply_values(v[c][stage, :, :], weights, out[c], wide_v[c])
                            T.wait_wgmma(0)
                        if not fp8:
                            T.mbarrier_arrive(free[stage])
                        stage += 1
                        if stage == stages:
                            stage = 0
                            phase = phase ^ 1
                    store_segment(
                        T.Parallel, seg, span, program, T.if_then_else(s > 0, 1, 0), out, total, top, sums,
                        parts, lse, output, first, columns, g, options, channel_of,
                        value_scale if fp8 else None, f,
                    )  # fmt: skip

    return leank_attention_hopper
