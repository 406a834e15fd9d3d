"""Append, RoPE + append, add + RMSNorm and SiLU kernels of a decode step, in TileLang.

    leank_append        K and V of new tokens to the pages of their rows: one block a head of a token
    leank_rope_append   the same, and before it queries and keys rotated
    leank_add_norm      hidden + delta, and its RMSNorm: one block a row
    leank_silu_mul      silu(gate) * up

What a matrix product gave arrives in parts (kernel_product_leank), added up where they are read.
They round where the stock classes do: every operation there ends in the model's dtype, and so does it here.
Sums of squares are fp32's, in another order than torch's. What is compiled depends on `KernelShape` alone;
rows and sizes are dynamic. With `overlap` a kernel is launched while the one before it ends, which no GPU
before Hopper can; until it has waited for that one it reads nothing that a step writes.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_key_leank import LANES, MAX_NORMED, MAX_PARTS
from .kernel_leank import WARP, WARPGROUP, KernelShape, kernel_fp8, mean_type, pool_types, scale_types
from .kernel_line_leank import Head, T, loops
from .kernel_product_leank import add_parts, find_parts, load_parts, silu_mul_of

_NORM_THREADS = 512

# Of `place`, a copy of a head's row in the head table but for its last column.
PLACE_SIZE = Head.SEEING


def padded_chunks(shape: KernelShape) -> int:
    """Chunks of a head that fill threads evenly, which TileLang finds no layout without."""
    step = max(shape.head_threads // shape.chunk_size, 1)
    return -(-shape.max_chunks // step) * step


@T.macro
def find_lanes(
    parallel: Any, place: Any, lanes: Any, head: Any, row: Any, num_heads: Any, index: Any, table: Any
) -> None:
    """Set `place` to where a head's chunks lie, and `lanes` to the channel of each of their lanes."""
    for i in T.serial(PLACE_SIZE):
        place[i] = table[head, i]
    for c, j in parallel(lanes.shape[0], lanes.shape[1]):
        # A head with fewer chunks reads no further than the last.
        lanes[c, j] = index[
            T.if_then_else(index.shape[0] > 1, row, 0),
            T.min(
                T.if_then_else(
                    c < place[Head.NUM_KEPT],
                    place[Head.KEPT] + c,
                    table[num_heads, Head.KEPT] + place[Head.DROPPED] + c - place[Head.NUM_KEPT],
                ),
                index.shape[1] - 1,
            ),
            j,
        ]


def as_stored(shape: KernelShape, number: Any, scale: Any) -> Any:
    """Return a channel as the cache holds it."""
    return kernel_fp8.to_fp8(T.cast(number, "float32") / scale) if shape.is_fp8 else number


@T.macro
def load_constants(parallel: Any, own: Any, given: Any, row: Any, head: Any) -> None:
    """Set `own` to a head's part of each constant, which is older than the step: no need to wait for it."""
    for i in list(range(len(own))):
        for j in parallel(own[i].shape[0]):
            own[i][j] = given[i][T.min(row, given[i].shape[0] - 1), T.min(head, given[i].shape[1] - 1), j]


@T.macro
def find_pages(
    pages: Any, row: Any, token: Any, kept_keys: Any, window_keys: Any, page_table: Any, window_table: Any
) -> None:
    """Set `pages` to a token's page and the window's, and to its place in both; of no token, to any."""
    pages[0] = T.truncdiv(T.max(token, 0), kept_keys.shape[2])
    pages[1] = T.truncdiv(T.max(token, 0), window_keys.shape[2])
    pages[2] = token - pages[0] * kept_keys.shape[2]
    pages[3] = token - pages[1] * window_keys.shape[2]
    pages[0] = page_table[row, pages[0]]
    pages[1] = window_table[row, pages[1]]


