"""The attention kernel, in TileLang: queries in, masks, online softmax, a head's output.

The work of a launch is a line of tiles, in kernel_line_leank; heads that several program instances shared are
joined in kernel_merge_leank. How tiles are loaded and multiplied, in kernel_hopper_leank and
kernel_generic_leank, is a `Body` of the kernel. Macros take one object, `work`: the kernel's arguments and
buffers by their names, and what the body does in a way of its own.

**Products.** Operands are swapped: tokens are the M of the matrix products and the queries of a KV head,
those of all columns of the launch, their N, so nothing is padded to 64 queries and a tile's scores take four
registers of a thread for each eight of them. Query number q is of group q % G and column q // G.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .kernel_leank import NEG, WARP, WARPGROUP, KernelShape, pool_types, scale_types, sinks_type
from .kernel_line_leank import (
    TILE,
    Head,
    Page,
    Seg,
    T,
    Tile,
    drops_values,
    has_values,
    locate_segment,
    loops,
    weighs_apart,
)

# Rows of `limits`: tokens that a query sees, and the first one of its recent tokens.
SEEN, RECENT = range(2)


@dataclass(frozen=True)
class Body:
    """What a body of attention does in a way of its own, given `work` where it needs it.

    Attributes:
        walk: Takes the tiles of a program instance.
        multiply_keys: Adds to the scores what a chunk of K gives, of the tile at a stage of the ring.
        multiply_values: Adds to the result what a chunk of V gives.
        hide_values: Clears V of a chunk's tokens that no query sees.
        raise_top: Raises the running maximum to the greatest score.
        hopper: Whether a warp more loads, and products take their operands from registers.
        cpu: Whether it is for TileLang's CPU target.
        parallel: Parallel loops: `T.Parallel`, or `T.grid` on the CPU.
        lane_of: Lane of a chunk that lies at a place of the products with K.
        channel_of: Channel of a chunk of V that lies at a row of the products with it.
        sync: Barrier of the threads that compute.
        fence: Shows products what threads wrote to shared memory.
        wait_products: Waits for the products in flight.
        wait_ahead: Waits for the kernel ahead.
    """

    walk: Any
    multiply_keys: Any
    multiply_values: Any
    hide_values: Any
    raise_top: Any
    hopper: bool = False
    cpu: bool = False
    parallel: Any = T.Parallel
    lane_of: Any = lambda place: place
    channel_of: Any = lambda row: row
    sync: Any = lambda: None
    fence: Any = lambda: None
    wait_products: Any = lambda: None
    wait_ahead: Any = lambda: None


def attention(shape: KernelShape, body: Body) -> Any:
    """Return the attention kernel: arguments and buffers, with which `body` walks over tiles."""
    d, e, n = shape.head_dim, shape.chunk_size, shape.num_queries
    dv, dtype, operand, fp8 = shape.value_rows, shape.query_type, shape.product_type, shape.is_fp8
    chunks, blocks = list(range(shape.max_chunks)), list(range(shape.num_values))
    num_wide = (2, shape.num_values) if body.hopper else (1, 1)
    batch, heads, width = T.dynamic("batch, heads, width")
    layouts, all_chunks, entries, window_entries = T.dynamic("layouts, all_chunks, entries, window_entries")
    pools, scales = pool_types(shape, body.cpu), scale_types(shape)
    table_rows, plan_rows, programs = T.dynamic("table_rows, plan_rows, programs")
    shared, fragment, _, threads = loops(body.cpu, WARPGROUP + WARP if body.hopper else WARPGROUP)
    ring = () if body.cpu else (shape.num_stages,)  # the CPU's gemm takes matrices alone

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
            q = [shared((n, e), operand) for _ in chunks]
            k = [shared((*ring, TILE, e), shape.stored_type) for _ in chunks]
            v = [shared((*ring, TILE, dv), shape.stored_type) for _ in blocks]
            weights = shared((n, TILE), operand)
            wide_k = [fragment((TILE, e), operand) for _ in range(num_wide[0])] if fp8 else None
            wide_v = [fragment((dv, TILE), operand) for _ in range(num_wide[1])] if fp8 else None
            greatest = shared((WARPGROUP // WARP, n), "float32") if body.hopper else None
            limits = shared((2, n), "int32")
            scores, total = [fragment((TILE, n), "float32") for _ in range(2)]
            out = [fragment((dv, n), "float32") for _ in blocks]
            top, earlier_top, rescale, sums = [fragment((n,), "float32") for _ in range(4)]
            seg = T.alloc_local((Seg.SIZE,), "int32")
            tile = T.alloc_local((Tile.SIZE,), "int32")
            pages = T.alloc_local((TILE // shape.load_tokens, Page.SIZE), "int32")
            masks, span, segments = [T.alloc_local((2,), "int32") for _ in range(3)]
            begin, chunk = [T.alloc_local((1,), "int32") for _ in range(2)]
            num_heads = table_rows - 1
            # All that is named in this function, and nothing else of `attention`.
            body.walk(SimpleNamespace(**locals(), **vars(body)))

    return leank_attention


@T.macro
def begin_segment(work: Any, s: Any) -> None:
    """Find one of the instance's segments, load its queries, and begin its softmax."""
    locate_segment(work, work.segments[0] + s)
    find_limits(work)
    work.wait_ahead()  # tables are older
    load_query(work)
    for c in work.blocks:
        T.fill(work.out[c], 0)
    begin_softmax(work)


