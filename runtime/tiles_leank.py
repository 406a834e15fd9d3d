"""How decode attention is cut into tiles: the part of the kernels that Hopper, older GPUs and the CPU share.

The work of a launch is one line: row after row, in a row head after head, in a head tile after tile (tiles
of pruned tokens first, then whole ones). Every tile has a cost, its bytes of K and V, and every program
instance takes an equal stretch of the line: a head of width 96 is shared by more instances than one of
width 32, and one row of 128K tokens fills the chip as well as 64 rows do. A tile belongs to the stretch
that its first unit lies in. Nothing of this is known to the host: lengths, widths and positions are data on
the device.

    whole tokens:  sink 0 … sink_size   |   recent up to the ring's end   |   recent from the ring's start
                   (three runs, so that the dropped channels of a tile lie in one piece of the ring)

The macros fill two small arrays, `seg` (one head of one row) and `tile`; the numbers below name their places.
They are variables, not expressions, on purpose: TileLang's simplifier takes minutes over inlined arithmetic.
"""

from __future__ import annotations

from typing import Any

try:
    import tilelang.language as T  # noqa: N812
except ImportError as error:
    raise ImportError(f"the decode kernels need tilelang (pip install tilelang): {error}") from error

TILE = 64  # tokens of a tile: the M of one wgmma
NEG = -1e30  # a score that no softmax notices, finite so that differences of two are not NaN

# Places in `seg`.
(ROW, HEAD, FIRST, STOP, PRUNED_TILES, KEPT, NUM_KEPT, VALUE_ROW, DROPPED, NUM_DROPPED, WINDOW_ROW,
 BEGIN, END, PRUNED, SINK, RING_START, RUN, LAST_RUN, SINK_TILES, RUN_TILES) = range(20)  # fmt: skip
SEG_SIZE = 20

# Places in `tile`: first token, first window slot, real tokens, chunks to read.
TOKEN, SLOT, VALID, CHUNKS = range(4)
TILE_SIZE = 4

# Columns of the head table, `ChunkLayout.head_table`; its last row holds totals.
COST, EARLIER = 6, 7


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
    segments: Any, span: Any, begin: Any, rows: Any, num_heads: Any, table: Any, plan: Any
) -> None:
    """Set `segments` to the first (row, head) pair of a stretch and the number of pairs it touches."""
    first_row = T.alloc_var("int32", init=-1)
    last_row = T.alloc_var("int32", init=-1)
    first_head = T.alloc_var("int32", init=-1)
    last_head = T.alloc_var("int32", init=-1)
    for row in T.serial(rows):
        head_begin(begin, row, 0, num_heads, table, plan)
        first_row += T.cast(begin[0] <= span[0], "int32")
        last_row += T.cast(begin[0] < span[1], "int32")
    last_row = T.max(last_row, 0)
    for head in T.serial(num_heads):
        head_begin(begin, first_row, head, num_heads, table, plan)
        first_head += T.cast(begin[0] <= span[0], "int32")
        head_begin(begin, last_row, head, num_heads, table, plan)
        last_head += T.cast(begin[0] < span[1], "int32")
    segments[0] = first_row * num_heads + first_head
    segments[1] = T.if_then_else(span[0] < span[1], last_row * num_heads + last_head - segments[0] + 1, 0)


@T.macro
def locate_segment(
    seg: Any, pair: Any, span: Any, begin: Any, num_heads: Any, sink_size: Any, ring_size: Any,
    table: Any, lengths: Any, pruned_lengths: Any, plan: Any,
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
    seg[PRUNED_TILES] = T.if_then_else(seg[NUM_KEPT] > 0, plan[seg[ROW] + 1, 0] - plan[seg[ROW], 0], 0)
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
    seg[PRUNED] = pruned_lengths[seg[ROW]]
    seg[SINK] = T.min(lengths[seg[ROW]], sink_size)
    seg[RING_START] = seg[PRUNED] % ring_size
    seg[LAST_RUN] = T.max(lengths[seg[ROW]] - sink_size - seg[PRUNED], 0)
    seg[RUN] = T.min(seg[LAST_RUN], ring_size - seg[RING_START])
    seg[LAST_RUN] = seg[LAST_RUN] - seg[RUN]
    seg[SINK_TILES] = (seg[SINK] + TILE - 1) // TILE
    seg[RUN_TILES] = (seg[RUN] + TILE - 1) // TILE


@T.macro
def locate_tile(tile: Any, seg: Any, index: Any, sink_size: Any) -> None:
    """Fill `tile` for one tile of a segment."""
    whole = T.alloc_var("int32")
    whole = index - seg[PRUNED_TILES]
    if whole < 0:
        tile[TOKEN] = sink_size + index * TILE
        tile[SLOT] = 0
        tile[VALID] = seg[PRUNED] - index * TILE
        tile[CHUNKS] = seg[NUM_KEPT]
    else:
        tile[CHUNKS] = seg[NUM_KEPT] + seg[NUM_DROPPED]
        if whole < seg[SINK_TILES]:
            tile[TOKEN] = whole * TILE
            tile[SLOT] = whole * TILE
            tile[VALID] = seg[SINK] - whole * TILE
        else:
            whole = whole - seg[SINK_TILES]
            if whole < seg[RUN_TILES]:
                tile[TOKEN] = sink_size + seg[PRUNED] + whole * TILE
                tile[SLOT] = sink_size + seg[RING_START] + whole * TILE
                tile[VALID] = seg[RUN] - whole * TILE
            else:
                whole = whole - seg[RUN_TILES]
                tile[TOKEN] = sink_size + seg[PRUNED] + seg[RUN] + whole * TILE
                tile[SLOT] = sink_size + whole * TILE
                tile[VALID] = seg[LAST_RUN] - whole * TILE


@T.macro
def softmax_tile(
    parallel: Any, scores: Any, top: Any, earlier_top: Any, rescale: Any, total: Any, out: Any,
    valid: Any, scale: Any, reduce_options: Any,
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
        valid: Real tokens of the tile.
        scale: Factor on the scores, times log2 e.
        reduce_options: Keyword arguments of the maximum.
    """
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.if_then_else(i < valid, scores[i, j] * scale, NEG)
    T.copy(top, earlier_top)
    T.reduce_max(scores, top, dim=0, clear=False, **reduce_options)
    for j in parallel(scores.shape[1]):
        rescale[j] = T.exp2(earlier_top[j] - top[j])
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        scores[i, j] = T.exp2(scores[i, j] - top[j])
    for i, j in parallel(scores.shape[0], scores.shape[1]):
        total[i, j] = total[i, j] * rescale[j] + scores[i, j]
    for i, j in parallel(out.shape[0], out.shape[1]):
        out[i, j] = out[i, j] * rescale[j]
