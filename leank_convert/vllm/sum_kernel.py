"""Kernel that adds up the parts of a product, in TileLang: what ranks then add up among them.

leank_sum_parts     parts to their sum, in fp32: a block of threads takes 1,024 outputs of a row
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from leank_convert._runtime.kernel_key_leank import LANES, MAX_PARTS
from leank_convert._runtime.kernel_leank import WARPGROUP, compile_kernels
from leank_convert._runtime.kernel_line_leank import T, loops
from leank_convert._runtime.kernel_product_leank import add_parts


def compile_sum(arch: str) -> Any:
    """Compile the kernel, or load it from TileLang's cache on disk."""
    return compile_kernels([], [sum_parts()], arch)[0]


def sum_parts(cpu: bool = False) -> Any:
    """Return the kernel; on GPUs it is launched while the product ahead of it ends."""
    rows, vectors, most_parts = T.dynamic("rows, vectors, most_parts")
    _, fragment, parallel, threads = loops(cpu, WARPGROUP)

    @T.prim_func
    def leank_sum_parts(
        parts: T.Tensor((most_parts, rows, vectors, LANES), "float32"),
        output: T.Tensor((rows, vectors, LANES), "float32"),
        steps: T.int32,
        stretch: T.int32,
    ):
        with T.Kernel(T.ceildiv(vectors, WARPGROUP), rows, **threads) as (block, row):
            sums = fragment((WARPGROUP, LANES), "float32")
            last = fragment((WARPGROUP,), "int32")
            loaded = fragment((MAX_PARTS, WARPGROUP, LANES), "float32")
            if not cpu:
                T.pdl_sync()
            add_parts(parallel, sums, last, loaded, parts, row, block * WARPGROUP, steps, stretch)
            for i, j in parallel(WARPGROUP, LANES):
                if block * WARPGROUP + i < vectors:
                    output[row, block * WARPGROUP + i, j] = sums[i, j]

    return leank_sum_parts
