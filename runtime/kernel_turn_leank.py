"""Kernel that expands one cache row to dense K and V, for torch's attention, in TileLang.

    leank_copy_row      K, zeros where channels are pruned, and V, for heads that see pruned tokens

One block copies a tile of tokens of one head: chunks are put in the order of channels in shared memory.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_leank import WARPGROUP, KernelShape, kernel_fp8, pool_types, scale_types
from .kernel_line_leank import TILE, Head, T, loops


def copy_row(shape: KernelShape, cpu: bool = False, overlap: bool = False) -> Any:
    """Return the kernel that copies a row of a cache whose pages are tiles."""
    d, e, f, dtype = shape.head_dim, shape.chunk_size, shape.value_chunk, shape.query_type
    blocks = list(range(shape.num_values))
    batch, layouts, all_chunks = T.dynamic("batch, layouts, all_chunks")
    entries, window_entries, table_rows = T.dynamic("entries, window_entries, table_rows")
    tokens, heads = T.dynamic("tokens, heads")
    pools, scales = pool_types(shape, cpu), scale_types(shape)
    line = 16 // (1 if shape.is_fp8 else 2)  # numbers of 16 bytes
    shared, fragment, parallel, threads = loops(cpu, WARPGROUP)

    def widened(stored: Any, scale: Any, row: Any, head: Any, channel: Any) -> Any:
        if not shape.is_fp8:
            return stored
        number = T.cast(kernel_fp8.from_fp8(stored, shape.product_type), "float32")
        return T.cast(number * scale[T.if_then_else(scale.shape[0] > 1, row, 0), head, channel], dtype)

    def whole(token: Any, sink_size: Any, pruned: Any) -> Any:
        return (token < sink_size) | (token >= sink_size + pruned)

    @T.prim_func
    def leank_copy_row(
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
        dense_keys: T.Tensor((tokens, heads, d), dtype),
        dense_values: T.Tensor((tokens, heads, d), dtype),
        row: T.int32,
        length: T.int32,
        pruned: T.int32,
        sink_size: T.int32,
    ):
        with T.Kernel(T.ceildiv(length, TILE), table_rows - 1, **threads) as (block, head):
            if not cpu:  # else loads would not take 16 bytes
                T.assume(kept_keys.strides[0] % line == 0)
                T.assume(values.strides[0] % line == 0)
                T.assume(window_keys.strides[0] % line == 0)
                T.assume(window_values.strides[0] % line == 0)
            tile = shared((TILE, d), dtype)
            chunk = fragment((TILE, e), shape.stored_type)
            # Variables, as all loads of a page share them.
            layout = T.alloc_var("int32")
            page = T.alloc_var("int32")
            window_page = T.alloc_var("int32", init=0)
            kept = T.alloc_var("int32")
            dropped = T.alloc_var("int32")
            num_values = T.alloc_var("int32")
            place = T.alloc_var("int32")
            layout = T.if_then_else(layouts > 1, row, 0)
            page = page_table[row, block]
            kept = table[head, Head.KEPT]
            dropped = table[head, Head.DROPPED]
            num_values = table[head, Head.KEPT_VALUES]
            place = table[head, Head.SEEING]
            if place >= 0:
                for i, j in parallel(TILE, d):
                    tile[i, j] = T.cast(0, dtype)
                for c in T.serial(table[head, Head.NUM_KEPT]):
                    for i, j in parallel(TILE, e):
                        chunk[i, j] = kept_keys[page, kept + c, i, j]
                    for i, j in parallel(TILE, e):
                        channel = index[layout, kept + c, j]
                        if channel >= 0:
                            tile[i, T.max(channel, 0) % d] = widened(
                                chunk[i, j], key_scale, row, head, T.max(channel, 0) % d
                            )
                if (block * TILE < sink_size) | (block * TILE + TILE > sink_size + pruned):
                    window_page = window_table[row, block]
                    for c in T.serial(table[head, Head.NUM_DROPPED]):
                        for i, j in parallel(TILE, e):
                            chunk[i, j] = window_keys[window_page, dropped + c, i, j]
                        for i, j in parallel(TILE, e):
                            channel = index[layout, table[table_rows - 1, Head.KEPT] + dropped + c, j]
                            if (channel >= 0) & whole(block * TILE + i, sink_size, pruned):
                                tile[i, T.max(channel, 0) % d] = widened(
                                    chunk[i, j], key_scale, row, head, T.max(channel, 0) % d
                                )
                for i, j in parallel(TILE, d):
                    if block * TILE + i < length:
                        dense_keys[block * TILE + i, place, j] = tile[i, j]
                for b in blocks:
                    if b < num_values:
                        for i, j in parallel(TILE, f):
                            if block * TILE + i < length:
                                dense_values[block * TILE + i, place, b * f + j] = widened(
                                    values[page, table[head, Head.VALUE] + b, i, j],
                                    value_scale, row, head, b * f + j,
                                )  # fmt: skip
                    else:
                        for i, j in parallel(TILE, f):
                            if block * TILE + i < length:
                                if whole(block * TILE + i, sink_size, pruned):
                                    dense_values[block * TILE + i, place, b * f + j] = widened(
                                        window_values[
                                            window_page, table[head, Head.WINDOW_VALUE] + b - num_values, i, j
                                        ],
                                        value_scale, row, head, b * f + j,
                                    )  # fmt: skip
                                else:
                                    dense_values[block * TILE + i, place, b * f + j] = T.cast(0, dtype)

    return leank_copy_row
