"""Work partitioning: assigns a launch's tiles to program instances, in TileLang.

A tile is 64 tokens of one head of one row, at positions 64 t … 64 t + 63. The work of an attention
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

The macros fill small arrays, `seg` (one head of one row), `tile` and `pages`; the numbers below name their
places. They are variables, not expressions, on purpose: TileLang's simplifier takes minutes over inlined
arithmetic.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

try:
    import tilelang.language as T  # noqa: N812
except ImportError as error:
    raise ImportError(f"the decode kernels need tilelang (pip install tilelang): {error}") from error

TILE = 64  # tokens of a tile: the M of one wgmma

# Places in `seg`. HIDDEN_TILES are the pruned tiles of the row, which a head of width 0 has none of;
# NUM_VALUES, the head's kept chunks of V, is there where V comes in chunks.
(ROW, HEAD, FIRST, STOP, PRUNED_TILES, KEPT, NUM_KEPT, VALUE, DROPPED, NUM_DROPPED, WINDOW_VALUE,
 BEGIN, END, LENGTH, HIDDEN_TILES, NUM_VALUES) = range(16)  # fmt: skip
SEG_SIZE = 16

# Places in `tile`: first token, chunks to read, whether it is a whole tile.
TOKEN, CHUNKS, WHOLE = range(3)
TILE_SIZE = 3

# Places in `pages`, for every load of a tile: a page and a place in it, in either pool.
PAGE, PLACE, WINDOW_PAGE, WINDOW_PLACE = range(4)
PAGE_SIZE = 4

# Columns of the head table, `ChunkLayout.head_table`; its last row holds totals.
COST, EARLIER, KEPT_VALUES, SEEING = 6, 7, 8, 9


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
    seg: Any, pair: Any, span: Any, begin: Any, num_heads: Any, table: Any, seen: Any, plan: Any,
    num_values: int,
) -> None:  # fmt: skip
    """Fill `seg` for one head of one row, of `num_values` chunks of V, as far as it lies in `span`."""
    cost = T.alloc_var("int32")
    pruned_cost = T.alloc_var("int32")
    whole_cost = T.alloc_var("int32")
    low = T.alloc_var("int32")
    high = T.alloc_var("int32")
    seg[ROW] = pair // num_heads
    seg[HEAD] = pair % num_heads
    seg[KEPT] = table[seg[HEAD], 0]
    seg[NUM_KEPT] = table[seg[HEAD], 1]
    seg[VALUE] = table[seg[HEAD], 2]
    seg[DROPPED] = table[seg[HEAD], 3]
    seg[NUM_DROPPED] = table[seg[HEAD], 4]
    seg[WINDOW_VALUE] = table[seg[HEAD], 5]
    if num_values > 1:
        seg[NUM_VALUES] = table[seg[HEAD], KEPT_VALUES]
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


def keeps_values(seg: Any, chunk: int, num_values: int) -> Any:
    """Return whether pruned tokens have this one of a head's `num_values` chunks of V."""
    return seg[NUM_KEPT] > 0 if num_values == 1 else chunk < seg[NUM_VALUES]


def drops_values(seg: Any, chunk: int, num_values: int) -> Any:
    """Return whether only whole tokens have a chunk of V."""
    return seg[NUM_KEPT] == 0 if num_values == 1 else chunk >= seg[NUM_VALUES]


def has_values(seg: Any, chunk: int, num_values: int, is_whole: Any) -> Any:
    """Return whether a tile has a chunk of V: a whole one has all, and V in one chunk is in every tile."""
    return True if num_values == 1 else keeps_values(seg, chunk, num_values) | is_whole


def weighs_apart(seg: Any, masks: Any, num_values: int) -> Any:
    """Return whether a tile's dropped chunks of V take other weights: some of its tokens are not whole."""
    return False if num_values == 1 else (masks[0] != 0) & (seg[NUM_VALUES] < num_values)


def reads_window(tile: Any, seg: Any, num_values: int) -> Any:
    """Return whether a tile reads chunks of the window."""
    of_keys = tile[CHUNKS] > seg[NUM_KEPT]
    if num_values == 1:  # who drops V drops K
        return of_keys
    return of_keys | ((tile[WHOLE] != 0) & (seg[NUM_VALUES] < num_values))


@T.macro
def find_pages(
    pages: Any, tile: Any, seg: Any, page_table: Any, window_table: Any, kept_keys: Any, window_keys: Any,
    load_tokens: int, num_values: int,
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
        if reads_window(tile, seg, num_values):
            pages[load, WINDOW_PAGE] = T.max(
                T.min(
                    window_table[seg[ROW], T.truncdiv(token, window_keys.shape[2])], window_keys.shape[0] - 1
                ),
                0,
            )
            pages[load, WINDOW_PLACE] = T.truncmod(token, window_keys.shape[2])
