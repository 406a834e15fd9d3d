"""Work partitioning: assigns a launch's tiles to program instances, and loads tiles, in TileLang.

A tile is 64 tokens of one head of one row, at positions 64 t … 64 t + 63. The work of an attention
launch is one line: row after row, in a row head after head, in a head tile after tile, first those of pruned
tokens, then all others. A tile is as long as the time it takes, a head's first one longer by the time it
takes to begin a head, and every program instance takes an equal stretch of the line: a head of width 96 is
shared by more instances than one of width 32, and one row of 128K tokens fills the chip as well as 64 rows
do. A tile belongs to the stretch that its first unit lies in. The host knows nothing of this: lengths,
widths and positions are data on the device.

    the line:     row 0 [head 0 ......][head 1 ............] row 1 [head 0 ..][head 1 ....] ...
    instances:    |-------- 0 --------|-------- 1 --------|-------- 2 --------| ...
    a head:       [pruned]...[pruned]  [sink]...[sink and pruned]  [pruned and recent]...[recent]

Pruned tiles lie wholly among tokens that every column sees pruned; they cost `table[head, Head.COST]`. All
others are whole tiles, cost `table[num_heads, Head.COST]` and read dropped channels too, whose scores count
where a column sees a token whole. A head that several instances share leaves one part each, with its
log-sum-exp; `leank_merge` joins them.

The macros fill small arrays, `seg` (one head of one row), `tile` and `pages`; the classes below name their
places. They are variables, not expressions, on purpose: TileLang's simplifier takes minutes over inlined
arithmetic. `work` is that of kernel_attention_leank: arguments and buffers of attention by their names.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

try:
    import tilelang
except ImportError as error:
    raise ImportError(f"the decode kernels need tilelang (pip install tilelang): {error}") from error

from .kernel_key_leank import HEAD_START, TILE

T: Any = tilelang.language  # which the other files of kernels take from here


class Head:
    """Columns of the head table, `ChunkLayout.head_table`; its last row holds totals."""

    (KEPT, NUM_KEPT, VALUE, DROPPED, NUM_DROPPED, WINDOW_VALUE, COST, EARLIER, KEPT_VALUES,
     SEEING) = range(10)  # fmt: skip


class Seg:
    """Places in `seg`, one head of one row.

    HIDDEN_TILES are the pruned tiles of the row, which a head of width 0 has none of; NUM_VALUES, the head's
    kept chunks of V, is there where V comes in chunks.
    """

    (ROW, HEAD, FIRST, STOP, PRUNED_TILES, KEPT, NUM_KEPT, VALUE, DROPPED, NUM_DROPPED, WINDOW_VALUE,
     BEGIN, END, LENGTH, HIDDEN_TILES, NUM_VALUES) = range(16)  # fmt: skip
    SIZE = 16


class Tile:
    """Places in `tile`: first token, chunks to read, whether it is a whole tile."""

    TOKEN, CHUNKS, WHOLE = range(3)
    SIZE = 3


class Page:
    """Places in `pages`, for every load of a tile: a page and a place in it, in either pool."""

    PAGE, PLACE, WINDOW_PAGE, WINDOW_PLACE = range(4)
    SIZE = 4


def loops(cpu: bool, threads: int) -> tuple[Any, Any, Any, dict[str, int]]:
    """Return what allocates shared memory and a thread's own, parallel loops, and options of the launch."""
    if cpu:  # plain loops, for tests
        return T.alloc_local, T.alloc_local, T.grid, {}
    return T.alloc_shared, T.alloc_fragment, T.Parallel, {"threads": threads}


@T.macro
def next_stage(stage: T.Ref, phase: T.Ref, stages: int) -> None:
    """Go on in a ring of buffers, whose barriers change their phase with every round."""
    stage += 1
    if stage == stages:
        stage = 0
        phase = phase ^ 1


def place_in_ring(stage: Any, stages: int) -> Any:
    """Return a stage within bounds that TileLang sees; without them it finds every address by divisions."""
    return T.max(T.min(stage, stages - 1), 0)