@T.macro
def store_token(
    parallel: Any, place: Any, lanes: Any, pages: Any, new_key: Any, new_value: Any, kept_keys: Any,
    values: Any, window_keys: Any, window_values: Any, value_chunk: int,
) -> None:  # fmt: skip
    """Add a head's new token to one row: kept channels to the row's page, the rest to the window's.

    It is the flush too: kept channels lie in their page from the start, so pruning moves nothing. Key and
    value come as they are stored.
    """
    page, window_page, slot, window_slot = [pages[i] for i in range(4)]
    for c, j in parallel(lanes.shape[0], lanes.shape[1]):
        if c < place[Head.NUM_KEPT] + place[Head.NUM_DROPPED]:
            stored = T.if_then_else(
                lanes[c, j] >= 0, new_key[T.max(lanes[c, j], 0) % new_key.shape[0]], T.cast(0, new_key.dtype)
            )
            if c < place[Head.NUM_KEPT]:
                kept_keys[page, place[Head.KEPT] + c, slot, j] = stored
            else:
                dropped = place[Head.DROPPED] + c - place[Head.NUM_KEPT]
                window_keys[window_page, dropped, window_slot, j] = stored
    for j in parallel(new_value.shape[0]):
        chunk, lane = j // value_chunk, j % value_chunk
        if chunk < place[Head.KEPT_VALUES]:
            values[page, place[Head.VALUE] + chunk, slot, lane] = new_value[j]
        else:
            dropped = place[Head.WINDOW_VALUE] + chunk - place[Head.KEPT_VALUES]
            window_values[window_page, dropped, window_slot, lane] = new_value[j]


def _token_types(sizes: Any, dtype: str, cpu: bool) -> list[Any]:
    """Return what new keys and values are to a kernel; on GPUs they may be slices of what is projected."""
    types = []
    for name in ("key", "value"):
        strides = *T.dynamic(f"{name}_row, {name}_head, {name}_column"), 1
        types.append(T.Tensor(sizes, dtype) if cpu else T.StridedTensor(sizes, strides, dtype))
    return types


def append_tokens(shape: KernelShape, cpu: bool = False, overlap: bool = False) -> Any:
    """Return the kernel that adds new tokens to their rows' pages; `overlap`: attention follows it."""
    d, e, dtype = shape.head_dim, shape.chunk_size, shape.query_type
    batch, heads, width = T.dynamic("batch, heads, width")
    layouts, all_chunks, entries, window_entries = T.dynamic("layouts, all_chunks, entries, window_entries")
    states = _token_types((batch, heads, width, d), dtype, cpu)
    pools, scales = pool_types(shape, cpu), scale_types(shape)
    table_rows, flags, flag_columns = T.dynamic("table_rows, flags, flag_columns")
    shared, fragment, parallel, threads = loops(cpu, shape.head_threads)

    @T.prim_func
    def leank_append(
        keys: states[0],
        new_values: states[1],
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
        key_mean: mean_type(shape),
        seen: T.Tensor((batch, width), "int32"),
        valid: T.Tensor((flags, flag_columns), "uint8"),
    ):
        with T.Kernel(heads, width, batch, **threads) as (head, column, row):
            place = T.alloc_local((PLACE_SIZE,), "int32")
            lanes = fragment((padded_chunks(shape), e), "int32")
            new_value = fragment((d,), shape.stored_type)
            mean, key_divisor, value_divisor = constants = [fragment((d,), "float32") for _ in range(3)]
            new_key = shared((d,), shape.stored_type)
            pages = T.alloc_local((4,), "int32")
            token, is_real = [T.alloc_var("int32") for _ in range(2)]
            if overlap:
                T.pdl_trigger()  # attention may be launched, and waits for the end of this
            token = seen[row, column] - 1
            is_real = T.cast(valid[T.min(row, flags - 1), T.min(column, flag_columns - 1)], "int32")
            load_constants(parallel, constants, [key_mean, key_scale, value_scale], row, head)
            for j in parallel(d):
                new_value[j] = as_stored(shape, new_values[row, head, column, j], value_divisor[j])
            for j in parallel(d):
                key = T.cast(T.cast(keys[row, head, column, j], "float32") - mean[j], dtype)
                new_key[j] = as_stored(shape, key, key_divisor[j])
            find_lanes(parallel, place, lanes, head, row, heads, index, table)
            find_pages(pages, row, token, kept_keys, window_keys, page_table, window_table)
            if (is_real != 0) & (token >= 0):
                store_token(
                    parallel, place, lanes, pages, new_key, new_value, kept_keys, values, window_keys,
                    window_values, shape.value_chunk,
                )  # fmt: skip

    return leank_append


