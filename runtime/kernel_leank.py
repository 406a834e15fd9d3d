"""Building blocks of the decode kernels, in TileLang: tiles and who takes them, softmax, merge.

**Tiles.** A tile is 64 tokens of one head of one row, at positions 64 t … 64 t + 63. The work of an attention
launch is one line: row after row, in a row head after head, in a head tile after tile, first those of pruned
tokens, then all others. A tile is as long as the bytes of K and V that it reads, and every program instance
takes an equal stretch of the line: a head of width 96 is shared by more instances than one of width 32, and
one row of 128K tokens fills the chip as well as 64 rows do. A tile belongs to the stretch that its first
unit lies in. The host knows nothing of this: lengths, widths and positions are data on the device.

    the line:     row 0 [head 0 ......][head 1 ............] row 1 [head 0 ..][head 1 ....] ...
    instances:    |-------- 0 --------|-------- 1 --------|-------- 2 --------| ...
    a head:       [pruned]...[pruned]  [sink]...[sink and pruned]  [pruned and recent]...[recent]

Pruned tiles lie wholly among tokens that every column sees pruned; they cost `table[head, COST]`. All
others are whole tiles, cost `table[num_heads, COST]` and read dropped channels too, whose scores count where
a column sees a token whole. A head that several instances share leaves one part each, with its log-sum-exp;
`leank_merge` joins them.

**Products.** Operands are swapped: tokens are the M of the matrix products and the queries of a KV head,
those of all columns of the launch, their N, so nothing is padded to 64 queries and a tile's scores take four
registers of a thread for each eight of them. Query number q is of group q % G and column q // G.

What is compiled depends on `KernelShape` alone; batch, columns, lengths, widths, pages and the number of
instances are data or dynamic. The macros fill two small arrays, `seg` (one head of one row) and `tile`; the
numbers below name their places. They are variables, not expressions, on purpose: TileLang's simplifier takes
minutes over inlined arithmetic. The attention bodies are in kernel_hopper_leank and
kernel_generic_leank.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from dataclasses import dataclass
from typing import Any

try:
    import tilelang.language as T  # noqa: N812
except ImportError as error:
    raise ImportError(f"the decode kernels need tilelang (pip install tilelang): {error}") from error

TILE = 64  # tokens of a tile: the M of one wgmma
NEG = -1e30  # a score that no softmax notices, finite so that differences of two are not NaN
WARP, WARPGROUP = 32, 128
FULL_ROW = T.GemmWarpPolicy.FullRow  # every warp takes 16 of the 64 tokens, or 16 channels of V
_PARTS, _FEW_PARTS = 16, 4  # parts that the merge loads before it uses the first

# Places in `seg`. HIDDEN_TILES are the pruned tiles of the row, which a head of width 0 has none of.
(ROW, HEAD, FIRST, STOP, PRUNED_TILES, KEPT, NUM_KEPT, VALUE_ROW, DROPPED, NUM_DROPPED, WINDOW_ROW,
 BEGIN, END, LENGTH, HIDDEN_TILES) = range(15)  # fmt: skip
SEG_SIZE = 15

# Places in `tile`: first token, chunks to read, whether it is a whole tile.
TOKEN, CHUNKS, WHOLE = range(3)
TILE_SIZE = 3

# Rows of `limits`: tokens that a query sees, and the first one of its recent tokens.
SEEN, RECENT = range(2)

# Places in `pages`, for every load of a tile: a page and a place in it, in either pool.
PAGE, PLACE, WINDOW_PAGE, WINDOW_PLACE = range(4)
PAGE_SIZE = 4

# Columns of the head table, `ChunkLayout.head_table`; its last row holds totals.
COST, EARLIER = 6, 7


@dataclass(frozen=True)
class KernelShape:
    """What a kernel is compiled for.

    Attributes:
        head_dim: Channels of a key, D.
        num_groups: Query heads per KV head, G.
        chunk_size: Channels of a chunk, E.
        max_chunks: Most chunks of one head, kept and dropped together.
        dtype: Of queries, as TileLang spells it.
        num_stages: Tiles in flight.
        num_queries: Columns of the matrix products, N: queries of a KV head that a launch takes.
        load_tokens: Tokens that one load takes: a divisor of a tile and of both pools' pages.
        num_instances: Program instances that a multiprocessor is to hold.
        is_fp8: Whether the cache holds e4m3, which kernels take as bytes; else it is of `dtype`.
        has_sinks: Whether query heads have attention sinks.
    """

    head_dim: int
    num_groups: int
    chunk_size: int
    max_chunks: int
    dtype: str
    num_stages: int
    num_queries: int
    load_tokens: int = TILE
    num_instances: int = 1
    is_fp8: bool = False
    has_sinks: bool = False

    @property
    def cache_dtype(self) -> str:
        """Of K and V in memory."""
        return "uint8" if self.is_fp8 else self.dtype

    @property
    def product_dtype(self) -> str:
        """Of the operands of matrix products: float16 holds every e4m3, and one instruction widens two."""
        return "float16" if self.is_fp8 and self.dtype != "float32" else self.dtype

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
    def value_size(self) -> int:
        """Channels of V in shared memory: rows of the second product come in 64."""
        return -(-self.head_dim // 64) * 64


def pool_types(shape: KernelShape, cpu: bool) -> list[Any]:
    """Return what the four pools of `StoreTensors` are to a kernel.

    Pools without rows arrive as placeholders, so no two need agree in pages and their sizes. Pages may be
    strided, but TileLang's CPU target knows no strides.
    """
    types = []
    for place, lanes in enumerate((shape.chunk_size, shape.head_dim) * 2):
        pages, rows, page_size, stride = T.dynamic(
            f"pages_{place}, rows_{place}, page_size_{place}, stride_{place}"
        )
        size, strides = (pages, rows, page_size, lanes), (stride, page_size * lanes, lanes, 1)
        dtype = shape.cache_dtype
        types.append(T.Tensor(size, dtype) if cpu else T.StridedTensor(size, strides, dtype))
    return types


def scale_types(shape: KernelShape) -> list[Any]:
    """Return what the scales of K and V are to a kernel; without FP8 they arrive as placeholders."""
    rows, heads = T.dynamic("scale_rows, scale_heads")
    return [T.Tensor((rows, heads, shape.head_dim), "float32") for _ in range(2)]


@T.macro
def stretch_bounds(
    span: Any, index: Any, count: Any, num_heads: Any, table: Any, plan: Any, rows: Any
) -> None:
    """Set `span` to the first unit of a stretch and one past its last."""
    total = T.alloc_var("int32")
    per_instance = T.alloc_var("int32")
    total = plan[rows, 0] * table[num_heads, EARLIER] + plan[rows, 1] * num_heads * table[num_heads, COST]
    per_instance = (total + count - 1) // count
    span[0] = index * per_instance
    span[1] = T.min((index + 1) * per_instance, total)


@T.macro
def head_begin(begin: Any, row: Any, head: Any, num_heads: Any, table: Any, plan: Any) -> None:
    """Set `begin` to the first unit of one head of one row."""
    begin[0] = (
        plan[row, 0] * table[num_heads, EARLIER]
        + plan[row, 1] * num_heads * table[num_heads, COST]
        + (plan[row + 1, 0] - plan[row, 0]) * table[head, EARLIER]
        + (plan[row + 1, 1] - plan[row, 1]) * head * table[num_heads, COST]
    )


@T.macro
def find_segments(
    segments: Any, span: Any, begin: Any, rows: Any, num_heads: Any, table: Any, plan: Any, cpu: bool
) -> None:
    """Set `segments` to the first (row, head) pair of a stretch and the number of pairs it touches.

    The lanes of a warp look at a row or a head each: pairs before the stretch's first unit are counted in
    the lower half of a number, those before its end in the upper.
    """
    lanes = 1 if cpu else 32
    lane = T.alloc_var("int32", init=0)
    place = T.alloc_var("int32")
    first_row = T.alloc_var("int32")
    last_row = T.alloc_var("int32")
    count = T.alloc_var("int32", init=0)
    if not cpu:
        lane = T.get_thread_binding() % lanes
    for i in T.serial((rows + lanes - 1) // lanes):
        place = i * lanes + lane
        if place < rows:
            head_begin(begin, place, 0, num_heads, table, plan)
            count += T.cast(begin[0] <= span[0], "int32") + T.cast(begin[0] < span[1], "int32") * 65536
    if not cpu:
        count = T.warp_reduce_sum(count)
    first_row = count % 65536 - 1
    last_row = T.max(count // 65536 - 1, 0)
    count = 0
    for i in T.serial((num_heads + lanes - 1) // lanes):
        place = i * lanes + lane
        if place < num_heads:
            head_begin(begin, first_row, place, num_heads, table, plan)
            count += T.cast(begin[0] <= span[0], "int32")
            head_begin(begin, last_row, place, num_heads, table, plan)
            count += T.cast(begin[0] < span[1], "int32") * 65536
    if not cpu:
        count = T.warp_reduce_sum(count)
    segments[0] = first_row * num_heads + count % 65536 - 1
    segments[1] = T.if_then_else(
        span[0] < span[1], last_row * num_heads + count // 65536 - 1 - segments[0] + 1, 0
    )


@T.macro
def locate_segment(
    seg: Any, pair: Any, span: Any, begin: Any, num_heads: Any, table: Any, seen: Any, plan: Any
) -> None:  # fmt: skip
    """Fill `seg` for one head of one row, as far as it lies in the stretch `span`."""
    cost = T.alloc_var("int32")
    pruned_cost = T.alloc_var("int32")
    whole_cost = T.alloc_var("int32")
    low = T.alloc_var("int32")
    high = T.alloc_var("int32")
    seg[ROW] = pair // num_heads
    seg[HEAD] = pair % num_heads
    seg[KEPT] = table[seg[HEAD], 0]
    seg[NUM_KEPT] = table[seg[HEAD], 1]
    seg[VALUE_ROW] = table[seg[HEAD], 2]
    seg[DROPPED] = table[seg[HEAD], 3]
    seg[NUM_DROPPED] = table[seg[HEAD], 4]
    seg[WINDOW_ROW] = table[seg[HEAD], 5]
    head_begin(begin, seg[ROW], seg[HEAD], num_heads, table, plan)
    seg[BEGIN] = begin[0]
    seg[HIDDEN_TILES] = plan[seg[ROW] + 1, 0] - plan[seg[ROW], 0]
    seg[PRUNED_TILES] = T.if_then_else(seg[NUM_KEPT] > 0, seg[HIDDEN_TILES], 0)
    seg[LENGTH] = seen[seg[ROW], seen.shape[1] - 1]
    cost = T.max(table[seg[HEAD], COST], 1)
    whole_cost = table[num_heads, COST]
    pruned_cost = seg[PRUNED_TILES] * cost
    seg[END] = seg[BEGIN] + pruned_cost + (plan[seg[ROW] + 1, 1] - plan[seg[ROW], 1]) * whole_cost
    low = T.max(span[0] - seg[BEGIN], 0)
    high = T.min(span[1], seg[END]) - seg[BEGIN]
    seg[FIRST] = T.if_then_else(
        low <= pruned_cost,
        (low + cost - 1) // cost,
        seg[PRUNED_TILES] + (low - pruned_cost + whole_cost - 1) // whole_cost,
    )
    seg[STOP] = T.if_then_else(
        high <= pruned_cost,
        (high + cost - 1) // cost,
        seg[PRUNED_TILES] + (high - pruned_cost + whole_cost - 1) // whole_cost,
    )


@T.macro
def locate_tile(tile: Any, seg: Any, index: Any, sink_size: Any) -> None:
    """Fill `tile` for one tile of a segment."""
    whole = T.alloc_var("int32")
    whole = index - seg[PRUNED_TILES]
    if whole < 0:
        tile[WHOLE] = 0
        tile[CHUNKS] = seg[NUM_KEPT]
        tile[TOKEN] = ((sink_size + TILE - 1) // TILE + index) * TILE
    else:
        tile[WHOLE] = 1
        tile[CHUNKS] = seg[NUM_KEPT] + seg[NUM_DROPPED]
        tile[TOKEN] = (
            whole + T.if_then_else(whole < (sink_size + TILE - 1) // TILE, 0, seg[HIDDEN_TILES])
        ) * TILE


@T.macro
def find_pages(
    pages: Any, tile: Any, seg: Any, page_table: Any, window_table: Any, kept_keys: Any, window_keys: Any,
    load_tokens: int,
) -> None:  # fmt: skip
    """Fill `pages` for the loads of a tile, as far as it makes them.

    Loads behind a row's end fetch its last tokens again. Where no token is whole the window table may say
    anything: what is fetched then counts nowhere.
    """
    token = T.alloc_var("int32")
    for load in range(TILE // load_tokens):
        token = tile[TOKEN] + load * load_tokens
        if load_tokens < TILE:
            token = T.min(token, (seg[LENGTH] - 1) // load_tokens * load_tokens)
        if seg[NUM_KEPT] > 0:
            pages[load, PAGE] = page_table[seg[ROW], T.truncdiv(token, kept_keys.shape[2])]
            pages[load, PLACE] = T.truncmod(token, kept_keys.shape[2])
        if tile[CHUNKS] > seg[NUM_KEPT]:
            pages[load, WINDOW_PAGE] = T.max(
                T.min(
                    window_table[seg[ROW], T.truncdiv(token, window_keys.shape[2])], window_keys.shape[0] - 1
                ),
                0,
            )
            pages[load, WINDOW_PLACE] = T.truncmod(token, window_keys.shape[2])


@T.macro
def find_limits(
    parallel: Any, limits: Any, seg: Any, seen: Any, pruned: Any, first: Any, columns: Any, sink_size: Any,
    num_groups: int,
) -> None:  # fmt: skip
    """Fill `limits` for the queries of a segment; queries of padding see what the last column does."""
    for j in parallel(limits.shape[1]):
        limits[SEEN, j] = seen[seg[ROW], first + T.min(j // num_groups, columns - 1)]
        limits[RECENT, j] = sink_size + pruned[seg[ROW], first + T.min(j // num_groups, columns - 1)]


@T.macro
def find_masks(masks: Any, tile: Any, seg: Any, limits: Any, sink_size: Any) -> None:
    """Set `masks` for a whole tile: whether tokens of it are not whole, and whether some are not visible."""
    masks[0] = T.cast(
        (tile[TOKEN] < limits[RECENT, limits.shape[1] - 1]) & (tile[TOKEN] + TILE > sink_size), "int32"
    )
    masks[1] = T.cast((tile[TOKEN] + TILE > limits[SEEN, 0]), "int32") | (
        masks[0] & T.cast(seg[NUM_KEPT] == 0, "int32")
    )


def _is_whole(token: Any, recent: Any, sink_size: Any) -> Any:
    return (token < sink_size) | (token >= recent)


@T.macro
def drop_pruned(parallel: Any, scores: Any, tile: Any, limits: Any, sink_size: Any) -> None:
    """Keep dropped channels' scores where a query sees the token whole; others may be anything."""
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.if_then_else(
            _is_whole(tile[TOKEN] + i, limits[RECENT, j], sink_size), scores[i, j], 0.0
        )


