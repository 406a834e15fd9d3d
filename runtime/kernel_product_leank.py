"""Matrix products of a decode step, in TileLang: a weight is read once for up to 64 tokens.

The work is one line, as in attention: blocks of outputs one after the other, in a block steps along the
inputs. Every program instance takes an equal stretch of it, whatever the sizes of the weight, so that all end
together; a block that several share is left in as many parts, in fp32, and whoever takes the product adds
them up, always in the same order (`add_parts`).

    the line:     block 0 [step 0 ······] block 1 [step 0 ······] block 2 …
    instances:    |------ 0 ------|------ 1 ------|------ 2 ------| …
    parts:         0 of block 0    1 of block 0 and 0 of block 1, …

A gated product, of gate and up at once, is not cut: an instance takes a block of each.

Operands are swapped as in attention: outputs are the M of the products, tokens their N. What no step writes,
the weights, is on its way before the kernel ahead has ended.
"""

# No `from __future__ import annotations`: TileLang reads the annotations of kernel parameters as objects.
from typing import Any

from .kernel_key_leank import BLOCK, LANES, MAX_PARTS, MAX_ROWS
from .kernel_leank import FULL_ROW, WARPGROUP
from .kernel_line_leank import T, loops, next_stage, place_in_ring

# By tokens of a kernel: inputs of a step, and steps in flight; two instances fit on a multiprocessor.
STEPS = {8: (256, 3), 16: (128, 5), 32: (128, 4), MAX_ROWS: (128, 3)}
# Of both weights of a gated product.
GATED_STEPS = {8: (128, 3), 32: (64, 5), MAX_ROWS: (64, 4)}


@T.macro
def find_parts(
    parallel: Any, last: Any, place: Any, row: Any, vectors: Any, first: Any, steps: Any, stretch: Any
) -> None:
    """Set `last` to the last part of a row's vectors from `first` on, `place` to where they lie in a part.

    These divisions need not wait for the product. Beyond the row's end it is the row's last vector.
    """
    for i in parallel(last.shape[0]):
        vector = T.min(first + i, vectors - 1)
        block = vector * LANES // BLOCK
        last[i] = T.truncdiv(block * steps + steps - 1, stretch) - T.truncdiv(block * steps, stretch)
        place[i] = row * vectors + vector


@T.macro
def load_parts(parallel: Any, loaded: Any, last: Any, place: Any, parts: Any) -> None:
    """Load vectors' parts `[MAX_PARTS, vectors, LANES]`, zeros where there are fewer: all loads at once."""
    for part in T.unroll(MAX_PARTS):
        for i, j in parallel(*loaded.shape[1:]):
            loaded[part, i, j] = T.if_then_else(part <= last[i], parts[part, place[i], j], 0.0)


@T.macro
def add_parts(parallel: Any, sums: Any, loaded: Any) -> None:
    """Set `sums` to the sums of loaded parts `[vectors, LANES]`."""
    T.clear(sums)
    for part in T.unroll(MAX_PARTS):
        for i, j in parallel(*sums.shape):
            sums[i, j] += loaded[part, i, j]


def silu_mul_of(gate: Any, up: Any, dtype: str) -> Any:
    """Return silu(gate) * up of a rounded sum and one that is not."""
    return T.cast(gate / (1.0 + T.exp(-gate)), dtype) * T.cast(up, dtype)


