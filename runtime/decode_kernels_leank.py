"""Decode kernels of one device, dtype and shape: compiled, and launched."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from .kernel_key_leank import (
    BLOCK,
    LANES,
    MAX_PARTS,
    TILE,
    TURN_QUERIES,
    KernelKey,
    Product,
    num_parts,
    parts_of_turn,
    plan_tiles,
)
from .parts_leank import load_part
from .stored_leank import StoredRow, StoreTensors

_LOG2_E = 1.4426950408889634
_MAX_STAGES = 6
_NUM_MEMORY = StoreTensors._fields.index("key_mean")  # behind what the memory is are constants

_made: list[DecodeKernels] = []  # so that a copy of what holds kernels finds them


class DecodeKernels:
    """The compiled kernels of one device, dtype and shape.

    Attributes:
        arch: What they are compiled for, as compilers spell it.
        attends_turns: Whether there is a kernel for attention to turns.
        num_multiprocessors: Multiprocessors of the device.
    """

    plan = staticmethod(plan_tiles)

    def __init__(self, key: KernelKey, *, generic: bool = False) -> None:
        """Compile, or load from TileLang's cache.

        Args:
            key: What they serve.
            generic: Take the body for older GPUs also on Hopper.
        """
        from .kernel_generic_leank import generic_attention
        from .kernel_glue_leank import add_norm, append_tokens, rope_append, silu_mul
        from .kernel_hopper_leank import hopper_attention
        from .kernel_leank import compile_kernels
        from .kernel_merge_leank import merge_parts
        from .kernel_product_leank import GATED_STEPS, STEPS, product
        from .kernel_turn_leank import attend_turn, copy_rows

        self.key = key
        self.generic = generic
        self._plan: weakref.ref[torch.Tensor] | None = None
        properties = torch.cuda.get_device_properties(key.device)
        hopper = (properties.major, properties.minor) == (9, 0)
        per_sm = properties.shared_memory_per_multiprocessor
        per_block = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        shape = self.fit(per_sm, per_block)
        self.num_programs = shape.num_instances * properties.multi_processor_count
        # Without the "a" the compiler silently leaves out wgmma.
        self.arch = f"sm_{properties.major}{properties.minor}{'a' if hopper else ''}"
        by_tma = hopper and not generic
        by_hand = [hopper_attention(shape)] if by_tma else []
        self.attends_turns = by_tma and key.has_turns and key.head_dim in (64, 128)
        if self.attends_turns:
            by_hand.append(attend_turn(shape, per_block))
        others = [merge_parts, append_tokens]
        if key.has_glue:
            others += [rope_append, add_norm, silu_mul]
        functions = [make(shape, overlap=properties.major >= 9) for make in others]
        if key.has_turns:
            functions.append(copy_rows(shape, for_kernel=self.attends_turns))
        # Other GPUs take the library's products.
        self._steps = STEPS if hopper and key.has_glue else {}
        functions += [product(shape.query_type, tokens) for tokens in self._steps]
        self._gated_steps = GATED_STEPS if self._steps else {}
        functions += [product(shape.query_type, tokens, gated=True) for tokens in self._gated_steps]
        if not by_tma:
            functions.insert(0, generic_attention(shape))
        kernels = iter(compile_kernels(by_hand, functions, self.arch))
        self._attention = next(kernels)
        if self.attends_turns:
            self._attend_turn = next(kernels)
        self._merge, self._append = next(kernels), next(kernels)
        if key.has_glue:
            self._rope_append, self._add_norm, self._silu_mul = itertools.islice(kernels, 3)
        if key.has_turns:
            self._copy_rows = next(kernels)
        # By the most rows of each; products of more are the library's.
        self.products = dict(zip(self._steps, kernels, strict=False))
        self.gated_products = dict(zip(self._gated_steps, kernels, strict=True))
        self.num_multiprocessors = properties.multi_processor_count
        _made.append(self)

    @cached_property
    def _stand_ins(self) -> dict[Any, torch.Tensor]:
        """What stands for flags that are all set, for pools without rows, for no constants or sinks.

        The check makes it, before any capture: to compile takes no memory of the GPU.
        """
        key, sizes = self.key, {self.key.chunk_size, self.key.value_chunk}
        dtype = torch.uint8 if key.is_fp8 else key.dtype
        with torch.inference_mode(False), key.device:
            pages = {size: torch.zeros(1, 1, TILE, size, dtype=dtype) for size in sizes}
            valid, scale = torch.ones(1, 1, dtype=torch.uint8), torch.ones(1, 1, key.head_dim)
            sinks, mean = torch.zeros(1, 1, 1), torch.zeros_like(scale)
            return {"valid": valid, "sinks": sinks, "mean": mean, "scale": scale, **pages}

    def __reduce__(self) -> tuple[Any, tuple[KernelKey, bool]]:
        """Copy as the same kernels: compiled code cannot be copied, and a cache that holds it can be."""
        return _same_kernels, (self.key, self.generic)

    def fit(self, per_sm: int, per_block: int) -> Any:
        """Choose tiles in flight and instances per multiprocessor: two hide each other's latency."""
        from .kernel_leank import KernelShape

        key = self.key
        shape = KernelShape(**vars(key))
        stage = TILE * (key.max_chunks * key.chunk_size + shape.value_size) * (1 if key.is_fp8 else 2)
        # Queries, weights, workspaces of two reductions, limits, barriers, and what the driver reserves.
        fixed = shape.num_queries * ((key.max_chunks * key.chunk_size + TILE) * 2 + 264) + 2048
        # The accumulators of 64 queries leave no registers to a second instance, nor do those of 32 beside V
        # of FP8 in registers where half of that is padding. Tiles of FP8 are half as large, and take as long
        # to work on: a third hides more.
        is_padded = key.is_fp8 and shape.value_size >= 2 * key.head_dim
        most = 1 if shape.num_queries == 64 or (shape.num_queries == 32 and is_padded) else 2
        if key.is_fp8 and shape.num_queries == 8 and shape.value_size <= 128:
            most = 3
        for instances in range(most, 0, -1):
            stages = (min(per_sm // instances, per_block + 1024) - fixed) // stage
            if stages >= 2:
                num_stages = min(int(stages), _MAX_STAGES)
                return replace(shape, num_stages=num_stages, num_instances=instances)
        raise ValueError(f"two tiles of {stage} bytes do not fit in {per_sm} bytes of shared memory")

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        store: StoreTensors,
        seen: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> None:
        """Add new tokens to the store, in place: that of column j is token `seen[:, j] - 1` of its row.

        Args:
            keys: `[B, H_kv, d, D]`.
            values: `[B, H_kv, d, D]`.
            store: What they are added to.
            seen: Tokens of its row that a column sees, itself among them `[B, d]`, int32.
            valid: Columns that are no padding `[B, d]`, bool; None if all are.
        """
        states = [own if own.stride(-1) == 1 else own.contiguous() for own in (keys, values)]
        with torch.cuda.device(keys.device):
            self._append(*states, *self.arguments(store), self.mean_of(store), seen, self._flags(valid))

    def attend(
        self,
        query: torch.Tensor,
        store: StoreTensors,
        seen: torch.Tensor,
        pruned: torch.Tensor,
        plan: torch.Tensor,
        *,
        sink_size: int,
        softmax_scale: float,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to what is stored, the columns' own tokens among it.

        Token i of a row is visible to column j if i < `seen[:, j]`. It is whole if i < `sink_size` or
        i >= `sink_size + pruned[:, j]`; of others a column sees kept channels alone. Memory of no visible
        token may hold anything.

        Args:
            query: `[B, H, d, D]`.
            store: What is attended to.
            seen: Tokens of its row that a column sees, never fewer than the column before `[B, d]`, int32.
            pruned: Pruned ones among them, never fewer than in the column before `[B, d]`, int32.
            plan: What `plan_tiles` made of them.
            sink_size: Tokens at the front that are never pruned.
            softmax_scale: Factor on the logits.
            sinks: Logits of the heads' attention sinks `[H]`, where there are some.
            out: What is written and returned, contiguous; None for new memory.

        Returns:
            `[B, H, d, D]`; columns of padding hold numbers without meaning.
        """
        assert (sinks is not None) == self.key.has_sinks
        beside = self._stand_ins["sinks"]
        if sinks is not None:
            of_queries = load_part("sinks").sinks_beside
            beside = of_queries(query, sinks.detach(), store.key_mean, softmax_scale) * _LOG2_E
        num_columns, num_queries = query.shape[2], self.key.num_queries
        num_launches = -(-num_columns // (num_queries // self.key.num_groups))
        at_once = -(-num_columns // num_launches)
        query = query.contiguous()
        output = torch.empty_like(query) if out is None else out
        # An earlier attention with this plan was launched behind it, and all that is launched from then on
        # starts when the plan is there. Before that nothing is read ahead of the wait for the last kernel.
        early = self._plan is not None and self._plan() is plan
        self._plan = weakref.ref(plan)
        arguments = *self.arguments(store), seen, pruned, plan, beside
        part = (self.num_programs, 2, num_queries)
        with torch.cuda.device(query.device):
            for first in range(0, num_columns, at_once):
                columns = first, min(at_once, num_columns - first)
                parts = torch.empty(*part, query.shape[3], dtype=torch.float32, device=query.device)
                lse = torch.empty(part, dtype=torch.float32, device=query.device)
                results = parts, lse, output, *columns
                self._attention(query, *arguments, *results, sink_size, softmax_scale * _LOG2_E, int(early))
                self._merge(store.head_table, plan, *results)
        return output

    def copy_rows(
        self, first: StoredRow, new_keys: torch.Tensor, new_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy rows for dense attention: K and V of heads that see pruned tokens `[R, n, heads, D]` each.

        Where channels are pruned they are zero. Where kernels attend to turns, it is what these read instead.

        Args:
            first: The first of R rows that hold equally many tokens, in pages of `TILE`.
            new_keys: What comes behind these `[R, H_kv, d, D]`.
            new_values: `[R, H_kv, d, D]`.
        """
        num_rows, all_heads, num_columns, head_dim = new_keys.shape
        num_heads, width = len(first.layout.value_heads), head_dim
        if self.attends_turns:
            num_heads, width = all_heads, self.key.max_chunks * self.key.chunk_size
        size = num_rows, first.length + num_columns, num_heads
        keys, values = new_keys.new_empty(*size, width), new_values.new_empty(*size, head_dim)
        new = new_keys.contiguous(), new_values.contiguous()
        span = first.row, first.pruned, first.sink_size
        with torch.cuda.device(keys.device):
            self._copy_rows(*self.arguments(first.store), *new, keys, values, *span)
        return keys, values

    def attend_turn(
        self,
        query: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        first: StoredRow,
        *,
        softmax_scale: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to what rows hold, and causally to new tokens that are not stored yet: `[R, H, d, D]`.

        Args:
            query: `[R, H, d, D]`.
            new_keys: As they will be stored `[R, H_kv, d, D]`.
            new_values: `[R, H_kv, d, D]`.
            first: As in `copy_rows`.
            softmax_scale: Factor on the logits.
            sinks: As `sinks_beside` gives them `[R or 1, H, d or 1]`.
        """
        keys, values = self.copy_rows(first, new_keys, new_values)
        query = query.contiguous()
        num_blocks = -(-query.shape[2] * self.key.num_groups // TURN_QUERIES) * keys.shape[2] * len(query)
        num_parts = parts_of_turn(num_blocks, keys.shape[1], self.num_multiprocessors)
        parts = query.new_empty(num_parts, *query.shape, dtype=torch.float32)
        lse = query.new_empty(num_parts, *query.shape[:3], dtype=torch.float32)
        target = first.store.chunk_index, first.store.head_table, parts, lse
        span = first.row, first.pruned, first.sink_size
        with torch.cuda.device(query.device):
            self._attend_turn(query, keys, values, *target, *span, softmax_scale * _LOG2_E)
        if sinks is not None:
            lse = torch.cat([lse, sinks.expand_as(lse[:1])])
        if len(lse) == 1:
            return parts[0].to(query.dtype)
        return (parts * lse.softmax(dim=0)[:num_parts, ..., None]).sum(dim=0).to(query.dtype)

    def rope_append(
        self,
        projected: Product,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        store: StoreTensors,
        seen: torch.Tensor,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """Rotate queries and keys of new tokens, and add K and V to the store, in place.

        Args:
            projected: Query heads, then those of K, then those of V: `product` of `(H + 2 H_kv) * D` outputs
                for tokens `[B * d]`.
            cos: `[B or 1, d, D]`.
            sin: `[B or 1, d, D]`.
            norms: Weights `[D]` of the norms of queries and keys, and what is added under the root; None if
                heads are not normed.
            store: As in `append`, like the rest.
            seen: `[B, d]`.
            valid: `[B, d]`.

        Returns:
            Queries `[B, H, d, D]`.
        """
        head_dim = self.key.head_dim
        num_heads = projected.parts.shape[2] // head_dim - 2 * (store.head_table.shape[0] - 1)
        query = cos.new_empty(seen.shape[0], num_heads, seen.shape[1], head_dim)
        cos, sin = cos.view(-1, head_dim), sin.view(-1, head_dim)
        query_weight, key_weight, eps = norms or (cos[0], cos[0], 0.0)  # placeholders
        states = projected.vectors, cos, sin, query_weight.detach(), key_weight.detach(), query
        target = *self.arguments(store), self.mean_of(store), seen, self._flags(valid)
        with torch.cuda.device(query.device):
            self._rope_append(*states, *target, int(norms is not None), eps, *projected.cut)
        return query

    def add_norm(
        self, hidden: torch.Tensor, delta: Product | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what a block gave to the hidden states, and norm the sum.

        Args:
            hidden: `[T, hidden]`, contiguous.
            delta: `product` of `hidden` outputs; None for nothing.
            weight: Of the RMSNorm `[hidden]`.
            eps: What is added to the mean of squares.

        Returns:
            The sum, which is `hidden` itself without a delta, and its norm, both `[T, hidden]`.
        """
        vectors = (hidden.shape[0], -1, LANES)
        normed = torch.empty_like(hidden)
        summed = hidden if delta is None else torch.empty_like(hidden)
        with torch.cuda.device(hidden.device):
            self._add_norm(
                hidden.view(vectors),
                hidden.new_empty(1, 1, LANES, dtype=torch.float32) if delta is None else delta.vectors,
                weight.detach().view(-1, LANES),
                summed.view(vectors),
                normed.view(vectors),
                int(delta is not None),
                eps,
                *(delta.cut if delta else (1, 1)),
            )
        return summed, normed

    def silu_mul(self, gate_up: Product) -> torch.Tensor:
        """Return silu(gate) * up `[T, I]` of the product that gives both, one behind the other."""
        _, num_tokens, num_outputs = gate_up.parts.shape
        output = gate_up.parts.new_empty(num_tokens, num_outputs // 2, dtype=self.key.dtype)
        with torch.cuda.device(output.device):
            self._silu_mul(gate_up.vectors, output.view(num_tokens, -1, LANES), *gate_up.cut)
        return output

    def gated_product(
        self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return silu(gate) * up `[T, I]`, by one kernel where there are one or two blocks a multiprocessor.

        Args:
            states: `[T, m]`, contiguous.
            weight: Those of gate and, behind them, of up `[2 I, m]`, contiguous.
            bias: `[2 I]`.
        """
        num_tokens, num_outputs = len(states), len(weight) // 2
        rows = next((rows for rows in self.products if rows >= num_tokens), None)
        blocks = -(-num_outputs // BLOCK)
        fits = self.num_multiprocessors <= blocks <= 2 * self.num_multiprocessors
        if rows not in self.gated_products or bias is not None or not fits:
            return self.silu_mul(self.product(states, weight, bias))
        output = states.new_empty(1, num_tokens, num_outputs)
        weight, steps = weight.detach(), -(-states.shape[1] // self._gated_steps[rows][0])
        with torch.cuda.device(states.device):
            self.gated_products[rows](states, weight, weight.view(-1)[:num_outputs], output, blocks, steps, 0)
        return output[0]

    def product(
        self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Product:
        """Return a linear module's output in parts.

        Args:
            states: `[T, m]`, contiguous.
            weight: `[n, m]`, contiguous.
            bias: `[n]`.
        """
        num_tokens, (num_outputs, num_inputs) = len(states), weight.shape
        rows = next((rows for rows in self.products if rows >= num_tokens), None)
        if rows is None:
            output = torch.nn.functional.linear(states, weight, bias)
            return Product(output.float().view(1, num_tokens, num_outputs), 1, 1)
        steps = -(-num_inputs // self._steps[rows][0])
        total = -(-num_outputs // BLOCK) * steps
        stretch = -(-total // (2 * self.num_multiprocessors))
        while num_parts(steps, stretch) > MAX_PARTS:
            stretch += 1
        size = (num_parts(steps, stretch), num_tokens, num_outputs)
        parts = torch.empty(size, dtype=torch.float32, device=states.device)
        weight = weight.detach()
        with torch.cuda.device(states.device):
            self.products[rows](
                states,
                weight,
                weight.view(-1)[:num_outputs] if bias is None else bias.detach(),
                parts,
                -(-total // stretch),
                stretch,
                int(bias is not None),
            )
        return Product(parts, steps, stretch)

    def arguments(self, store: StoreTensors) -> tuple[Any, ...]:
        """Return a store as kernels take it: FP8 as bytes, something in the place of what is not there.

        A page stands for pools without rows, as TMA wants an address. Where a layer drops channels of V alone
        the window's V stands for its K, which kernels ask how pages lie.
        """

        def as_taken(pool: torch.Tensor) -> torch.Tensor:
            if not pool.shape[1]:
                return self._stand_ins[pool.shape[3]]
            return pool.view(torch.uint8) if self.key.is_fp8 else pool

        taken, (num_pages, of_values, *_) = store.map_memory(as_taken), store.window_values.shape
        if of_values and not store.window_keys.shape[1]:
            page_size, lanes = taken.window_values.shape[2], self.key.chunk_size
            strides = taken.window_values.stride(0), page_size * lanes, lanes, 1
            pages = taken.window_values.as_strided((num_pages, 1, page_size, lanes), strides)
            taken = taken._replace(window_keys=pages)
        scales = (store.key_scale, store.value_scale) if self.key.is_fp8 else (self._stand_ins["scale"],) * 2
        return *taken[:_NUM_MEMORY], *scales

    def mean_of(self, store: StoreTensors) -> torch.Tensor:
        """Return a store's mean of keys as kernels take it."""
        return self._stand_ins["mean"] if store.key_mean is None else store.key_mean

    def _flags(self, valid: torch.Tensor | None) -> torch.Tensor:
        return self._stand_ins["valid"] if valid is None else valid.contiguous().view(torch.uint8)


def _same_kernels(key: KernelKey, generic: bool) -> DecodeKernels:
    made = (kernels for kernels in _made if kernels.key == key and kernels.generic == generic)
    return next(made, None) or DecodeKernels(key, generic=generic)