@T.macro
def score_tile(work: Any, stage: T.Ref) -> None:
    """Set `scores` and `masks` for a tile.

    A whole tile takes its dropped channels first, so that their scores can be dropped where a token is not
    whole, before the others are added.
    """
    seg, tile, masks = work.seg, work.tile, work.masks
    T.clear(work.scores)
    T.fill(masks, 0)
    if tile[Tile.WHOLE] != 0:
        find_masks(work)
        for c in work.chunks:
            if (c >= seg[Seg.NUM_KEPT]) & (c < tile[Tile.CHUNKS]):
                work.multiply_keys(work, c, stage)
        if work.fp8:
            work.wait_products()
        if masks[0] != 0:
            work.wait_products()  # for ptxas, too: nothing is in flight
            drop_pruned(work)
    for c in work.chunks:
        if c < seg[Seg.NUM_KEPT]:
            work.multiply_keys(work, c, stage)


@T.macro
def weigh_tile(work: Any, stage: T.Ref) -> None:
    """Turn a tile's scores into weights, and add its values under them."""
    seg, tile, masks, scores, weights = work.seg, work.tile, work.masks, work.scores, work.weights
    num_values = work.shape.num_values
    if masks[1] != 0:
        hide_tokens(work)
        for c in work.blocks:
            work.hide_values(work, c, stage)
    softmax_tile(work)
    for i, j in work.parallel(scores.shape[0], scores.shape[1]):
        weights[j, i] = T.cast(scores[i, j], weights.dtype)
    work.fence()
    work.sync()
    for c in work.blocks:
        if has_values(seg, c, num_values, (tile[Tile.WHOLE] != 0) & (masks[0] == 0)):
            work.multiply_values(work, c, stage)
    work.wait_products()
    if weighs_apart(seg, masks, num_values):
        work.sync()  # all have read the weights
        write_whole_weights(work)
        work.fence()
        work.sync()
        for c in work.blocks:
            if drops_values(seg, c, num_values):
                work.multiply_values(work, c, stage)
        work.wait_products()


