"""Decode kernels: compiled for a device and a shape, launched, and shown to torch as operators."""

from __future__ import annotations

import hashlib
import importlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from .layout_leank import StoreTensors

TILE = 64
"""Tokens of a tile, as in kernel_leank (which cannot be imported without tilelang)."""

LANES = 8
"""Numbers that a thread of a glue kernel loads at once, as in kernel_glue_leank: it divides all sizes."""

MAX_NORMED = 16384
"""Most numbers of a row that `DecodeKernels.add_norm` takes, as in kernel_glue_leank."""

_MAX_PARTS = 4  # as in kernel_product_leank

_LOG2_E = 1.4426950408889634
KERNEL_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MAX_STAGES = 6

# Operators are named after this module: two checkpoints in one process are two modules, kernels apart.
_LIBRARY = f"leank_{hashlib.sha256(__name__.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class KernelKey:
    """What kernels are found by.

    Attributes:
        device: Where the cache lies.
        dtype: Of queries and cache.
        head_dim: D.
        num_groups: Query heads per KV head.
        chunk_size: Channels of a chunk.
        max_chunks: `ChunkLayout.max_chunks` of the layer.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    num_groups: int
    chunk_size: int
    max_chunks: int


def plan_tiles(
    lengths: torch.Tensor, pruned_lengths: torch.Tensor, sink_size: int, num_slots: int
) -> torch.Tensor:
    """Count the tiles of pruned and of whole tokens before each row, and in all rows.

    Once per step, for all layers; asks the device nothing.

    Args:
        lengths: Tokens per row `[B]`, int32.
        pruned_lengths: Pruned ones among them `[B]`, int32.
        sink_size: Sink slots of the window.
        num_slots: All its slots.

    Returns:
        `[B + 1, 2]`, int32.
    """
    ring_size = num_slots - sink_size
    recent = (lengths - sink_size - pruned_lengths).clamp(min=0)
    run = torch.minimum(recent, ring_size - pruned_lengths % ring_size)
    runs = torch.stack([lengths.clamp(max=sink_size), run, recent - run])
    whole = ((runs + (TILE - 1)) // TILE).sum(0)
    counts = torch.stack([(pruned_lengths + (TILE - 1)) // TILE, whole], dim=1).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(counts, (0, 0, 1, 0))


@dataclass(frozen=True)
class Product:
    """A matrix product of a step, left in parts: how kernel_product_leank cut it says which there are.

    Attributes:
        parts: `[parts, B, n]`, fp32.
        steps: Steps of a block of outputs.
        stretch: Steps of a program instance.
        block_size: Outputs of a block.
    """

    parts: torch.Tensor
    steps: int
    stretch: int
    block_size: int

    @property
    def cut(self) -> tuple[int, int, int]:
        """What kernels are told of how it was cut."""
        return self.steps, self.stretch, self.block_size

    @property
    def vectors(self) -> torch.Tensor:
        """`parts` as kernels take them `[parts, B, n / LANES, LANES]`."""
        return self.parts.view(*self.parts.shape[:2], -1, LANES)

    def outputs(self) -> torch.Tensor:
        """Return the sum of all parts that there are `[B, 1, n]`, by torch."""
        block = torch.arange(self.parts.shape[2], device=self.parts.device) // self.block_size
        last = (block * self.steps + self.steps - 1) // self.stretch - block * self.steps // self.stretch
        number = torch.arange(self.parts.shape[0], device=self.parts.device)
        return self.parts.masked_fill((number[:, None] > last)[:, None], 0).sum(0)[:, None]


_kernels: list[DecodeKernels] = []  # operators name kernels by their place here


class DecodeKernels:
    """The compiled kernels of one device, dtype and shape.

    Attributes:
        seconds: Time it took to compile them, or to load them from the cache on disk.
    """

    plan = staticmethod(plan_tiles)

    def __init__(self, key: KernelKey, *, generic: bool = False) -> None:
        """Compile, or load from TileLang's cache.

        Args:
            key: What they serve.
            generic: Take the body for older GPUs also on Hopper.
        """
        from .kernel_attention_leank import generic_attention, hopper_attention
        from .kernel_glue_leank import add_norm, append_tokens, rope_append, silu_mul
        from .kernel_leank import merge_parts
        from .kernel_product_leank import SIZES, product

        self.key = key
        self.generic = generic
        started = time.perf_counter()
        properties = torch.cuda.get_device_properties(key.device)
        hopper = (properties.major, properties.minor) == (9, 0)
        per_sm = properties.shared_memory_per_multiprocessor
        per_block = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        shape, self.programs_per_sm = self._fit(per_sm, per_block)
        self.num_programs = self.programs_per_sm * properties.multi_processor_count
        # Without the "a" the compiler silently leaves out wgmma.
        arch = f"sm_{properties.major}{properties.minor}{'a' if hopper else ''}"
        # The generic body's loads past the end of a tensor must be cut off; TMA does that by itself.
        generic = generic or not hopper
        attention = generic_attention if generic else hopper_attention
        others = (merge_parts, append_tokens, rope_append, add_norm, silu_mul)
        functions = [make(shape, overlap=properties.major >= 9) for make in others]
        # Other GPUs take the library's products.
        self._sizes = SIZES if hopper else {}
        functions += [product(shape.dtype, tokens) for tokens in self._sizes]
        (
            self._attention,
            self._merge,
            self._append,
            self._rope_append,
            self._add_norm,
            self._silu_mul,
            *products,
        ) = _compile([attention(shape), *functions], arch, guarded=generic)
        self._products = dict(zip(self._sizes, products, strict=True))
        self._num_multiprocessors = properties.multi_processor_count
        self._num_queries = shape.num_queries
        with torch.inference_mode(False):
            self._all_valid = torch.ones(1, dtype=torch.uint8, device=key.device)
        self._handle = len(_kernels)
        _kernels.append(self)
        self.seconds = time.perf_counter() - started

    @property
    def product_rows(self) -> tuple[int, ...]:
        """Most rows of each kernel that there is for products; more are the library's."""
        return tuple(self._products)

    def __reduce__(self) -> tuple[Any, tuple[KernelKey, bool]]:
        """Copy as the same kernels: compiled code cannot be copied, and a cache that holds it can be."""
        return _same_kernels, (self.key, self.generic)

    def _fit(self, per_sm: int, per_block: int) -> tuple[Any, int]:
        """Choose tiles in flight and instances per multiprocessor: two hide each other's latency."""
        from .kernel_leank import KernelShape

        key = self.key
        dtype = KERNEL_DTYPES[key.dtype]
        shape = KernelShape(key.head_dim, key.num_groups, key.chunk_size, key.max_chunks, dtype, num_stages=2)
        stage = TILE * (key.max_chunks * key.chunk_size + shape.value_size) * 2
        # Queries, weights, reductions' workspace, barriers, and what the driver reserves for a block.
        fixed = shape.num_queries * (key.max_chunks * key.chunk_size + TILE) * 2 + 4096
        for instances in (2, 1):
            stages = (min(per_sm // instances, per_block + 1024) - fixed) // stage
            if stages >= 2:
                return replace(shape, num_stages=min(int(stages), _MAX_STAGES)), instances
        raise ValueError(f"two tiles of {stage} bytes do not fit in {per_sm} bytes of shared memory")

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        store: StoreTensors,
        lengths: torch.Tensor,
        valid: torch.Tensor | None,
        sink_size: int,
        num_slots: int,
    ) -> None:
        """Add one token per row to the store, in place.

        Args:
            keys: `[B, H_kv, 1, D]`.
            values: `[B, H_kv, 1, D]`.
            store: What it is added to.
            lengths: Tokens per row, the new one counted `[B]`, int32.
            valid: Rows whose token is real `[B]`, bool; None if all are.
            sink_size: Sink slots of the window.
            num_slots: All its slots; those that no row has reached need not be there.
        """
        _append(self._handle, keys, values, *store, lengths, valid, sink_size, num_slots)

    def attend(
        self,
        query: torch.Tensor,
        store: StoreTensors,
        lengths: torch.Tensor,
        pruned_lengths: torch.Tensor,
        plan: torch.Tensor,
        *,
        sink_size: int,
        num_slots: int,
        softmax_scale: float,
    ) -> torch.Tensor:
        """Attend with one column to what is stored; memory that no token has reached may hold anything.

        Args:
            query: `[B, H, 1, D]`.
            store: What is attended to.
            lengths: Tokens per row `[B]`, int32.
            pruned_lengths: Pruned ones among them `[B]`, int32.
            plan: What `plan_tiles` made of these lengths.
            sink_size: Sink slots of the window.
            num_slots: All its slots; those that no row has reached need not be there.
            softmax_scale: Factor on the logits.

        Returns:
            `[B, H, 1, D]`.
        """
        output: torch.Tensor = _attend(
            self._handle, query, *store, lengths, pruned_lengths, plan, sink_size, num_slots, softmax_scale
        )
        return output

    # What follows is launched as it is, not as operators: a fused step is captured, never traced.
    def rope_append(
        self,
        projected: Product,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        store: StoreTensors,
        lengths: torch.Tensor,
        valid: torch.Tensor | None,
        sink_size: int,
        num_slots: int,
    ) -> torch.Tensor:
        """Rotate a column's queries and keys, and add K and V to the store, in place.

        Args:
            projected: Query heads, then those of K, then those of V: `product` of `(H + 2 H_kv) * D` outputs.
            cos: `[B or 1, 1, D]`.
            sin: `[B or 1, 1, D]`.
            norms: Weights `[D]` of the norms of queries and keys, and what is added under the root; None if
                heads are not normed.
            store: As in `append`, like the rest.
            lengths: `[B]`.
            valid: `[B]`.
            sink_size: Sink slots of the window.
            num_slots: All its slots.

        Returns:
            Queries `[B, H, 1, D]`.
        """
        head_dim = self.key.head_dim
        _, batch_size, num_outputs = projected.parts.shape
        num_heads = num_outputs // head_dim - 2 * (store.head_table.shape[0] - 1)
        query = cos.new_empty(batch_size, num_heads, 1, head_dim)
        cos, sin = cos.view(-1, head_dim), sin.view(-1, head_dim)
        query_weight, key_weight, eps = norms or (cos[0], cos[0], 0.0)  # placeholders
        flags = self._all_valid if valid is None else valid.contiguous().view(torch.uint8)
        with torch.cuda.device(query.device):
            self._rope_append(
                projected.vectors,
                cos,
                sin,
                query_weight.detach(),
                key_weight.detach(),
                query.view(batch_size, num_heads, head_dim),
                *store.map_memory(_not_empty),
                lengths,
                flags,
                sink_size,
                num_slots - sink_size,
                int(norms is not None),
                eps,
                *projected.cut,
            )
        return query

    def add_norm(
        self, hidden: torch.Tensor, delta: Product | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what a block gave to the hidden states, and norm the sum.

        Args:
            hidden: `[B, 1, hidden]`, contiguous.
            delta: `product` of `hidden` outputs; None for nothing.
            weight: Of the RMSNorm `[hidden]`.
            eps: What is added to the mean of squares.

        Returns:
            The sum, which is `hidden` itself without a delta, and its norm, both `[B, 1, hidden]`.
        """
        vectors = (hidden.shape[0], -1, LANES)
        normed = torch.empty_like(hidden)
        summed = hidden if delta is None else torch.empty_like(hidden)
        with torch.cuda.device(hidden.device):
            self._add_norm(
                hidden.view(vectors),
                hidden.new_empty(1, *hidden.view(vectors).shape, dtype=torch.float32)
                if delta is None
                else delta.vectors,
                weight.detach().view(-1, LANES),
                summed.view(vectors),
                normed.view(vectors),
                int(delta is not None),
                eps,
                *(delta.cut if delta else (1, 1, 1)),
            )
        return summed, normed

    def silu_mul(self, gate_up: Product) -> torch.Tensor:
        """Return silu(gate) * up `[B, 1, I]` of the product that gives both, one behind the other."""
        _, batch_size, num_outputs = gate_up.parts.shape
        output = gate_up.parts.new_empty(batch_size, 1, num_outputs // 2, dtype=self.key.dtype)
        with torch.cuda.device(output.device):
            self._silu_mul(gate_up.vectors, output.view(batch_size, -1, LANES), *gate_up.cut)
        return output

    def product(
        self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Product:
        """Return a linear module's output for one column, in parts.

        Args:
            states: `[B, 1, m]`, contiguous.
            weight: `[n, m]`, contiguous.
            bias: `[n]`.
        """
        batch_size, (num_outputs, num_inputs) = states.shape[0], weight.shape
        tokens = next((tokens for tokens in self._products if tokens >= batch_size), None)
        if tokens is None:
            output = torch.nn.functional.linear(states, weight, bias)
            return Product(output.float().view(1, batch_size, num_outputs), 1, 1, num_outputs)
        block_size, step_size, _ = self._sizes[tokens]
        steps = -(-num_inputs // step_size)
        total = -(-num_outputs // block_size) * steps
        stretch = max(-(-total // (2 * self._num_multiprocessors)), -(-steps // (_MAX_PARTS - 1)))
        size = (-(-(steps - 1) // stretch) + 1, batch_size, num_outputs)
        parts = torch.empty(size, dtype=torch.float32, device=states.device)
        weight = weight.detach()
        with torch.cuda.device(states.device):
            self._products[tokens](
                states.view(batch_size, num_inputs),
                weight,
                weight.view(-1)[:num_outputs] if bias is None else bias.detach(),
                parts,
                -(-total // stretch),
                stretch,
                int(bias is not None),
            )
        return Product(parts, steps, stretch, block_size)

    def _launch_append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        store: StoreTensors,
        lengths: torch.Tensor,
        valid: torch.Tensor | None,
        sink_size: int,
        num_slots: int,
    ) -> None:
        flat = (keys.shape[0], -1, self.key.head_dim)
        flags = self._all_valid if valid is None else valid.contiguous().view(torch.uint8)
        with torch.cuda.device(keys.device):
            self._append(
                keys.view(flat),
                values.view(flat),
                *store.map_memory(_not_empty),
                lengths,
                flags,
                sink_size,
                num_slots - sink_size,
            )

    def _launch_attend(
        self,
        query: torch.Tensor,
        store: StoreTensors,
        lengths: torch.Tensor,
        pruned_lengths: torch.Tensor,
        plan: torch.Tensor,
        sink_size: int,
        num_slots: int,
        softmax_scale: float,
    ) -> torch.Tensor:
        batch_size, num_heads, _, head_dim = query.shape
        part = (self.num_programs, 2, self._num_queries)
        parts = torch.empty(*part, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(part, dtype=torch.float32, device=query.device)
        output = torch.empty_like(query)
        flat_output = output.view(batch_size, num_heads, head_dim)
        with torch.cuda.device(query.device):
            self._attention(
                query.view(batch_size, num_heads, head_dim),
                *store.map_memory(_not_empty),
                lengths,
                pruned_lengths,
                plan,
                parts,
                lse,
                flat_output,
                sink_size,
                num_slots - sink_size,
                softmax_scale * _LOG2_E,
            )
            self._merge(store.head_table, plan, parts, lse, flat_output)
        return output


def _not_empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a placeholder for a tensor of no rows, which no kernel reads: TMA wants an address."""
    return tensor if tensor.shape[1] else tensor.new_empty(tensor.shape[0], 1, TILE, tensor.shape[3])


def _same_kernels(key: KernelKey, generic: bool) -> DecodeKernels:
    made = (kernels for kernels in _kernels if kernels.key == key and kernels.generic == generic)
    return next(made, None) or DecodeKernels(key, generic=generic)


def _compile(functions: list[Any], arch: str, guarded: bool) -> list[Any]:
    """Compile, or load from TileLang's cache on disk.

    Args:
        functions: TileLang functions.
        arch: Compute capability, `sm_90a`.
        guarded: Whether the first function needs TileLang's bounds checks. The others stay within bounds, and
            the checks keep loads from overlapping: the merge takes three times as long with them.
    """
    tilelang = importlib.import_module("tilelang")  # an import statement would make it a requirement
    keys = tilelang.PassConfigKey

    def compiled(place: int) -> Any:
        # Warp specialisation is written out where it is wanted.
        configs = {keys.TL_DISABLE_WARP_SPECIALIZED: True}
        if place or not guarded:
            configs[keys.TL_DISABLE_SAFE_MEMORY_ACCESS] = True
        target = {"kind": "cuda", "arch": arch}
        return tilelang.compile(functions[place], target=target, pass_configs=configs)

    with _quiet(), ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(compiled, range(len(functions))))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep TileLang's notes about every compilation to itself."""
    loggers = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("tilelang")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# torch's operators take tensors one by one: this is the one place where the store's are written out.
@torch.library.custom_op(
    f"{_LIBRARY}::append",
    mutates_args=("kept_keys", "stored_values", "window_keys", "window_values"),
    schema="(int kernels, Tensor keys, Tensor values, Tensor(a!) kept_keys, Tensor(b!) stored_values, "
    "Tensor(c!) window_keys, Tensor(d!) window_values, Tensor chunk_index, Tensor head_table, "
    "Tensor lengths, Tensor? valid, int sink_size, int num_slots) -> ()",
)
def _append(kernels: int, keys: torch.Tensor, values: torch.Tensor, *store_and_rest: Any) -> None:
    store, rest = StoreTensors(*store_and_rest[:6]), store_and_rest[6:]
    _kernels[kernels]._launch_append(keys, values, store, *rest)


@torch.library.custom_op(
    f"{_LIBRARY}::attend",
    mutates_args=(),
    schema="(int kernels, Tensor query, Tensor kept_keys, Tensor stored_values, Tensor window_keys, "
    "Tensor window_values, Tensor chunk_index, Tensor head_table, Tensor lengths, Tensor pruned_lengths, "
    "Tensor plan, int sink_size, int num_slots, float softmax_scale) -> Tensor",
)
def _attend(kernels: int, query: torch.Tensor, *store_and_rest: Any) -> torch.Tensor:
    store, rest = StoreTensors(*store_and_rest[:6]), store_and_rest[6:]
    return _kernels[kernels]._launch_attend(query, store, *rest)


@_append.register_fake
def _append_nothing(*arguments: object) -> None:
    return None


@_attend.register_fake
def _shape_of_output(kernels: int, query: torch.Tensor, *arguments: object) -> torch.Tensor:
    return torch.empty_like(query)