def product(dtype: str, tokens: int, cpu: bool = False, gated: bool = False) -> Any:
    """Return the kernel of a linear module for up to `tokens` tokens: Hopper's, or plain loops for tests.

    With `gated` the weight is gate's and, behind it, up's, and the result is one part, in the model's dtype,
    of silu(gate) * up.
    """
    size, stages = GATED_STEPS[tokens] if gated else STEPS[tokens]
    batch, outputs, inputs = T.dynamic("batch, outputs, inputs")
    most_parts, results = T.dynamic("most_parts, results")
    shared, fragment, parallel, threads = loops(cpu, WARPGROUP + 32)
    ring, weights = () if cpu else (stages,), list(range(2 if gated else 1))

    @T.macro
    def write_part(
        sums: Any, parts: Any, bias: Any, program: Any, block: Any, steps: Any, stretch: Any, has_bias: Any
    ) -> None:
        part = T.alloc_var("int32")
        part = program - T.truncdiv(block * steps, stretch)
        if (has_bias != 0) & (part == 0):
            for i, j in parallel(BLOCK, tokens):
                sums[0][i, j] += T.cast(bias[T.min(block * BLOCK + i, bias.shape[0] - 1)], "float32")
        if gated:
            for i, j in parallel(BLOCK, tokens):
                sums[0][i, j] = T.cast(T.cast(sums[0][i, j], dtype), "float32")
        for i, j in parallel(BLOCK, tokens):
            if (block * BLOCK + i < parts.shape[2]) & (j < parts.shape[1]):
                parts[part, j, block * BLOCK + i] = (
                    silu_mul_of(sums[0][i, j], sums[1][i, j], dtype) if gated else sums[0][i, j]
                )

    @T.macro
    def load_weights(weight: Any, parts: Any, w: Any, ready: Any, stage: Any, block: Any, step: Any) -> None:
        for half in weights:
            first = half * parts.shape[2] + block * BLOCK
            T.tma_copy(
                weight[first : first + BLOCK, step * size : step * size + size],
                w[half][place_in_ring(stage, stages), :, :],
                barrier=ready[stage],
                eviction_policy="evict_first",  # rather than what the next kernel reads
            )

    @T.prim_func
    def leank_product(
        states: T.Tensor((batch, inputs), dtype),
        weight: T.Tensor((outputs, inputs), dtype),
        bias: T.Tensor((results,), dtype),
        parts: T.Tensor((most_parts, batch, results), dtype if gated else "float32"),
        programs: T.int32,
        stretch: T.int32,
        has_bias: T.int32,
    ):
        with T.Kernel(programs, **threads) as program:
            w = [shared((*ring, BLOCK, size), dtype) for _ in weights]
            x = shared((*ring, tokens, size), dtype)
            sums = [fragment((BLOCK, tokens), "float32") for _ in weights]
            steps, first, count, block, step = [T.alloc_var("int32") for _ in range(5)]
            steps = T.ceildiv(inputs, size)
            first = program * stretch
            count = T.min(stretch, T.ceildiv(results, BLOCK) * steps - first)
            block = T.truncdiv(first, steps)
            step = first - block * steps
            if cpu:
                for t in T.serial(count):
                    T.copy(states[0:tokens, step * size : (step + 1) * size], x)
                    for half in weights:
                        start = half * results + block * BLOCK
                        T.copy(weight[start : start + BLOCK, step * size : (step + 1) * size], w[half])
                        if (t == 0) | (step == 0):
                            T.fill(sums[half], 0)
                        T.gemm(w[half], x, sums[half], transpose_B=True)
                    step += 1
                    if (t + 1 == count) | (step == steps):
                        write_part(sums, parts, bias, program, block, steps, stretch, has_bias)
                        step = 0
                        block += 1
            else:
                ready = T.alloc_barrier([32] * stages)
                free = T.alloc_barrier([WARPGROUP] * stages)
                stage = T.alloc_var("int32", init=0)
                phase = T.alloc_var("int32", init=0)
                T.pdl_trigger()  # the next kernel may be launched, and waits for the end of this
                if T.get_thread_binding() >= WARPGROUP:
                    for t in T.serial(T.min(count, stages)):
                        load_weights(weight, parts, w, ready, t, block, step)
                        step += 1
                        if step == steps:
                            step = 0
                            block += 1
                    T.pdl_sync()
                    block = T.truncdiv(first, steps)
                    step = first - block * steps
                    for t in T.serial(count):
                        if t >= stages:
                            T.mbarrier_wait_parity(free[stage], phase ^ 1)
                            load_weights(weight, parts, w, ready, stage, block, step)
                        T.tma_copy(
                            states[0:tokens, step * size : step * size + size],
                            x[place_in_ring(stage, stages), :, :],
                            barrier=ready[stage],
                        )
                        T.mbarrier_arrive(ready[stage])
                        step += 1
                        if step == steps:
                            step = 0
                            block += 1
                        next_stage(stage, phase, stages)
                else:
                    T.pdl_sync()  # what the parts lie in may still be read
                    for t in T.serial(count):
                        if (t == 0) | (step == 0):
                            for half in weights:
                                T.fill(sums[half], 0)
                        T.mbarrier_wait_parity(ready[stage], phase)
                        for half in weights:
                            operands = w[half][stage, :, :], x[stage, :, :], sums[half]
                            T.wgmma_gemm(*operands, transpose_B=True, policy=FULL_ROW)
                        T.wait_wgmma(0)
                        T.mbarrier_arrive(free[stage])
                        step += 1
                        if (t + 1 == count) | (step == steps):
                            write_part(sums, parts, bias, program, block, steps, stretch, has_bias)
                            step = 0
                            block += 1
                        next_stage(stage, phase, stages)

    return leank_product
