"""The kernels' self-check: a cache of random prompts, decoded by them and by the naive reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .constants_leank import Constants, choose_constants
from .decode_kernels_leank import DecodeKernels
from .kernel_key_leank import BLOCK, LANES, MAX_DRAFT, TILE, KernelKey, Product
from .layout_leank import ChunkLayout, order_channels
from .reference_leank import attend_naively
from .rows_leank import RowState
from .step_leank import Append
from .store_leank import ChunkStore
from .turns_leank import attend_turn
from .windows_leank import Windows

# Prompts of which nothing is pruned, one tile in part, whole tiles.
_LENGTHS = (33, 90, 333)
_WINDOWS = Windows(sink_size=8, recent_size=64, flush_size=4)
_SCALE = 0.3
_EPS = 1e-5
_HIDDEN_SIZE = 4112  # more than one vector a thread, and not for all threads
_NUM_OUTPUTS = 200
_NUM_INPUTS = 520  # of a gated product, which has many outputs

_Random = Callable[..., torch.Tensor]
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Step:
    """Prompts in a cache, and one decode step of theirs that is not in it yet."""

    store: ChunkStore
    query: torch.Tensor  # `[B, H, d, D]`
    keys: torch.Tensor  # `[B, H_kv, d, D]`
    values: torch.Tensor  # `[B, H_kv, d, D]`
    append: Append  # where new tokens go, and what they see
    sinks: torch.Tensor | None  # logits of attention sinks `[H]`

    def stored(self) -> ChunkStore:
        """Return the cache with the new tokens in it, by plain torch."""
        store = copy.copy(self.store)
        store.copy_memory()
        store.append(self.keys, self.values, self.append)
        return store


def disagreement(kernels: DecodeKernels) -> float:
    """Return the largest error of kernels on a small cache, relative to what is expected; inf for NaN."""
    key = kernels.key
    generator = torch.Generator(key.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=key.device).to(key.dtype)

    # Whatever torch's default device is. Neither TF32 nor autocast, which a caller may have on, touches fp64.
    with torch.device("cpu"), torch.autocast(key.device.type, enabled=False):
        several = _make_step(key, min(max(key.num_queries // key.num_groups, 1), MAX_DRAFT), random)
        pairs = [_check_attention(kernels, several)]
        if key.has_glue:
            pairs += _check_glue(kernels, several, random)
        if key.has_turns and key.load_tokens == TILE:
            pairs.append(_check_turn(kernels, _make_step(key, 5, random)))
        doubles = [(ours.double(), expected.double()) for ours, expected in pairs]
        errors = torch.stack([(ours - expected).norm() / expected.norm() for ours, expected in doubles])
        return float(errors.nan_to_num(nan=torch.inf).max())


def _make_step(key: KernelKey, num_columns: int, random: _Random) -> _Step:
    """Fill a cache of heads of four widths with prompts, and make a step of so many columns."""
    spare = 3 if key.max_chunks > key.head_dim // key.chunk_size else 0
    half = key.head_dim // 2 // key.chunk_size * key.chunk_size
    widths = (0, key.chunk_size - spare, half + spare, key.head_dim)
    mask = torch.arange(key.head_dim).flip(0) < torch.tensor(widths)[:, None]
    chunk, kept = key.value_chunk, key.head_dim // key.value_chunk // 2 * key.value_chunk
    value_widths = None if chunk == key.head_dim else (0, 0, kept, key.head_dim)
    layout = ChunkLayout(widths, key.head_dim, key.chunk_size, value_widths, chunk)
    index = layout.chunk_index(order_channels(mask[None])).to(key.device)
    rows = RowState(_WINDOWS)
    num_rows, num_prompt, size = len(_LENGTHS), max(_LENGTHS), (len(widths), key.head_dim)
    keys, values = (random(num_rows, len(widths), num_prompt, key.head_dim) for _ in range(2))
    real = (torch.arange(num_prompt) >= num_prompt - torch.tensor(_LENGTHS)[:, None]).to(key.device)
    split = rows.step(0, num_rows, num_prompt, real, key.device).split
    assert split is not None
    model = Constants() if key.is_fp8 else Constants(random(1, *size).float())  # else every row's own
    kv_dtype = "fp8" if key.is_fp8 else "auto"
    constants = choose_constants(keys, values, real, kv_dtype, model)
    store = ChunkStore(layout, index, split.tables, key.dtype, constants, kv_dtype)
    store.write_prompt(keys, values, split)
    append = rows.step(num_prompt, num_rows, num_columns, None, key.device).append
    assert append is not None
    store.move_to(append.tables)
    new = random(num_rows, num_columns, 2 * len(widths), key.head_dim)
    keys, values = new.transpose(1, 2).chunk(2, dim=1)  # slices, as a projection of both gives them
    num_heads = len(widths) * key.num_groups
    sinks = random(num_heads) if key.has_sinks else None
    query = random(num_rows, num_heads, num_columns, key.head_dim)
    return _Step(store, query, keys, values, append, sinks)


def _check_attention(kernels: DecodeKernels, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention after an append by kernels, and by the naive reference."""
    append, store = step.append, step.store.tensors.map_memory(torch.clone)
    seen, pruned = append.seen, append.pruned
    plan = kernels.plan(seen, pruned, _WINDOWS.sink_size)
    kernels.append(step.keys, step.values, store, seen, None)
    options: dict[str, Any] = {"sink_size": _WINDOWS.sink_size, "softmax_scale": _SCALE, "sinks": step.sinks}
    ours = kernels.attend(step.query, store, seen, pruned, plan, **options)
    stored, layout = step.stored().tensors, step.store.layout
    expected = attend_naively(step.query, stored, seen, pruned, layout=layout, **options)
    return ours, expected


