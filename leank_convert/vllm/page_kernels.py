"""Kernels between pages and dense K and V of many tokens, in TileLang.

    leank_append_slots    K and V of new tokens to the pages that their slots name
    leank_gather_rows     K and V of rows whose tokens are all whole, side by side

One block takes `TILE` tokens of one head. Pages of both groups may differ in size, and a tile may touch
several of each: every token looks up its own. Channels change their order in shared memory.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from leank_convert._runtime.kernel_key_leank import KernelKey
from leank_convert._runtime.kernel_leank import (
    WARPGROUP,
    KernelShape,
    compile_kernels,
    kernel_fp8,
    mean_type,
    pool_types,
    scale_types,
)
from leank_convert._runtime.kernel_line_leank import Head, T, loops

TILE = 64  # tokens of a block
# Numbers of 16 bytes: tokens of K and V begin at multiples of it. In shared memory a tile's rows are 16 bytes
# longer than a head, so that a channel of the tokens that a warp works on lies in as many banks.
VECTOR = 8


def compile_page_kernels(key: KernelKey, arch: str) -> list[Any]:
    """Compile both kernels beside decode kernels, or load them from TileLang's cache on disk."""
    shape = KernelShape(**vars(key))
    return compile_kernels([], [append_slots(shape), gather_rows(shape)], arch)


def _dense_type(shape: KernelShape, tokens: Any, heads: Any, stride: Any, cpu: bool) -> Any:
    """Return what `[tokens, H_kv, D]` is to a kernel; TileLang's CPU target knows no strides."""
    size, strides = (tokens, heads, shape.head_dim), (stride, shape.head_dim, 1)
    return T.Tensor(size, shape.query_type) if cpu else T.StridedTensor(size, strides, shape.query_type)