@T.macro
def hide_tokens(parallel: Any, scores: Any, tile: Any, seg: Any, limits: Any, sink_size: Any) -> None:
    """Hide what a query does not see: tokens behind its own, in a head of width 0 pruned ones too."""
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.if_then_else(
            (tile[TOKEN] + i < limits[SEEN, j])
            & ((seg[NUM_KEPT] > 0) | _is_whole(tile[TOKEN] + i, limits[RECENT, j], sink_size)),
            scores[i, j],
            NEG,
        )


def is_unseen(token: Any, seg: Any, limits: Any, sink_size: Any) -> Any:
    """Return whether no query sees a token: a weight of 0 times NaN would be NaN."""
    return (token >= seg[LENGTH]) | (
        (seg[NUM_KEPT] == 0) & (token >= sink_size) & (token < limits[RECENT, 0])
    )


@T.macro
def begin_softmax(parallel: Any, top: Any, total: Any, seg: Any, sinks: Any, num_groups: int) -> None:
    """Begin a running softmax, with the sinks of a head in the segment of its first tile.

    Args:
        parallel: `T.Parallel`, or `T.grid` on the CPU.
        top: As in `softmax_tile`.
        total: The same: a sink is counted in the place of the first token.
        seg: The segment.
        sinks: The sinks' logits, times log2 e; None without any.
        num_groups: G.
    """
    if sinks is None:
        T.fill(total, 0)
        T.fill(top, NEG)
    else:
        for j in parallel(top.shape[0]):
            top[j] = T.if_then_else(seg[FIRST] == 0, sinks[seg[HEAD] * num_groups + j % num_groups], NEG)
        for i, j in parallel(total.shape[0], total.shape[1]):
            total[i, j] = T.if_then_else((seg[FIRST] == 0) & (i == 0), 1.0, 0.0)


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
        out: Weighted values `[D, N]`.
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
    for i, j in parallel(out.shape[0], out.shape[1]):
        out[i, j] = out[i, j] * rescale[j]


