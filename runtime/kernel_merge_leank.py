"""Merge kernel: joins the partial attention of one head from several program instances, in TileLang."""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_leank import NEG, WARP, KernelShape
from .kernel_line_leank import Head, T, head_begin, loops, stretch_bounds

_PARTS, _FEW_PARTS = 16, 4  # parts that the merge loads before it uses the first


def merge_parts(shape: KernelShape, cpu: bool = False, overlap: bool = False) -> Any:
    """Return the kernel that merges the parts of heads which several program instances shared.

    With `overlap` it is launched while attention still runs, which GPUs before Hopper cannot.
    """
    d, n, g, dtype = shape.head_dim, shape.num_queries, shape.num_groups, shape.query_type
    batch, heads, width = T.dynamic("batch, heads, width")
    table_rows, plan_rows, programs = T.dynamic("table_rows, plan_rows, programs")
    _, fragment, parallel, threads = loops(cpu, min(d, shape.head_threads) if d % WARP else WARP)

    @T.macro
    def add_parts(
        count: int, first: Any, last: Any, begins: Any, query: Any, part: Any, part_lse: Any, total: Any,
        state: Any, parts: Any, lse: Any,
    ) -> None:  # fmt: skip
        program, place = [T.alloc_var("int32") for _ in range(2)]
        earlier_top, weight = [T.alloc_var("float32") for _ in range(2)]
        for i in T.serial((last - first + count) // count):
            earlier_top = state[0]
            for p in T.unroll(count):
                program = first + i * count + p
                place = T.if_then_else((p == 0) & (i == 0), begins, 0)
                part_lse[p] = T.if_then_else(program <= last, lse[program, place, query], NEG)
                for j in parallel(d):
                    part[p, j] = T.if_then_else(program <= last, parts[program, place, query, j], 0.0)
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
        table: T.Tensor((table_rows, 10), "int32"),
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
            head, per_program, stop, first, last, begins = [T.alloc_var("int32") for _ in range(6)]
            num_heads = table_rows - 1
            head = query_head // g
            stretch_bounds(span, 0, programs, num_heads, table, plan, batch)
            per_program = T.max(span[1], 1)
            head_begin(begin, row, head, num_heads, table, plan)
            stop = (
                begin[0]
                + (plan[row + 1, 0] - plan[row, 0]) * table[head, Head.COST]
                + (plan[row + 1, 1] - plan[row, 1]) * table[num_heads, Head.COST]
            )
            first = begin[0] // per_program
            last = (stop - 1) // per_program
            # The first instance ends with this head, unless it also began with it.
            begins = T.cast(first * per_program < begin[0], "int32")
            T.fill(total, 0)
            if overlap:
                T.pdl_trigger()  # the product may be launched and load weights, and waits for the end of this
                T.pdl_sync()  # all above ran while attention still did
            if stop > begin[0]:
                if last > first:
                    state[0] = NEG
                    state[1] = 0
                    # Few parts are the rule where rows are many; many are loaded at once.
                    arguments = begins, column * g + query_head % g, part, part_lse, total, state, parts, lse
                    if last - first < _FEW_PARTS:
                        add_parts(_FEW_PARTS, first, last, *arguments)
                    else:
                        add_parts(_PARTS, first, last, *arguments)
                    for j in parallel(d):
                        output[row, query_head, first_column + column, j] = T.cast(total[j] / state[1], dtype)
            else:  # a row without tokens
                for j in parallel(d):
                    output[row, query_head, first_column + column, j] = T.cast(0, dtype)

    return leank_merge