def append_slots(shape: KernelShape, cpu: bool = False) -> Any:
    """Return the kernel that writes tokens to pages; a slot of -1 is nowhere."""
    d, e, f, dtype = shape.head_dim, shape.chunk_size, shape.value_chunk, shape.query_type
    num_tokens, heads, key_stride, value_stride = T.dynamic("num_tokens, heads, key_stride, value_stride")
    layouts, all_chunks, table_rows = T.dynamic("layouts, all_chunks, table_rows")
    pools, scales = pool_types(shape, cpu), scale_types(shape)
    line = 16 if shape.is_fp8 else VECTOR
    shared, fragment, parallel, threads = loops(cpu, WARPGROUP)
    value_chunks = list(range(d // f))

    def stored(number: Any, scale: Any, head: Any, channel: Any) -> Any:
        if not shape.is_fp8:
            return number
        return kernel_fp8.to_fp8(T.cast(number, "float32") / scale[0, head, channel])

    @T.macro
    def write(
        pool: Any, pool_values: Any, slot: Any, page: Any, chunk: Any, tile: Any, value: Any, index: Any,
        chunks: Any, count: Any, lanes: Any, row: Any, first_value: Any, last_value: Any,
    ) -> None:  # fmt: skip
        """Write K of a tile, `count` chunks from `chunks` on, whose channels stand at `lanes`.

        And a head's chunks of V from `first_value` up to `last_value`, from `row` on.
        """
        for i in parallel(TILE):
            page[i] = T.truncdiv(T.max(slot[i], 0), pool.shape[2])
        for i in parallel(TILE):
            slot[i] = T.if_then_else(slot[i] < 0, -1, T.truncmod(T.max(slot[i], 0), pool.shape[2]))
        for c in T.serial(count):
            for i, j in parallel(TILE, e):
                channel = index[0, lanes + c, j]
                chunk[i, j] = T.if_then_else(
                    channel >= 0, tile[i, T.max(channel, 0) % d], T.cast(0, shape.stored_type)
                )
            for i, j in parallel(TILE, e):
                if slot[i] >= 0:
                    pool[page[i], chunks + c, slot[i], j] = chunk[i, j]
        for c in value_chunks:
            if (c >= first_value) & (c < last_value):
                for i, j in parallel(TILE, f):
                    if slot[i] >= 0:
                        pool_values[page[i], row + c - first_value, slot[i], j] = value[c][i, j]

    @T.prim_func
    def leank_append_slots(
        keys: _dense_type(shape, num_tokens, heads, key_stride, cpu),
        new_values: _dense_type(shape, num_tokens, heads, value_stride, cpu),
        kept_keys: pools[0],
        values: pools[1],
        window_keys: pools[2],
        window_values: pools[3],
        index: T.Tensor((layouts, all_chunks, e), "int32"),
        table: T.Tensor((table_rows, 10), "int32"),
        key_scale: scales[0],
        value_scale: scales[1],
        key_mean: mean_type(shape),
        slots: T.Tensor((num_tokens,), "int64"),
        window_slots: T.Tensor((num_tokens,), "int64"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, TILE), heads, **threads) as (block, head):
            if not cpu:
                T.assume(key_stride % VECTOR == 0)
                T.assume(value_stride % VECTOR == 0)
                T.assume(kept_keys.strides[0] % line == 0)
                T.assume(values.strides[0] % line == 0)
                T.assume(window_keys.strides[0] % line == 0)
                T.assume(window_values.strides[0] % line == 0)
            tile = shared((TILE, d + line), shape.stored_type)
            chunk = fragment((TILE, e), shape.stored_type)
            value = [fragment((TILE, f), shape.stored_type) for _ in value_chunks]
            slot = shared((TILE,), "int32")
            page = shared((TILE,), "int32")
            window_slot = shared((TILE,), "int32")
            window_page = shared((TILE,), "int32")
            for i in parallel(TILE):
                slot[i] = T.if_then_else(
                    block * TILE + i < num_tokens,
                    T.cast(slots[T.min(block * TILE + i, num_tokens - 1)], "int32"),
                    -1,
                )
            for i in parallel(TILE):
                window_slot[i] = T.if_then_else(
                    block * TILE + i < num_tokens,
                    T.cast(window_slots[T.min(block * TILE + i, num_tokens - 1)], "int32"),
                    -1,
                )
            for i, j in parallel(TILE, d):
                if block * TILE + i < num_tokens:
                    tile[i, j] = stored(
                        T.cast(
                            T.cast(keys[block * TILE + i, head, j], "float32")
                            - key_mean[0, T.min(head, key_mean.shape[1] - 1), j],
                            dtype,
                        ),
                        key_scale,
                        head,
                        j,
                    )
            for c in value_chunks:
                for i, j in parallel(TILE, f):
                    if block * TILE + i < num_tokens:
                        value[c][i, j] = stored(
                            new_values[block * TILE + i, head, c * f + j], value_scale, head, c * f + j
                        )
            write(
                kept_keys, values, slot, page, chunk, tile, value, index, table[head, Head.KEPT],
                table[head, Head.NUM_KEPT], table[head, Head.KEPT], table[head, Head.VALUE], 0,
                table[head, Head.KEPT_VALUES],
            )  # fmt: skip
            write(
                window_keys, window_values, window_slot, window_page, chunk, tile, value, index,
                table[head, Head.DROPPED], table[head, Head.NUM_DROPPED],
                table[table_rows - 1, Head.KEPT] + table[head, Head.DROPPED], table[head, Head.WINDOW_VALUE],
                table[head, Head.KEPT_VALUES], d // f,
            )  # fmt: skip

    return leank_append_slots


def gather_rows(shape: KernelShape, cpu: bool = False) -> Any:
    """Return the kernel that copies all tokens of rows, one row behind the other."""
    d, e, f, dtype = shape.head_dim, shape.chunk_size, shape.value_chunk, shape.query_type
    num_tokens, heads, batch, rows, ends = T.dynamic("num_tokens, heads, batch, rows, ends")
    layouts, all_chunks, table_rows = T.dynamic("layouts, all_chunks, table_rows")
    entries, window_entries = T.dynamic("entries, window_entries")
    pools, scales = pool_types(shape, cpu), scale_types(shape)
    line = 16 if shape.is_fp8 else VECTOR
    shared, fragment, parallel, threads = loops(cpu, WARPGROUP)

    def widened(number: Any, scale: Any, head: Any, channel: Any) -> Any:
        if not shape.is_fp8:
            return number
        wide = T.cast(kernel_fp8.from_fp8(number, shape.product_type), "float32")
        return T.cast(wide * scale[0, head, channel], dtype)

    @T.macro
    def read(
        pool: Any, pool_values: Any, pages: Any, page: Any, place: Any, chunk: Any, tile: Any, index: Any,
        key_scale: Any, value_scale: Any, dense_values: Any, row: Any, first: Any, length: Any, start: Any,
        head: Any, chunks: Any, count: Any, lanes: Any, value_row: Any, first_value: Any, last_value: Any,
    ) -> None:  # fmt: skip
        """Put K of a tile, `count` chunks from `chunks` on, in the order of channels; copy V's own chunks."""
        for i in parallel(TILE):
            page[i] = pages[row, T.truncdiv(T.min(first + i, length - 1), pool.shape[2])]
        for i in parallel(TILE):
            place[i] = T.truncmod(T.min(first + i, length - 1), pool.shape[2])
        for c in T.serial(count):
            for i, j in parallel(TILE, e):
                chunk[i, j] = pool[page[i], chunks + c, place[i], j]
            for i, j in parallel(TILE, e):
                channel = index[0, lanes + c, j]
                if channel >= 0:
                    tile[i, T.max(channel, 0) % d] = widened(
                        chunk[i, j], key_scale, head, T.max(channel, 0) % d
                    )
        for c in T.serial(last_value - first_value):
            for i, j in parallel(TILE, f):
                if first + i < length:
                    dense_values[start + i, head, (first_value + c) * f + j] = widened(
                        pool_values[page[i], value_row + c, place[i], j],
                        value_scale,
                        head,
                        (first_value + c) * f + j,
                    )

    @T.prim_func
    def leank_gather_rows(
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
        requests: T.Tensor((rows,), "int32"),
        starts: T.Tensor((ends,), "int32"),
        dense_keys: T.Tensor((num_tokens, heads, d), dtype),
        dense_values: T.Tensor((num_tokens, heads, d), dtype),
        longest: T.int32,
    ):
        with T.Kernel(T.ceildiv(longest, TILE), heads, rows, **threads) as (block, head, number):
            if not cpu:
                T.assume(kept_keys.strides[0] % line == 0)
                T.assume(values.strides[0] % line == 0)
                T.assume(window_keys.strides[0] % line == 0)
                T.assume(window_values.strides[0] % line == 0)
            tile = shared((TILE, d + VECTOR), dtype)
            chunk = fragment((TILE, e), shape.stored_type)
            page = shared((TILE,), "int32")
            place = shared((TILE,), "int32")
            row = T.alloc_var("int32")
            start = T.alloc_var("int32")
            length = T.alloc_var("int32")
            row = requests[number]
            start = starts[number] + block * TILE
            length = starts[number + 1] - starts[number]
            if block * TILE < length:
                read(
                    kept_keys, values, page_table, page, place, chunk, tile, index, key_scale, value_scale,
                    dense_values, row, block * TILE, length, start, head, table[head, Head.KEPT],
                    table[head, Head.NUM_KEPT], table[head, Head.KEPT], table[head, Head.VALUE], 0,
                    table[head, Head.KEPT_VALUES],
                )  # fmt: skip
                read(
                    window_keys, window_values, window_table, page, place, chunk, tile, index, key_scale,
                    value_scale, dense_values, row, block * TILE, length, start, head,
                    table[head, Head.DROPPED], table[head, Head.NUM_DROPPED],
                    table[table_rows - 1, Head.KEPT] + table[head, Head.DROPPED],
                    table[head, Head.WINDOW_VALUE], table[head, Head.KEPT_VALUES], d // f,
                )  # fmt: skip
                for i, j in parallel(TILE, d):
                    if block * TILE + i < length:
                        dense_keys[start + i, head, j] = tile[i, j]

    return leank_gather_rows