def in_order(place: Any) -> Any:
    """Return what lies at a place of a product where nothing is rearranged: what comes at that place."""
    return place


def _times_scale(number: Any, scale: Any, seg: Any, channel: Any, dtype: str) -> Any:
    """Return a query's channel times its scale, as it is without scales."""
    if scale is None:
        return number
    row = T.if_then_else(scale.shape[0] > 1, seg[ROW], 0)
    return T.cast(T.cast(number, "float32") * scale[row, seg[HEAD], channel], dtype)


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
            c < seg[NUM_KEPT], seg[KEPT] + c, table[num_heads, 0] + seg[DROPPED] + c - seg[NUM_KEPT]
        )
        chunk[0] = T.min(chunk[0], index.shape[1] - 1)  # a head with fewer chunks does not read the rest
        for i, j in parallel(shared[c].shape[0], shared[c].shape[1], **one_by_one):
            lane = index[T.if_then_else(index.shape[0] > 1, seg[ROW], 0), chunk[0], lane_of(j)]
            shared[c][i, j] = T.if_then_else(
                (i < columns * num_groups) & (lane >= 0),
                _times_scale(
                    query[
                        seg[ROW],
                        seg[HEAD] * num_groups + i % num_groups,
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
    channel_of: Any, value_scale: Any,
) -> None:  # fmt: skip
    """Write a segment's result: to the output if this instance saw all of the head, else as a part.

    `channel_of` gives the channel of a row of `out`, which is multiplied by `value_scale` if there is one.
    """
    T.reduce_sum(total, sums, dim=0, **reduce_options)
    for j in parallel(sums.shape[0]):
        sums[j] = T.max(sums[j], 1e-30)
    for i, j in parallel(out.shape[0], out.shape[1]):
        out[i, j] = out[i, j] / sums[j]
    if value_scale is not None:
        for i, j in parallel(out.shape[0], out.shape[1]):
            out[i, j] = (
                out[i, j]
                * value_scale[
                    T.if_then_else(value_scale.shape[0] > 1, seg[ROW], 0),
                    seg[HEAD],
                    T.min(channel_of(i), value_scale.shape[2] - 1),
                ]
            )
    if (seg[BEGIN] >= span[0]) & (seg[END] <= span[1]):
        for i, j in parallel(out.shape[0], out.shape[1]):
            if (j < columns * num_groups) & (channel_of(i) < output.shape[3]):
                output[
                    seg[ROW],
                    seg[HEAD] * num_groups + j % num_groups,
                    first + j // num_groups,
                    channel_of(i),
                ] = T.cast(out[i, j], output.dtype)
    else:
        for i, j in parallel(out.shape[0], out.shape[1]):
            if channel_of(i) < output.shape[3]:
                parts[program, part, j, channel_of(i)] = out[i, j]
        for j in parallel(sums.shape[0]):
            lse[program, part, j] = T.log2(sums[j]) + top[j]


def merge_parts(shape: KernelShape, cpu: bool = False, overlap: bool = False) -> Any:
    """Return the kernel that merges the parts of heads which several program instances shared.

    With `overlap` it is launched while attention still runs, which GPUs before Hopper cannot.
    """
    d, n, g, dtype = shape.head_dim, shape.num_queries, shape.num_groups, shape.dtype
    batch, heads, width = T.dynamic("batch, heads, width")
    table_rows, plan_rows, programs = T.dynamic("table_rows, plan_rows, programs")
    fragment = T.alloc_local if cpu else T.alloc_fragment
    parallel = T.grid if cpu else T.Parallel
    threads = {} if cpu else {"threads": min(d, shape.head_threads)}

    @T.macro
    def add_parts(
        count: int, first: Any, last: Any, begin: Any, per_program: Any, query: Any, part: Any, part_lse: Any,
        total: Any, state: Any, parts: Any, lse: Any,
    ) -> None:  # fmt: skip
        program = T.alloc_var("int32")
        earlier_top = T.alloc_var("float32")
        weight = T.alloc_var("float32")
        for i in T.serial((last - first + count) // count):
            earlier_top = state[0]
            for p in T.unroll(count):
                program = T.min(first + i * count + p, last)
                # The first instance ends with this head, unless it also began with it.
                part_lse[p] = lse[
                    program,
                    T.if_then_else((program == first) & (program * per_program < begin[0]), 1, 0),
                    query,
                ]
                if first + i * count + p > last:
                    part_lse[p] = NEG
                for j in parallel(d):
                    part[p, j] = parts[
                        program,
                        T.if_then_else((program == first) & (program * per_program < begin[0]), 1, 0),
                        query,
                        j,
                    ]
            for p in T.unroll(count):
                state[0] = T.max(state[0], part_lse[p])
            weight = T.exp2(earlier_top - state[0])
            state[1] = state[1] * weight
            for j in parallel(d):
                total[j] = total[j] * weight
            for p in T.unroll(count):
                weight = T.exp2(part_lse[p] - state[0])
                state[1] += weight
                for j in parallel(d):
                    total[j] = total[j] + weight * part[p, j]

    @T.prim_func
    def leank_merge(
        table: T.Tensor((table_rows, 8), "int32"),
        plan: T.Tensor((plan_rows, 2), "int32"),
        parts: T.Tensor((programs, 2, n, d), "float32"),
        lse: T.Tensor((programs, 2, n), "float32"),
        output: T.Tensor((batch, heads, width, d), dtype),
        first_column: T.int32,
        columns: T.int32,
    ):
        with T.Kernel(heads, columns, batch, **threads) as (query_head, column, row):
            part = fragment((_PARTS, d), "float32")
            total = fragment((d,), "float32")
            part_lse = T.alloc_local((_PARTS,), "float32")
            state = T.alloc_local((2,), "float32")  # greatest log-sum-exp, sum of weights
            span = T.alloc_local((2,), "int32")
            begin = T.alloc_local((1,), "int32")
            head = T.alloc_var("int32")
            per_program = T.alloc_var("int32")
            stop = T.alloc_var("int32")
            first = T.alloc_var("int32")
            last = T.alloc_var("int32")
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
                T.pdl_trigger()  # the product may be launched and load weights, and waits for the end of this
                T.pdl_sync()  # all above ran while attention still did
            if stop > begin[0]:
                if last > first:
                    state[0] = NEG
                    state[1] = 0
                    # Few parts are the rule where rows are many; many are loaded at once.
                    if last - first < _FEW_PARTS:
                        add_parts(
                            _FEW_PARTS, first, last, begin, per_program, column * g + query_head % g, part,
                            part_lse, total, state, parts, lse,
                        )  # fmt: skip
                    else:
                        add_parts(
                            _PARTS, first, last, begin, per_program, column * g + query_head % g, part,
                            part_lse, total, state, parts, lse,
                        )  # fmt: skip
                    for j in parallel(d):
                        output[row, query_head, first_column + column, j] = T.cast(total[j] / state[1], dtype)
            else:  # a row without tokens
                for j in parallel(d):
                    output[row, query_head, first_column + column, j] = T.cast(0, dtype)

    return leank_merge
