"""The kernels compiled for TileLang's CPU target."""

import functools
import itertools
import math

import tilelang
import torch

from runtime.decode_kernels_leank import DecodeKernels
from runtime.kernel_generic_leank import generic_attention
from runtime.kernel_glue_leank import add_norm, append_tokens, rope_append, silu_mul
from runtime.kernel_merge_leank import merge_parts
from runtime.kernel_product_leank import GATED_STEPS, STEPS, product
from runtime.kernel_turn_leank import copy_rows

NAMES = {merge_parts: "merge", append_tokens: "append"}
GATED_PRODUCT = functools.partial(product, gated=True)
COPY_FOR_KERNEL = functools.partial(copy_rows, for_kernel=True)


class CpuKernels(DecodeKernels):
    """Kernels on the CPU: the generic body, any number of program instances."""

    def __init__(self, shape, num_programs):
        self.key = shape
        self.num_programs, self._plan, self.attends_turns = num_programs, None, False
        self._attention = compiled_when_called(generic_attention, shape)
        for make in (merge_parts, append_tokens, rope_append, add_norm, silu_mul, copy_rows):
            setattr(self, f"_{NAMES.get(make, make.__name__)}", compiled_when_called(make, shape))
        self.products = {rows: compiled_when_called(product, "float32", rows) for rows in (8, 16)}
        self.gated_products = {8: compiled_when_called(GATED_PRODUCT, "float32", 8)}
        self._steps, self._gated_steps, self.num_multiprocessors = STEPS, GATED_STEPS, num_programs

    def append(self, keys, values, *rest):
        """TileLang's CPU target knows no strides."""
        super().append(keys.contiguous(), values.contiguous(), *rest)


class TurnKernels(CpuKernels):
    """Copies as for the kernel that attends to turns, for which plain torch stands in."""

    def __init__(self, shape):
        super().__init__(shape, 1)
        self.attends_turns = True
        self._copy_rows = compiled_when_called(COPY_FOR_KERNEL, shape)

    def _attend_turn(self, query, keys, values, index, table, parts, lse, first, pruned, sink_size, scale):
        """Read of tiles of 128 pruned tokens what heads keep, of heads of width 0 nothing."""
        num_rows, num_tokens, num_heads, _ = keys.shape
        num_groups, columns, head_dim = query.shape[1] // num_heads, *query.shape[2:]
        token = torch.arange(num_tokens)
        tile = token // 128 * 128
        in_tile = (tile >= sink_size) & (tile + 128 <= sink_size + pruned)
        whole = (token < sink_size) | (token >= sink_size + pruned)
        causal = token <= num_tokens - columns + torch.arange(columns)[:, None]
        for row, head in itertools.product(range(num_rows), range(num_heads)):
            kept, num_kept, _, dropped, num_dropped = table[head, :5].tolist()
            dropped += int(table[-1, 0])
            lanes = index[first + row if len(index) > 1 else 0]
            lanes = torch.cat(
                [lanes[kept : kept + num_kept], lanes[dropped : dropped + num_dropped]]
            ).flatten()
            heads = slice(head * num_groups, (head + 1) * num_groups)
            own = query[row, heads][:, :, lanes.clamp(min=0) % head_dim] * (lanes >= 0)
            read = keys[row, :, head, : len(lanes)].clone()
            read[in_tile, num_kept * index.shape[2] :] = 0
            seen = causal & (whole | (num_kept > 0))
            read[~seen.any(0)] = 0
            held = torch.where(seen.any(0)[:, None], values[row, :, head], 0)
            scores = (own @ read.T * scale * math.log(2)).masked_fill(~seen, -math.inf)
            parts[0, row, heads], lse[0, row, heads] = scores.softmax(-1) @ held, scores.logsumexp(-1)


def compiled_when_called(make, *arguments):
    """Compiling takes a second, and few tests need every kernel."""
    return lambda *given: compiled_for_cpu(make, *arguments)(*given)


@functools.cache
def compiled_for_cpu(make, *arguments):
    return tilelang.compile(make(*arguments, cpu=True), target="c", execution_backend="cython")