@T.macro
def stretch_bounds(
    span: Any, program: Any, count: Any, num_heads: Any, table: Any, plan: Any, rows: Any
) -> None:
    """Set `span` to the first unit of a stretch and one past its last."""
    total, per_instance = [T.alloc_var("int32") for _ in range(2)]
    total = (
        plan[rows, 0] * table[num_heads, Head.EARLIER]
        + plan[rows, 1] * num_heads * table[num_heads, Head.COST]
    )
    # Where tiles are fewer than instances, parts of a head would have no tile.
    per_instance = T.max(T.truncdiv(total + count - 1, count), table[num_heads, Head.COST])
    span[0] = program * per_instance
    span[1] = T.min((program + 1) * per_instance, total)


@T.macro
def head_begin(begin: Any, row: Any, head: Any, num_heads: Any, table: Any, plan: Any) -> None:
    """Set `begin` to the first unit of one head of one row."""
    begin[0] = (
        plan[row, 0] * table[num_heads, Head.EARLIER]
        + plan[row, 1] * num_heads * table[num_heads, Head.COST]
        + (plan[row + 1, 0] - plan[row, 0]) * table[head, Head.EARLIER]
        + (plan[row + 1, 1] - plan[row, 1]) * head * table[num_heads, Head.COST]
    )


@T.macro
def find_segments(work: Any) -> None:
    """Set `span` to an instance's stretch, `segments` to its first (row, head) pair and how many it touches.

    The lanes of a warp look at a row or a head each: pairs before the stretch's first unit are counted in
    the lower half of a number, those before its end in the upper.
    """
    segments, span, begin, num_heads = work.segments, work.span, work.begin, work.num_heads
    rows, table, plan, cpu = work.seen.shape[0], work.table, work.plan, work.cpu
    lanes = 1 if cpu else 32
    stretch_bounds(span, work.program, work.programs, num_heads, table, plan, rows)
    lane = T.alloc_var("int32", init=0)
    place, first_row, last_row = [T.alloc_var("int32") for _ in range(3)]
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
def locate_segment(work: Any, pair: Any) -> None:
    """Fill `seg` for one head of one row, as far as it lies in `span`."""
    seg, span, begin, num_heads = work.seg, work.span, work.begin, work.num_heads
    table, seen, plan = work.table, work.seen, work.plan
    cost, pruned_cost, whole_cost, low, high = [T.alloc_var("int32") for _ in range(5)]
    seg[Seg.ROW] = T.truncdiv(pair, num_heads)
    seg[Seg.HEAD] = pair - seg[Seg.ROW] * num_heads
    seg[Seg.KEPT] = table[seg[Seg.HEAD], Head.KEPT]
    seg[Seg.NUM_KEPT] = table[seg[Seg.HEAD], Head.NUM_KEPT]
    seg[Seg.VALUE] = table[seg[Seg.HEAD], Head.VALUE]
    seg[Seg.DROPPED] = table[seg[Seg.HEAD], Head.DROPPED]
    seg[Seg.NUM_DROPPED] = table[seg[Seg.HEAD], Head.NUM_DROPPED]
    seg[Seg.WINDOW_VALUE] = table[seg[Seg.HEAD], Head.WINDOW_VALUE]
    if len(work.blocks) > 1:
        seg[Seg.NUM_VALUES] = table[seg[Seg.HEAD], Head.KEPT_VALUES]
    head_begin(begin, seg[Seg.ROW], seg[Seg.HEAD], num_heads, table, plan)
    seg[Seg.BEGIN] = begin[0]
    seg[Seg.HIDDEN_TILES] = plan[seg[Seg.ROW] + 1, 0] - plan[seg[Seg.ROW], 0]
    seg[Seg.PRUNED_TILES] = T.if_then_else(seg[Seg.NUM_KEPT] > 0, seg[Seg.HIDDEN_TILES], 0)
    seg[Seg.LENGTH] = seen[seg[Seg.ROW], seen.shape[1] - 1]
    cost = T.max(table[seg[Seg.HEAD], Head.COST], 1)
    whole_cost = table[num_heads, Head.COST]
    pruned_cost = seg[Seg.PRUNED_TILES] * cost
    seg[Seg.END] = (
        seg[Seg.BEGIN] + pruned_cost + (plan[seg[Seg.ROW] + 1, 1] - plan[seg[Seg.ROW], 1]) * whole_cost
    )
    # The first tile lies behind the head's start, and is taken with its first unit.
    low = span[0] - seg[Seg.BEGIN]
    low = T.if_then_else(low > 0, T.max(low - HEAD_START * whole_cost, 1), 0)
    high = T.min(span[1], seg[Seg.END]) - seg[Seg.BEGIN]
    high = T.if_then_else(high > 0, T.max(high - HEAD_START * whole_cost, 1), 0)
    seg[Seg.FIRST] = T.if_then_else(
        low <= pruned_cost,
        T.truncdiv(low + cost - 1, cost),
        seg[Seg.PRUNED_TILES] + T.truncdiv(low - pruned_cost + whole_cost - 1, whole_cost),
    )
    seg[Seg.STOP] = T.if_then_else(
        high <= pruned_cost,
        T.truncdiv(high + cost - 1, cost),
        seg[Seg.PRUNED_TILES] + T.truncdiv(high - pruned_cost + whole_cost - 1, whole_cost),
    )


