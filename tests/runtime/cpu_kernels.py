"""The kernels compiled for TileLang's CPU target."""

import functools

import tilelang

from runtime.decode_kernels_leank import DecodeKernels
from runtime.kernel_generic_leank import generic_attention
from runtime.kernel_glue_leank import add_norm, append_tokens, rope_append, silu_mul
from runtime.kernel_merge_leank import merge_parts
from runtime.kernel_product_leank import STEPS, product
from runtime.kernel_turn_leank import copy_row

NAMES = {merge_parts: "merge", append_tokens: "append"}


class CpuKernels(DecodeKernels):
    """Kernels on the CPU: the generic body, any number of program instances."""

    def __init__(self, shape, num_programs):
        self.key = shape
        self.num_programs, self._plan = num_programs, None
        self._attention = compiled_when_called(generic_attention, shape)
        for make in (merge_parts, append_tokens, rope_append, add_norm, silu_mul, copy_row):
            setattr(self, f"_{NAMES.get(make, make.__name__)}", compiled_when_called(make, shape))
        self._products = {8: compiled_when_called(product, "float32", 8)}
        self._steps, self._num_multiprocessors = STEPS, num_programs


def compiled_when_called(make, *arguments):
    """Compiling takes a second, and few tests need every kernel."""
    return lambda *given: compiled_for_cpu(make, *arguments)(*given)


@functools.cache
def compiled_for_cpu(make, *arguments):
    return tilelang.compile(make(*arguments, cpu=True), target="c", execution_backend="cython")
