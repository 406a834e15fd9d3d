"""Kernels around the sum over ranks of tensor parallelism, in TileLang.

    leank_sum_parts     a rank's parts of a product, added up: one block of threads 1,024 outputs of a row
    leank_add_norm      the runtime's, of a sum that is one part

Sums are in the model's dtype, as vLLM's own linear modules give them.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from leank_convert._runtime.kernel_glue_leank import add_norm
from leank_convert._runtime.kernel_key_leank import LANES, MAX_PARTS, KernelKey
from leank_convert._runtime.kernel_leank import WARPGROUP, KernelShape, compile_kernels
from leank_convert._runtime.kernel_line_leank import T, loops
from leank_convert._runtime.kernel_product_leank import add_parts, find_parts, load_parts


def compile_sum_kernels(key: KernelKey, arch: str) -> list[Any]:
    """Compile both kernels beside decode kernels, or load them from TileLang's cache on disk."""
    shape = KernelShape(**vars(key))
    return compile_kernels([], [sum_parts(shape), add_norm(shape, overlap=True, whole=True)], arch)


def sum_parts(shape: KernelShape, cpu: bool = False) -> Any:
    """Return the kernel of the sum, which is launched while the product ahead of it ends."""
    rows, vectors, most_parts, all_vectors = T.dynamic("rows, vectors, most_parts, all_vectors")
    _, fragment, parallel, threads = loops(cpu, WARPGROUP)

    @T.prim_func
    def leank_sum_parts(
        parts: T.Tensor((most_parts, all_vectors, LANES), "float32"),
        output: T.Tensor((rows, vectors, LANES), shape.query_type),
        steps: T.int32,
        stretch: T.int32,
    ):
        with T.Kernel(T.ceildiv(vectors, WARPGROUP), rows, **threads) as (block, row):
            sums = fragment((WARPGROUP, LANES), "float32")
            last, place = [fragment((WARPGROUP,), "int32") for _ in range(2)]
            loaded = fragment((MAX_PARTS, WARPGROUP, LANES), "float32")
            find_parts(parallel, last, place, row, vectors, block * WARPGROUP, steps, stretch)
            if not cpu:
                T.pdl_sync()
            load_parts(parallel, loaded, last, place, parts)
            add_parts(parallel, sums, loaded)
            for i, j in parallel(WARPGROUP, LANES):
                if block * WARPGROUP + i < vectors:
                    output[row, block * WARPGROUP + i, j] = T.cast(sums[i, j], shape.query_type)

    return leank_sum_parts
