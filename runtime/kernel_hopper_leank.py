"""Decode attention in TileLang for Hopper: one warp loads through TMA, one warpgroup computes with wgmma.

Program instances walk the stretch of tiles that they take (see kernel_attention_leank): for every head of a
row that the stretch touches they load its queries, run over its tiles with a running softmax, and write the
result.

One token and drafts differ in the number of columns alone, which is data. The body for other GPUs,
kernel_generic_leank, does the same.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_attention_leank import (
    Body,
    attention,
    begin_segment,
    is_unseen,
    score_tile,
    store_segment,
    weigh_tile,
)
from .kernel_leank import FULL_ROW, WARP, WARPGROUP, KernelShape, kernel_fp8
from .kernel_line_leank import (
    TILE,
    Page,
    Seg,
    T,
    Tile,
    find_pages,
    find_segments,
    has_values,
    load_tile,
    locate_segment,
    locate_tile,
    next_stage,
    place_in_ring,
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
    e, n, dv, num_values = shape.chunk_size, shape.num_queries, shape.value_rows, shape.num_values
    fp8, stages = shape.is_fp8, shape.num_stages
    blocks, loads = list(range(num_values)), list(range(TILE // shape.load_tokens))
    # A box of TMA is 128 bytes wide; TileLang cuts wider ones where they take all rows of a buffer.
    box = 128 if fp8 and dv % 128 == 0 else 64
    cuts = [(0, dv)] if len(loads) == 1 else [(start, start + box) for start in range(0, dv, box)]
    value_spans = [(c, lanes) for c in blocks for lanes in cuts]

    @T.macro
    def multiply_keys(work: Any, c: int, stage: Any) -> None:
        if fp8:
            T.wait_wgmma(1)  # the product before the last has read its operand
            given = work.k[c].data, stage, work.wide_k[c % 2].data
            T.call_extern("handle", f"leank_widen_keys<{e}>", *given)
            T.wgmma_gemm(work.wide_k[c % 2], work.q[c], work.scores, transpose_B=True, policy=FULL_ROW)
        else:
            T.wgmma_gemm(work.k[c][stage, :, :], work.q[c], work.scores, transpose_B=True, policy=FULL_ROW)
            T.wait_wgmma(0)  # in flight over a branch, ptxas waits after each of its instructions

    @T.macro
    def multiply_values(work: Any, c: int, stage: T.Ref) -> None:
        options = {"transpose_A": not fp8, "transpose_B": True, "policy": FULL_ROW}
        if fp8:
            T.wgmma_gemm(work.wide_v[c], work.weights, work.out[c], **options)
        else:
            T.wgmma_gemm(work.v[c][stage, :, :], work.weights, work.out[c], **options)
        if num_values > 1:
            T.wait_wgmma(0)  # as above

    @T.macro
    def hide_values(work: Any, c: int, stage: T.Ref) -> None:
        if fp8:
            for i, j in T.Parallel(dv, TILE):
                if is_unseen(work, j, c):
                    work.wide_v[c][i, j] = T.cast(0, work.operand)
        else:
            for i, j in T.Parallel(TILE, dv):
                if is_unseen(work, i, c):
                    work.v[c][stage, i, j] = T.cast(0, shape.stored_type)

    def raise_top(work: Any) -> Any:
        given = work.scores.data, work.top.data, work.greatest.data
        return T.call_extern("handle", f"leank_raise_top<{n}>", *given)

    @T.macro
    def wait_ahead() -> None:
        if shape.begins_early:
            T.pdl_sync()

    @T.macro
    def look_up(work: Any, pages: Any, ahead: Any) -> None:
        index = T.alloc_var("int32")
        index = work.seg[Seg.FIRST] + ahead + T.get_thread_binding() % WARP
        if index < work.seg[Seg.STOP]:
            locate_tile(work, index)
            find_pages(work, pages)

    @T.macro
    def load_tiles(
        work: Any, ready: Any, free: Any, lane_pages: Any, next_pages: Any, stage: T.Ref, phase: T.Ref
    ) -> None:
        seg, tile, pages = work.seg, work.tile, work.pages
        for s in T.serial(work.segments[1]):
            locate_segment(work, work.segments[0] + s)
            # Every lane looks up the pages of one tile, of the next 32 while these are loaded: where
            # pages lie takes divisions and a read that others wait for.
            look_up(work, next_pages, 0)
            wait_ahead()  # launched while the append still ran; tables are older
            for t in T.serial(seg[Seg.STOP] - seg[Seg.FIRST]):
                if t % WARP == 0:
                    T.copy(next_pages, lane_pages)
                for b in loads:
                    for place in range(Page.SIZE):
                        pages[b, place] = T.shfl_sync(lane_pages[b, place], t % WARP)
                tile[Tile.CHUNKS] = seg[Seg.NUM_KEPT] + T.if_then_else(
                    seg[Seg.FIRST] + t < seg[Seg.PRUNED_TILES], 0, seg[Seg.NUM_DROPPED]
                )
                T.mbarrier_wait_parity(free[stage], phase ^ 1)
                for few, policy in ((True, "evict_first"), (False, None)):
                    if (work.seen.shape[0] * work.seen.shape[1] <= _FEW_TOKENS) == few:
                        load_tile(
                            work,
                            lambda source, target, stage=stage, policy=policy: T.tma_copy(
                                source, target, barrier=ready[stage], eviction_policy=policy
                            ),
                            lambda buffer, a, b, start, stop, stage=stage: buffer[
                                place_in_ring(stage, stages), a:b, start:stop
                            ],
                            seg[Seg.FIRST] + t >= seg[Seg.PRUNED_TILES],
                            value_spans,
                        )
                T.mbarrier_arrive(ready[stage])
                if t % WARP == 0:
                    look_up(work, next_pages, t + WARP)
                next_stage(stage, phase, stages)

    @T.macro
    def attend(work: Any, ready: Any, free: Any, stage: T.Ref, phase: T.Ref) -> None:
        seg, tile = work.seg, work.tile
        for s in T.serial(work.segments[1]):
            begin_segment(work, s)
            T.fence_proxy_async()
            T.sync_threads(1, WARPGROUP)
            for t in T.serial(seg[Seg.STOP] - seg[Seg.FIRST]):
                locate_tile(work, seg[Seg.FIRST] + t)
                T.mbarrier_wait_parity(ready[stage], phase)
                score_tile(work, stage)
                if fp8:
                    for c in blocks:
                        if has_values(seg, c, num_values, tile[Tile.WHOLE] != 0):
                            T.call_extern(
                                "handle", f"leank_widen_values<{dv // 64}>", work.v[c].data, stage,
                                work.wide_v[c].data,
                            )  # fmt: skip
                T.wait_wgmma(0)
                if fp8:  # all of it is in registers
                    T.mbarrier_arrive(free[stage])
                weigh_tile(work, stage)
                if not fp8:
                    T.mbarrier_arrive(free[stage])
                next_stage(stage, phase, stages)
            store_segment(work, T.if_then_else(s > 0, 1, 0))

    @T.macro
    def walk(work: Any) -> None:
        T.annotate_min_blocks_per_sm(shape.num_instances)
        T.import_source(_TOP_SOURCE + kernel_fp8.WIDEN_SOURCE if fp8 else _TOP_SOURCE)
        if fp8:
            T.annotate_layout({block: kernel_fp8.swizzle_values(block) for block in work.v})
        ready = T.alloc_barrier([WARP] * stages)
        free = T.alloc_barrier([WARPGROUP] * stages)
        lane_pages, next_pages = [T.alloc_local((len(loads), Page.SIZE), "int32") for _ in range(2)]
        stage = T.alloc_var("int32", init=0)
        phase = T.alloc_var("int32", init=0)
        if work.early == 0:
            wait_ahead()
        T.pdl_trigger()  # the merge may be launched, and waits for the parts where it needs them
        find_segments(work)
        if work.segments[1] == 0:
            wait_ahead()  # no kernel may end before the one ahead of it
        if T.get_thread_binding() >= WARPGROUP:
            load_tiles(work, ready, free, lane_pages, next_pages, stage, phase)
        else:
            attend(work, ready, free, stage, phase)

    places = {}
    if fp8:
        places["lane_of"] = lambda place: kernel_fp8.lane_of_place(place, e)
        places["channel_of"] = lambda row: kernel_fp8.channel_of_row(row, dv)
    products = multiply_keys, multiply_values, hide_values
    waits = {"wait_products": lambda: T.wait_wgmma(0), "wait_ahead": wait_ahead}
    barriers = {"sync": lambda: T.sync_threads(1, WARPGROUP), "fence": T.fence_proxy_async}
    return attention(shape, Body(walk, *products, raise_top, hopper=True, **places, **waits, **barriers))