@T.macro
def locate_tile(work: Any, index: Any) -> None:
    """Fill `tile` for one tile of a segment."""
    tile, seg, sink_size = work.tile, work.seg, work.sink_size
    whole = T.alloc_var("int32")
    whole = index - seg[Seg.PRUNED_TILES]
    if whole < 0:
        tile[Tile.WHOLE] = 0
        tile[Tile.CHUNKS] = seg[Seg.NUM_KEPT]
        tile[Tile.TOKEN] = ((sink_size + TILE - 1) // TILE + index) * TILE
    else:
        tile[Tile.WHOLE] = 1
        tile[Tile.CHUNKS] = seg[Seg.NUM_KEPT] + seg[Seg.NUM_DROPPED]
        tile[Tile.TOKEN] = (
            whole + T.if_then_else(whole < (sink_size + TILE - 1) // TILE, 0, seg[Seg.HIDDEN_TILES])
        ) * TILE


def keeps_values(seg: Any, chunk: int, num_values: int) -> Any:
    """Return whether pruned tokens have this one of a head's `num_values` chunks of V."""
    return seg[Seg.NUM_KEPT] > 0 if num_values == 1 else chunk < seg[Seg.NUM_VALUES]


def drops_values(seg: Any, chunk: int, num_values: int) -> Any:
    """Return whether only whole tokens have a chunk of V."""
    return seg[Seg.NUM_KEPT] == 0 if num_values == 1 else chunk >= seg[Seg.NUM_VALUES]


def has_values(seg: Any, chunk: int, num_values: int, is_whole: Any) -> Any:
    """Return whether a tile has a chunk of V: a whole one has all, and V in one chunk is in every tile."""
    return True if num_values == 1 else keeps_values(seg, chunk, num_values) | is_whole


def weighs_apart(seg: Any, masks: Any, num_values: int) -> Any:
    """Return whether a tile's dropped chunks of V take other weights: some of its tokens are not whole."""
    return False if num_values == 1 else (masks[0] != 0) & (seg[Seg.NUM_VALUES] < num_values)


def reads_window(tile: Any, seg: Any, num_values: int) -> Any:
    """Return whether a tile reads chunks of the window."""
    of_keys = tile[Tile.CHUNKS] > seg[Seg.NUM_KEPT]
    if num_values == 1:  # who drops V drops K
        return of_keys
    return of_keys | ((tile[Tile.WHOLE] != 0) & (seg[Seg.NUM_VALUES] < num_values))


@T.macro
def find_pages(work: Any, pages: Any) -> None:
    """Fill `pages` for the loads of a tile, as far as it makes them.

    Loads behind a row's end fetch its last tokens again. Where no token is whole the window table may say
    anything: what is fetched then counts nowhere.
    """
    tile, seg, kept_keys, window_keys = work.tile, work.seg, work.kept_keys, work.window_keys
    load_tokens = work.shape.load_tokens
    token = T.alloc_var("int32")
    for load in range(TILE // load_tokens):
        token = tile[Tile.TOKEN] + load * load_tokens
        if load_tokens < TILE:
            token = T.min(token, (seg[Seg.LENGTH] - 1) // load_tokens * load_tokens)
        if seg[Seg.NUM_KEPT] > 0:
            pages[load, Page.PAGE] = T.truncdiv(token, kept_keys.shape[2])
            pages[load, Page.PLACE] = token - pages[load, Page.PAGE] * kept_keys.shape[2]
            pages[load, Page.PAGE] = work.page_table[seg[Seg.ROW], pages[load, Page.PAGE]]
        if reads_window(tile, seg, len(work.blocks)):
            pages[load, Page.WINDOW_PAGE] = T.truncdiv(token, window_keys.shape[2])
            pages[load, Page.WINDOW_PLACE] = token - pages[load, Page.WINDOW_PAGE] * window_keys.shape[2]
            pages[load, Page.WINDOW_PAGE] = work.window_table[seg[Seg.ROW], pages[load, Page.WINDOW_PAGE]]
            pages[load, Page.WINDOW_PAGE] = T.min(pages[load, Page.WINDOW_PAGE], window_keys.shape[0] - 1)
            pages[load, Page.WINDOW_PAGE] = T.max(pages[load, Page.WINDOW_PAGE], 0)


def _tokens_of(work: Any, pool: Any, chunk: Any, load: int, lanes: tuple[int, int], in_window: bool) -> Any:
    """Return the part of a pool that a load takes: a chunk's tokens, between two lanes."""
    page, place = (Page.WINDOW_PAGE, Page.WINDOW_PLACE) if in_window else (Page.PAGE, Page.PLACE)
    first = work.pages[load, place]
    tokens = slice(first, first + work.shape.load_tokens)
    return pool[work.pages[load, page], chunk, tokens, slice(*lanes)]


@T.macro
def load_tile(work: Any, fetch: Any, room: Any, is_whole: Any, value_spans: Any) -> None:
    """Load a tile's chunks of K and V into the buffers `k` and `v`, from the pages that `find_pages` found.

    `fetch` makes a load, given what is loaded and where to; `room` gives the part of a buffer between two
    tokens and two lanes. Loads of V are of `value_spans`, each a chunk and two lanes.
    """
    k, v, seg, size = work.k, work.v, work.seg, work.shape.load_tokens
    for b in list(range(TILE // size)):
        rows = b * size, (b + 1) * size
        for c in list(range(len(k))):
            lanes = 0, work.shape.chunk_size
            if c < seg[Seg.NUM_KEPT]:
                fetch(
                    _tokens_of(work, work.kept_keys, seg[Seg.KEPT] + c, b, lanes, False),
                    room(k[c], *rows, *lanes),
                )
            else:
                if c < work.tile[Tile.CHUNKS]:
                    fetch(
                        _tokens_of(
                            work, work.window_keys, seg[Seg.DROPPED] + c - seg[Seg.NUM_KEPT], b, lanes, True
                        ),
                        room(k[c], *rows, *lanes),
                    )
        for c, lanes in value_spans:
            if keeps_values(seg, c, len(v)):
                fetch(
                    _tokens_of(work, work.values, seg[Seg.VALUE] + c, b, lanes, False),
                    room(v[c], *rows, *lanes),
                )
            else:
                if has_values(seg, c, len(v), is_whole):
                    fetch(
                        _tokens_of(
                            work,
                            work.window_values,
                            seg[Seg.WINDOW_VALUE] + (c - seg[Seg.NUM_VALUES] if c else 0),
                            b,
                            lanes,
                            True,
                        ),
                        room(v[c], *rows, *lanes),
                    )