def rope_append(shape: KernelShape, cpu: bool = False, overlap: bool = False) -> Any:
    """Return the kernel from projections to attention: heads normed where the model does, rotated, appended.

    `projected` holds the query heads, then those of K, then those of V.
    """
    d, e, dtype = shape.head_dim, shape.chunk_size, shape.query_type
    padded = -(-d // shape.head_threads) * shape.head_threads  # a reduction takes part of every thread
    most_parts, vectors, positions = T.dynamic("most_parts, vectors, positions")
    batch, columns, query_heads = T.dynamic("batch, columns, query_heads")
    layouts, all_chunks, entries, window_entries = T.dynamic("layouts, all_chunks, entries, window_entries")
    pools, scales = pool_types(shape, cpu), scale_types(shape)
    table_rows, flags, flag_columns = T.dynamic("table_rows, flags, flag_columns")
    shared, fragment, parallel, threads = loops(cpu, shape.head_threads)

    @T.prim_func
    def leank_rope_append(
        projected: T.Tensor((most_parts, vectors, LANES), "float32"),
        cos: T.Tensor((positions, d), dtype),
        sin: T.Tensor((positions, d), dtype),
        query_weight: T.Tensor((d,), dtype),
        key_weight: T.Tensor((d,), dtype),
        query: T.Tensor((batch, query_heads, columns, d), dtype),
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
        key_mean: mean_type(shape),
        seen: T.Tensor((batch, columns), "int32"),
        valid: T.Tensor((flags, flag_columns), "uint8"),
        has_norm: T.int32,
        eps: T.float32,
        steps: T.int32,
        stretch: T.int32,
    ):
        with T.Kernel(query_heads + table_rows - 1, batch * columns, **threads) as (head, number):
            place = T.alloc_local((PLACE_SIZE,), "int32")
            lanes = fragment((padded_chunks(shape), e), "int32")
            states, new_key = shared((d,), dtype), shared((d,), shape.stored_type)
            sums = fragment((d // LANES, LANES), "float32")
            last, last_value, part, part_value = [fragment((d // LANES,), "int32") for _ in range(4)]
            loaded, loaded_value = [fragment((MAX_PARTS, d // LANES, LANES), "float32") for _ in range(2)]
            squares = fragment((padded,), "float32")
            total = fragment((1,), "float32")
            along, across = [fragment((d,), "float32") for _ in range(2)]
            cosine, sine, norm_weight, rotated, value = [fragment((d,), dtype) for _ in range(5)]
            new_value = fragment((d,), shape.stored_type)
            mean, key_divisor, value_divisor = constants = [fragment((d,), "float32") for _ in range(3)]
            pages = T.alloc_local((4,), "int32")
            row, column, position, token, is_real, stored, size = [T.alloc_var("int32") for _ in range(7)]
            row = number // columns
            column = number % columns
            position = number % positions
            stored = T.max(head - query_heads, 0)
            size = (query_heads + 2 * (table_rows - 1)) * (d // LANES)  # of a token, in vectors
            # Loads first, so that none waits for another; a query head makes no use of some of them.
            find_lanes(parallel, place, lanes, stored, row, table_rows - 1, index, table)
            load_constants(parallel, constants, [key_mean, key_scale, value_scale], row, stored)
            for j in parallel(d):
                norm_weight[j] = T.if_then_else(head < query_heads, query_weight[j], key_weight[j])
            find_parts(parallel, last, part, number, size, head * (d // LANES), steps, stretch)
            find_parts(
                parallel, last_value, part_value, number, size,
                (query_heads + table_rows - 1 + stored) * (d // LANES), steps, stretch,
            )  # fmt: skip
            if overlap:
                T.pdl_trigger()  # attention may be launched, and waits for the end of this
                T.pdl_sync()
            token = seen[row, column] - 1
            is_real = T.cast(valid[T.min(row, flags - 1), T.min(column, flag_columns - 1)], "int32")
            for j in parallel(d):
                cosine[j] = cos[position, j]
                sine[j] = sin[position, j]
            load_parts(parallel, loaded, last, part, projected)
            load_parts(parallel, loaded_value, last_value, part_value, projected)
            find_pages(pages, row, token, kept_keys, window_keys, page_table, window_table)
            add_parts(parallel, sums, loaded)
            for i, j in parallel(d // LANES, LANES):
                states[i * LANES + j] = T.cast(sums[i, j], dtype)
            add_parts(parallel, sums, loaded_value)
            for i, j in parallel(d // LANES, LANES):
                value[i * LANES + j] = T.cast(sums[i, j], dtype)
            if has_norm != 0:
                for j in parallel(padded):
                    squares[j] = T.if_then_else(j < d, T.cast(states[T.min(j, d - 1)], "float32"), 0.0)
                    squares[j] = squares[j] * squares[j]
                T.reduce_sum(squares, total, dim=0)
                total[0] = T.rsqrt(total[0] / d + eps)
                for j in parallel(d):
                    states[j] = T.cast(T.cast(states[j], "float32") * total[0], dtype) * norm_weight[j]
            # In fp32 and rounded by hand: a product in the dtype could be fused with the sum.
            for j in parallel(d):
                along[j] = T.cast(states[j], "float32") * T.cast(cosine[j], "float32")
                along[j] = T.cast(T.cast(along[j], dtype), "float32")
                across[j] = T.cast(states[(j + d // 2) % d], "float32") * T.cast(sine[j], "float32")
                across[j] = T.cast(T.cast(across[j], dtype), "float32")
            for j in parallel(d):
                rotated[j] = T.cast(along[j] + T.if_then_else(j < d // 2, -across[j], across[j]), dtype)
            if head < query_heads:
                for j in parallel(d):
                    query[row, head, column, j] = rotated[j]
            else:
                if (is_real != 0) & (token >= 0):
                    for j in parallel(d):
                        key = T.cast(T.cast(rotated[j], "float32") - mean[j], dtype)
                        new_key[j] = as_stored(shape, key, key_divisor[j])
                    for j in parallel(d):
                        new_value[j] = as_stored(shape, value[j], value_divisor[j])
                    store_token(
                        parallel, place, lanes, pages, new_key, new_value, kept_keys, values, window_keys,
                        window_values, shape.value_chunk,
                    )  # fmt: skip

    return leank_rope_append


def add_norm(shape: KernelShape, cpu: bool = False, overlap: bool = False, whole: bool = False) -> Any:
    """Return the kernel that adds what a block of the model gave to the hidden states, and norms the sum.

    Without a delta (`has_delta` is 0) it norms the hidden states, and writes no sum. With `whole` a delta is
    one part, in the model's dtype.
    """
    dtype = shape.query_type
    rows, vectors, most_parts, all_vectors = T.dynamic("rows, vectors, most_parts, all_vectors")
    shared, fragment, parallel, threads = loops(cpu, _NORM_THREADS)
    size, warps = (_NORM_THREADS, LANES), _NORM_THREADS // WARP
    # A thread has one vector behind each of them.
    starts = list(enumerate(range(0, MAX_NORMED // LANES, _NORM_THREADS)))

    @T.prim_func
    def leank_add_norm(
        hidden: T.Tensor((rows, vectors, LANES), dtype),
        delta: T.Tensor((most_parts, all_vectors, LANES), dtype if whole else "float32"),
        weight: T.Tensor((vectors, LANES), dtype),
        summed: T.Tensor((rows, vectors, LANES), dtype),
        normed: T.Tensor((rows, vectors, LANES), dtype),
        has_delta: T.int32,
        eps: T.float32,
        steps: T.int32,
        stretch: T.int32,
    ):
        with T.Kernel(rows, **threads) as row:
            weights, states = [[fragment(size, dtype) for _ in starts] for _ in range(2)]
            last, place = [[fragment(size[:1], "int32") for _ in starts] for _ in range(2)]
            sums = fragment(size, "float32")
            loaded = fragment((MAX_PARTS, *size), "float32")
            squares = fragment((warps, WARP * LANES), "float32")
            by_warp, of_warps = [fragment((warps,), "float32") for _ in range(2)]
            between, total = shared((warps,), "float32"), fragment((1,), "float32")
            for v, start in starts:
                for i, j in parallel(*size):
                    if start + i < vectors:
                        weights[v][i, j] = weight[start + i, j]
                find_parts(parallel, last[v], place[v], row, vectors, start, steps, stretch)
            if overlap:
                T.pdl_trigger()  # the product may begin to load its weights, and waits for the end of this
                T.pdl_sync()
            for v, start in starts:
                for i, j in parallel(*size):
                    states[v][i, j] = T.cast(0, dtype)
                    if start + i < vectors:
                        states[v][i, j] = hidden[row, start + i, j]
            T.fill(squares, 0)
            for v, start in starts:
                if start < vectors:
                    if has_delta != 0:
                        if whole:
                            for i, j in parallel(*size):
                                sums[i, j] = T.cast(delta[0, place[v][i], j], "float32")
                        else:
                            load_parts(parallel, loaded, last[v], place[v], delta)
                            add_parts(parallel, sums, loaded)
                        for i, j in parallel(*size):
                            if start + i < vectors:
                                states[v][i, j] = states[v][i, j] + T.cast(sums[i, j], dtype)
                                summed[row, start + i, j] = states[v][i, j]
                    for i, j in parallel(*size):
                        state = T.cast(states[v][i, j], "float32")
                        squares[i // WARP, i % WARP * LANES + j] += state * state
            # Twice, as one reduction takes a barrier for every halving of the warps.
            T.reduce_sum(squares, by_warp, dim=1)
            T.copy(by_warp, between)
            T.copy(between, of_warps)
            T.reduce_sum(of_warps, total, dim=0)
            total[0] = T.rsqrt(total[0] / T.cast(vectors * LANES, "float32") + eps)
            for v, start in starts:
                for i, j in parallel(*size):
                    if start + i < vectors:
                        normed[row, start + i, j] = (
                            T.cast(T.cast(states[v][i, j], "float32") * total[0], dtype) * weights[v][i, j]
                        )

    return leank_add_norm


def silu_mul(shape: KernelShape, cpu: bool = False, overlap: bool = False) -> Any:
    """Return the kernel of a gated activation: gate and up side by side in, their product out."""
    dtype = shape.query_type
    rows, vectors, most_parts, all_vectors = T.dynamic("rows, vectors, most_parts, all_vectors")
    _, fragment, parallel, threads = loops(cpu, WARPGROUP)

    @T.prim_func
    def leank_silu_mul(
        gate_up: T.Tensor((most_parts, all_vectors, LANES), "float32"),
        output: T.Tensor((rows, vectors, LANES), dtype),
        steps: T.int32,
        stretch: T.int32,
    ):
        with T.Kernel(T.ceildiv(vectors, WARPGROUP), rows, **threads) as (block, row):
            gate, up = [fragment((WARPGROUP, LANES), "float32") for _ in range(2)]
            last, last_up, part, part_up = [fragment((WARPGROUP,), "int32") for _ in range(4)]
            loaded, loaded_up = [fragment((MAX_PARTS, WARPGROUP, LANES), "float32") for _ in range(2)]
            start = block * WARPGROUP
            T.annotate_min_blocks_per_sm(7)  # 64 rows of 14336 at once
            find_parts(parallel, last, part, row, 2 * vectors, start, steps, stretch)
            find_parts(parallel, last_up, part_up, row, 2 * vectors, vectors + start, steps, stretch)
            if overlap:
                T.pdl_trigger()
                T.pdl_sync()
            load_parts(parallel, loaded, last, part, gate_up)
            load_parts(parallel, loaded_up, last_up, part_up, gate_up)
            add_parts(parallel, gate, loaded)
            add_parts(parallel, up, loaded_up)
            for i, j in parallel(WARPGROUP, LANES):
                gate[i, j] = T.cast(T.cast(gate[i, j], dtype), "float32")
            for i, j in parallel(WARPGROUP, LANES):
                if block * WARPGROUP + i < vectors:
                    output[row, block * WARPGROUP + i, j] = silu_mul_of(gate[i, j], up[i, j], dtype)

    return leank_silu_mul
