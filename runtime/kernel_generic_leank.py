"""Decode attention in TileLang for GPUs before Hopper, and for the CPU, where tests run it in plain loops.

The same walk over tiles as in kernel_hopper_leank, by 128 threads that load through cp.async and compute
with mma.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_attention_leank import (
    Body,
    attention,
    begin_segment,
    is_unseen,
    reduce_options,
    score_tile,
    store_segment,
    weigh_tile,
)
from .kernel_leank import FULL_ROW, KernelShape, kernel_fp8
from .kernel_line_leank import TILE, Seg, T, Tile, find_pages, find_segments, load_tile, locate_tile


def generic_attention(shape: KernelShape, cpu: bool = False) -> Any:
    """Return decode attention for GPUs before Hopper, or for the CPU.

    TileLang 0.1.15 cannot pipeline a loop of dynamic length through cp.async (the wait count must be static),
    so the ring of buffers is written out: every tile commits one group, which may be empty.
    """
    e, dv, stages, fp8 = shape.chunk_size, shape.value_rows, shape.num_stages, shape.is_fp8
    value_spans = [(c, (0, shape.value_chunk)) for c in range(shape.num_values)]
    parallel, policy = (T.grid, {}) if cpu else (T.Parallel, {"policy": FULL_ROW})
    ahead = list(range(stages - 1))
    line = 16 if fp8 else 8  # numbers of 16 bytes

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
    def load(work: Any, t: Any, stage: Any) -> None:
        locate_tile(work, t)
        find_pages(work, work.pages)
        load_tile(work, fetch, lambda *place: room(*place, stage), work.tile[Tile.WHOLE] != 0, value_spans)

    def raise_top(work: Any) -> Any:
        return T.reduce_max(work.scores, work.top, dim=0, clear=False, **reduce_options(work))

    @T.macro
    def multiply_keys(work: Any, c: int, stage: Any) -> None:
        if fp8:
            for i, j in parallel(TILE, e):
                work.wide_k[0][i, j] = kernel_fp8.from_fp8(
                    work.k[c][i, j] if cpu else work.k[c][stage, i, j], work.operand
                )
            T.gemm(work.wide_k[0], work.q[c], work.scores, transpose_B=True, **policy)
        else:
            T.gemm(staged(work.k[c], stage), work.q[c], work.scores, transpose_B=True, **policy)

    @T.macro
    def multiply_values(work: Any, c: int, stage: Any) -> None:
        transposed = {"transpose_A": not fp8, "transpose_B": True}
        if fp8:
            for i, j in parallel(dv, TILE):
                work.wide_v[0][i, j] = kernel_fp8.from_fp8(
                    work.v[c][j, i] if cpu else work.v[c][stage, j, i], work.operand
                )
            T.gemm(work.wide_v[0], work.weights, work.out[c], **transposed, **policy)
        else:
            T.gemm(staged(work.v[c], stage), work.weights, work.out[c], **transposed, **policy)

    @T.macro
    def hide_values(work: Any, c: int, stage: T.Ref) -> None:
        for i, j in parallel(TILE, dv):
            if is_unseen(work, i, c):
                if cpu:
                    work.v[c][i, j] = T.cast(0, shape.stored_type)
                else:
                    work.v[c][stage, i, j] = T.cast(0, shape.stored_type)

    @T.macro
    def walk(work: Any) -> None:
        seg = work.seg
        if not cpu:  # else loads would not be cp.async's, which take 16 bytes
            T.assume(work.kept_keys.strides[0] % line == 0)
            T.assume(work.values.strides[0] % line == 0)
            T.assume(work.window_keys.strides[0] % line == 0)
            T.assume(work.window_values.strides[0] % line == 0)
        stage = T.alloc_var("int32")
        find_segments(work)
        if dv > shape.value_chunk:
            for c in work.blocks:
                T.fill(work.v[c], 0)
        for s in T.serial(work.segments[1]):
            begin_segment(work, s)
            for r in ahead:
                if seg[Seg.FIRST] + r < seg[Seg.STOP]:
                    load(work, seg[Seg.FIRST] + r, r)
                commit()
            for t in T.serial(seg[Seg.STOP] - seg[Seg.FIRST]):
                if seg[Seg.FIRST] + t + stages - 1 < seg[Seg.STOP]:
                    load(work, seg[Seg.FIRST] + t + stages - 1, (t + stages - 1) % stages)
                commit()
                stage = t % stages
                locate_tile(work, seg[Seg.FIRST] + t)
                if not cpu:
                    T.ptx_wait_group(stages - 1)
                    T.sync_threads()
                score_tile(work, stage)
                weigh_tile(work, stage)
                if not cpu:
                    T.sync_threads()
            store_segment(work, T.if_then_else(s > 0, 1, 0))

    products = multiply_keys, multiply_values, hide_values
    sync = (lambda: None) if cpu else T.sync_threads
    return attention(shape, Body(walk, *products, raise_top, cpu=cpu, parallel=parallel, sync=sync))