def _check_turn(kernels: DecodeKernels, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to new tokens that are not stored yet, by kernels and by the naive reference."""
    append, store, sinks = step.append, step.store, step.sinks
    as_stored = store.tensors.rounded(step.keys, step.values, store.layout)
    ours = attend_turn(step.query, *as_stored, store, append, _SCALE, sinks, kernels)
    pruned = append.pruned[:, :1].expand_as(append.pruned)  # as before the turn
    options: dict[str, Any] = {"sink_size": _WINDOWS.sink_size, "softmax_scale": _SCALE, "sinks": sinks}
    stored = step.stored().tensors
    return ours, attend_naively(step.query, stored, append.seen, pruned, layout=store.layout, **options)


def in_parts(outputs: torch.Tensor) -> Product:
    """Return outputs `[T, n]` as a product of which some blocks are cut in two."""
    steps, stretch = 3, 4
    block = torch.arange(outputs.shape[-1], device=outputs.device) // 64
    cut = (block * steps + steps - 1) // stretch > block * steps // stretch
    whole = outputs.float()
    parts = [torch.where(cut, whole / 4, whole), torch.where(cut, whole * 0.75, torch.nan)]
    return Product(torch.stack(parts), steps, stretch)


def _check_glue(kernels: DecodeKernels, step: _Step, random: _Random) -> _Pairs:
    """Return what the kernels around attention give, and what is expected in fp64.

    Queries, keys and values of the step are taken for projections, normed and rotated before they are
    appended.
    """
    batch_size, _, num_columns, head_dim = step.query.shape
    dtype = step.query.dtype

    def normed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        states = states.double()
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + _EPS) * weight.double()

    def rotated(states: torch.Tensor) -> torch.Tensor:
        across = torch.cat([-states[..., head_dim // 2 :], states[..., : head_dim // 2]], dim=-1)
        return states * cos.double()[:, None] + across * sin.double()[:, None]

    angle = random(batch_size, num_columns, head_dim // 2).repeat(1, 1, 2).double()
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weights = random(head_dim), random(head_dim)
    query, keys = (
        rotated(normed(states, weight))
        for states, weight in zip((step.query, step.keys), weights, strict=True)
    )
    projected = (
        torch.cat([step.query, step.keys, step.values], dim=1).transpose(1, 2).flatten(2).flatten(0, 1)
    )
    store = step.store.tensors.map_memory(torch.clone)
    ours = kernels.rope_append(in_parts(projected), cos, sin, (*weights, _EPS), store, step.append.seen, None)
    pairs = [(ours, query)]
    stored = replace(step, keys=keys.to(dtype)).stored().tensors
    pairs += zip(store[:4], stored[:4], strict=True)
    hidden, delta = random(batch_size, _HIDDEN_SIZE), random(batch_size, _HIDDEN_SIZE)
    weight = random(_HIDDEN_SIZE)
    summed = hidden.double() + delta.double()
    pairs += zip(
        kernels.add_norm(hidden, in_parts(delta), weight, _EPS), (summed, normed(summed, weight)), strict=True
    )
    pairs.append((kernels.add_norm(hidden, None, weight, _EPS)[1], normed(hidden, weight)))
    pairs.append((kernels.silu_mul(in_parts(delta)), _gated(delta.double())))
    matrix, bias = random(_NUM_OUTPUTS, _HIDDEN_SIZE), random(_NUM_OUTPUTS)
    gate_up = random(2 * (kernels.num_multiprocessors * BLOCK - LANES), _NUM_INPUTS) / 16  # sums of some 1
    for most_rows in kernels.products:
        states = random(most_rows - 3, _HIDDEN_SIZE)
        expected = torch.nn.functional.linear(states.double(), matrix.double(), bias.double())
        pairs.append((kernels.product(states, matrix, bias).outputs(), expected))
        states = states[:, :_NUM_INPUTS].contiguous()
        pairs.append((kernels.gated_product(states, gate_up), _gated(states.double() @ gate_up.double().T)))
    return pairs


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