def _column_of(work: Any, query: Any) -> Any:
    """Return the column of a query; queries of padding are of the last."""
    return work.first + T.min(query // work.shape.num_groups, work.columns - 1)


@T.macro
def find_limits(work: Any) -> None:
    """Fill `limits` for the queries of a segment."""
    limits, seg = work.limits, work.seg
    for j in work.parallel(limits.shape[1]):
        limits[SEEN, j] = work.seen[seg[Seg.ROW], _column_of(work, j)]
        limits[RECENT, j] = work.sink_size + work.pruned[seg[Seg.ROW], _column_of(work, j)]


@T.macro
def find_masks(work: Any) -> None:
    """Set `masks` for a whole tile: whether tokens of it are not whole, and whether some are not visible.

    Where V comes in chunks, dropped ones of tokens that are not whole are not visible either.
    """
    masks, tile, limits = work.masks, work.tile, work.limits
    masks[0] = T.cast(
        (tile[Tile.TOKEN] < limits[RECENT, limits.shape[1] - 1]) & (tile[Tile.TOKEN] + TILE > work.sink_size),
        "int32",
    )
    masks[1] = T.cast((tile[Tile.TOKEN] + TILE > limits[SEEN, 0]), "int32") | (
        masks[0] if work.shape.num_values > 1 else masks[0] & T.cast(work.seg[Seg.NUM_KEPT] == 0, "int32")
    )


def _is_whole(work: Any, place: Any, query: Any) -> Any:
    """Return whether a query sees the token at a place of the tile whole."""
    token = work.tile[Tile.TOKEN] + place
    return (token < work.sink_size) | (token >= work.limits[RECENT, query])


@T.macro
def drop_pruned(work: Any) -> None:
    """Keep dropped channels' scores where a query sees the token whole; others may be anything."""
    scores = work.scores
    for i, j in work.parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.if_then_else(_is_whole(work, i, j), scores[i, j], 0.0)


@T.macro
def hide_tokens(work: Any) -> None:
    """Hide what a query does not see: tokens behind its own, in a head of width 0 pruned ones too."""
    scores = work.scores
    for i, j in work.parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.if_then_else(
            (work.tile[Tile.TOKEN] + i < work.limits[SEEN, j])
            & ((work.seg[Seg.NUM_KEPT] > 0) | _is_whole(work, i, j)),
            scores[i, j],
            NEG,
        )


def is_unseen(work: Any, place: Any, chunk: int) -> Any:
    """Return whether no query sees a token's chunk of V: a weight of 0 times NaN would be NaN."""
    token = work.tile[Tile.TOKEN] + place
    return (token >= work.seg[Seg.LENGTH]) | (
        drops_values(work.seg, chunk, work.shape.num_values)
        & (token >= work.sink_size)
        & (token < work.limits[RECENT, 0])
    )


@T.macro
def write_whole_weights(work: Any) -> None:
    """Write weights as V's dropped chunks take them, zeros where a query does not see the token whole."""
    scores, weights = work.scores, work.weights
    for i, j in work.parallel(scores.shape[0], scores.shape[1]):
        weights[j, i] = T.cast(T.if_then_else(_is_whole(work, i, j), scores[i, j], 0.0), weights.dtype)


@T.macro
def begin_softmax(work: Any) -> None:
    """Begin a running softmax, with the sinks of a head in the segment of its first tile.

    A sink, logit times log2 e, is counted in the place of the first token.
    """
    top, total, seg, sinks, num_groups = work.top, work.total, work.seg, work.sinks, work.shape.num_groups
    if not work.shape.has_sinks:
        T.fill(total, 0)
        T.fill(top, NEG)
    else:
        for j in work.parallel(top.shape[0]):
            top[j] = T.if_then_else(
                seg[Seg.FIRST] == 0,
                sinks[
                    T.min(seg[Seg.ROW], sinks.shape[0] - 1),
                    seg[Seg.HEAD] * num_groups + j % num_groups,
                    T.min(work.first + j // num_groups, sinks.shape[2] - 1),
                ],
                NEG,
            )
        for i, j in work.parallel(total.shape[0], total.shape[1]):
            total[i, j] = T.if_then_else((seg[Seg.FIRST] == 0) & (i == 0), 1.0, 0.0)


def reduce_options(work: Any) -> dict[str, int]:
    """Return options of reductions over tokens: as many as a thread has, one pair of barriers for all."""
    return {} if work.cpu else {"batch": work.n // 4}


@T.macro
def softmax_tile(work: Any) -> None:
    """Turn a tile's scores into weights under the running maximum, and rescale what came before.

    Of `work`, for tokens by queries:
        scores: `[TILE, N]`; weights afterwards.
        top: Running maximum per query `[N]`, in units of log 2.
        earlier_top: Its value before this tile `[N]`.
        rescale: Factor on what came before `[N]`.
        total: Sums of weights `[TILE, N]`, one per token place: added up at the end, not per tile.
        out: Weighted values, of every chunk of V `[F, N]`.
        scale: Factor on the scores, times log2 e.
    """
    parallel, scores, top, earlier_top = work.parallel, work.scores, work.top, work.earlier_top
    rescale, total, out = work.rescale, work.total, work.out
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = scores[i, j] * work.scale
    T.copy(top, earlier_top)
    work.raise_top(work)
    for j in parallel(scores.shape[1]):
        rescale[j] = T.exp2(earlier_top[j] - top[j])
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.exp2(scores[i, j] - top[j])
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        total[i, j] = total[i, j] * rescale[j] + scores[i, j]
    for c in work.blocks:
        for i, j in parallel(out[c].shape[0], out[c].shape[1]):
            out[c][i, j] = out[c][i, j] * rescale[j]


def _scale_of(scale: Any, seg: Any, channel: Any) -> Any:
    """Return the scale of a channel in a segment's head."""
    return scale[T.if_then_else(scale.shape[0] > 1, seg[Seg.ROW], 0), seg[Seg.HEAD], channel]


def _state_of(work: Any, query: Any, channel: Any) -> Any:
    """Return a query's channel, times K's scale where there is one."""
    num_groups = work.shape.num_groups
    head = work.seg[Seg.HEAD] * num_groups + query % num_groups
    state = work.query[work.seg[Seg.ROW], head, _column_of(work, query), channel]
    if not work.fp8:
        return state
    return T.cast(T.cast(state, "float32") * _scale_of(work.key_scale, work.seg, channel), work.operand)


@T.macro
def load_query(work: Any) -> None:
    """Gather the channels of a segment's queries into `q`, chunk by chunk; zeros pad both."""
    q, index, seg, chunk = work.q, work.index, work.seg, work.chunk
    # Loops that convert are no vectors, and TileLang warns where it tries.
    one_by_one = {"coalesced_width": T.int32(1)} if work.fp8 and not work.cpu else {}
    for c in work.chunks:
        chunk[0] = T.if_then_else(
            c < seg[Seg.NUM_KEPT],
            seg[Seg.KEPT] + c,
            work.table[work.num_heads, Head.KEPT] + seg[Seg.DROPPED] + c - seg[Seg.NUM_KEPT],
        )
        chunk[0] = T.min(chunk[0], index.shape[1] - 1)  # a head with fewer chunks does not read the rest
        for i, j in work.parallel(q[c].shape[0], q[c].shape[1], **one_by_one):
            lane = index[T.if_then_else(index.shape[0] > 1, seg[Seg.ROW], 0), chunk[0], work.lane_of(j)]
            q[c][i, j] = T.if_then_else(
                (i < work.columns * work.shape.num_groups) & (lane >= 0),
                _state_of(work, i, T.max(lane, 0) % work.query.shape[3]),
                T.cast(0, q[c].dtype),
            )


@T.macro
def store_segment(work: Any, part: Any) -> None:
    """Write a segment's result, times V's scales: to the output if this instance saw all of the head.

    Else it is one of the instance's two parts.
    """
    parallel, seg, out, sums, value_scale = work.parallel, work.seg, work.out, work.sums, work.value_scale
    value_chunk, num_groups = work.shape.value_chunk, work.shape.num_groups
    T.reduce_sum(work.total, sums, dim=0, **reduce_options(work))
    for j in parallel(sums.shape[0]):
        sums[j] = T.max(sums[j], 1e-30)
    for c in work.blocks:
        for i, j in parallel(out[c].shape[0], out[c].shape[1]):
            out[c][i, j] = out[c][i, j] / sums[j]
        if work.fp8:
            for i, j in parallel(out[c].shape[0], out[c].shape[1]):
                out[c][i, j] = out[c][i, j] * _scale_of(
                    value_scale, seg, T.min(c * value_chunk + work.channel_of(i), value_scale.shape[2] - 1)
                )
    if (seg[Seg.BEGIN] >= work.span[0]) & (seg[Seg.END] <= work.span[1]):
        for c in work.blocks:
            for i, j in parallel(out[c].shape[0], out[c].shape[1]):
                if (j < work.columns * num_groups) & (work.channel_of(i) < value_chunk):
                    work.output[
                        seg[Seg.ROW],
                        seg[Seg.HEAD] * num_groups + j % num_groups,
                        work.first + j // num_groups,
                        c * value_chunk + work.channel_of(i),
                    ] = T.cast(out[c][i, j], work.output.dtype)
    else:
        for c in work.blocks:
            for i, j in parallel(out[c].shape[0], out[c].shape[1]):
                if work.channel_of(i) < value_chunk:
                    work.parts[work.program, part, j, c * value_chunk + work.channel_of(i)] = out[c][i, j]
        for j in parallel(sums.shape[0]):
            work.lse[work.program, part, j] = T.log2(sums[j]) + work.top[j]
