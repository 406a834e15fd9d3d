"""Decode kernels found for a device and a shape, and held to the reference before they first serve."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers.utils import logging as transformers_logging

from .decode_kernels_leank import KERNEL_DTYPES, DecodeKernels, KernelKey, Product
from .layout_leank import ChunkLayout, StoreTensors, order_channels
from .reference_leank import decode_attention
from .step_leank import window_tokens

logger = transformers_logging.get_logger(__name__)

# The self-check. Tokens and pruned ones among them: one token, a ring with room, one that has gone round.
_ROWS = ((1, 0), (90, 15), (333, 260))
_SINK_SIZE, _NUM_SLOTS = 8, 80
_SCALE = 0.3
_EPS = 1e-5
_HIDDEN_SIZE = 4112  # more than one vector a thread, and not for all threads
_NUM_OUTPUTS = 200

_found: dict[KernelKey, DecodeKernels | None] = {}
_LOCK = threading.Lock()  # models of one process may decode in threads of their own


def find_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    num_groups: int,
    chunk_size: int,
    max_chunks: int,
) -> DecodeKernels | None:
    """Return the kernels for a device, a dtype and a shape, None if plain torch must do.

    The first call for a shape compiles them, or loads them from TileLang's cache on disk, and holds them to
    the reference on a small case; if that fails, one warning says so. The arguments are a `KernelKey`'s.
    """
    if device.type != "cuda":
        return None
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    key = KernelKey(device, dtype, head_dim, num_groups, chunk_size, max_chunks)
    if key not in _found:
        with _LOCK:
            if key not in _found:
                _found[key] = _make_kernels(key)
    return _found[key]


def _unsupported(key: KernelKey) -> str | None:
    """Return why no kernel can serve a shape, None if one can."""
    if key.dtype not in KERNEL_DTYPES:
        return f"kernels serve bfloat16 and float16, not {str(key.dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("tilelang") is None:
        return "tilelang is not installed (pip install tilelang)"
    capability = torch.cuda.get_device_capability(key.device)
    if capability < (8, 0):
        return f"{torch.cuda.get_device_name(key.device)} is older than compute capability 8.0"
    if key.chunk_size not in (16, 32) or key.head_dim % 16 or key.head_dim > 256 or key.num_groups > 16:
        return (
            f"head_dim {key.head_dim}, {key.num_groups} query heads per KV head, chunks of {key.chunk_size}: "
            "kernels serve head_dim 64 to 256, at most 16 query heads per KV head, chunks of 16 or 32"
        )
    return None


def _make_kernels(key: KernelKey) -> DecodeKernels | None:
    reason = _unsupported(key)
    if reason is None:
        try:
            with torch.cuda.device(key.device):
                kernels = DecodeKernels(key)
                error = disagreement(kernels)
            if error <= 2 * torch.finfo(key.dtype).eps:
                return kernels
            reason = f"the compiled kernel disagrees with the reference by {error:.1e} of the output"
        except torch.OutOfMemoryError:
            raise  # it says nothing about the kernels, and may pass
        except Exception as exception:  # whatever a compiler or driver may raise
            reason = f"{type(exception).__name__}: {str(exception).strip()[-300:]}"
    logger.warning(
        "LeanK's decode kernels are not used on %s, plain torch decodes instead and is slower: %s",
        key.device,
        reason,
    )
    return None


@dataclass(frozen=True)
class DecodeCase:
    """One decode step on random data: a cache that lacks every row's last token, and that token.

    Attributes:
        layout: How channels are cut into chunks.
        sink_size: Sink slots of the window.
        num_slots: All its slots.
        query: `[B, H, 1, D]`.
        keys: The last token of each row `[B, H_kv, 1, D]`.
        values: `[B, H_kv, 1, D]`.
        store: K and V, NaN where no token lies.
        lengths: Tokens per row, the last one counted `[B]`, int32.
        pruned_lengths: Pruned ones among them `[B]`, int32.
    """

    layout: ChunkLayout
    sink_size: int
    num_slots: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    store: StoreTensors
    lengths: torch.Tensor
    pruned_lengths: torch.Tensor

    def appended(self) -> StoreTensors:
        """Return the store with the last tokens in it, by plain indexing."""
        store = self.store.map_memory(torch.clone)
        kept, ring_size, index = (
            self.layout.num_kept_chunks,
            self.num_slots - self.sink_size,
            store.chunk_index[0],
        )
        lanes = self.keys.flatten(1)[:, index.clamp(min=0)].masked_fill(index < 0, 0)  # [B, chunks, E]
        heads = (list(self.layout.value_heads), list(self.layout.window_heads))
        for row, place in enumerate((self.lengths - 1).tolist()):
            if place < 0:
                continue
            slot = place if place < self.sink_size else self.sink_size + (place - self.sink_size) % ring_size
            store.kept_keys[row, :, place] = lanes[row, :kept]
            store.window_keys[row, :, slot] = lanes[row, kept:]
            store.values[row, :, place] = self.values[row, heads[0], 0]
            store.window_values[row, :, slot] = self.values[row, heads[1], 0]
        return store

    def expected(self, softmax_scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return what the reference gives after the append, computed in `dtype` `[B, H, 1, D]`."""
        # The reference needs finite memory.
        store = self.appended().map_memory(lambda tensor: tensor.to(dtype).nan_to_num(nan=0.0))
        return decode_attention(
            self.query.to(dtype),
            store,
            self.lengths,
            self.pruned_lengths,
            layout=self.layout,
            sink_size=self.sink_size,
            num_slots=self.num_slots,
            max_length=store.kept_keys.shape[2],
            softmax_scale=softmax_scale,
        )


def make_case(
    channel_mask: torch.Tensor,
    rows: Sequence[tuple[int, int]],
    *,
    chunk_size: int,
    num_groups: int,
    sink_size: int,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> DecodeCase:
    """Make a decode step on random data.

    Args:
        channel_mask: Kept channels `[H_kv, D]`, bool.
        rows: Tokens and pruned ones among them, per row; what is not pruned must fit in the window.
        chunk_size: E.
        num_groups: Query heads per KV head, G.
        sink_size: Sink slots of the window.
        num_slots: All its slots; as many as the store has room for tokens are made.
        dtype: Of queries and cache.
        device: Where everything lies.
        seed: Of the random data.
    """
    num_heads, head_dim = channel_mask.shape
    batch_size = len(rows)
    widths = tuple(int(width) for width in channel_mask.sum(-1))
    layout = ChunkLayout(widths, head_dim, chunk_size)
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    lengths = torch.tensor([length for length, _ in rows], dtype=torch.int32, device=device)
    pruned_lengths = torch.tensor([pruned for _, pruned in rows], dtype=torch.int32, device=device)
    index = layout.chunk_index(order_channels(channel_mask.to(device))[None])
    capacity = max(int(lengths.max()), 1) + 7
    num_kept = layout.num_kept_chunks
    store = StoreTensors(
        random(batch_size, num_kept, capacity, chunk_size),
        random(batch_size, len(layout.value_heads), capacity, head_dim),
        random(batch_size, layout.num_dropped_chunks, min(num_slots, capacity), chunk_size),
        random(batch_size, len(layout.window_heads), min(num_slots, capacity), head_dim),
        index,
        torch.tensor(layout.head_table, dtype=torch.int32, device=device),
    )
    store.kept_keys.masked_fill_((index[0, :num_kept] < 0)[None, :, None, :], 0)
    store.window_keys.masked_fill_((index[0, num_kept:] < 0)[None, :, None, :], 0)
    before = (lengths - 1)[:, None]
    free = torch.arange(capacity, device=device) >= before
    tokens = window_tokens(lengths - 1, sink_size, num_slots, capacity)
    in_window = (tokens >= 0) & ((tokens < sink_size) | (tokens >= sink_size + pruned_lengths[:, None]))
    for tensor, unused in zip(store[:4], (free, free, ~in_window, ~in_window), strict=True):
        tensor.masked_fill_(unused[:, None, :, None], torch.nan)
    return DecodeCase(
        layout=layout,
        sink_size=sink_size,
        num_slots=num_slots,
        query=random(batch_size, num_heads * num_groups, 1, head_dim),
        keys=random(batch_size, num_heads, 1, head_dim),
        values=random(batch_size, num_heads, 1, head_dim),
        store=store,
        lengths=lengths,
        pruned_lengths=pruned_lengths,
    )


def run_case(kernels: DecodeKernels, case: DecodeCase, softmax_scale: float) -> torch.Tensor:
    """Append and attend by kernel; return the output `[B, H, 1, D]`. The case's store is left as it is."""
    store, sink_size = case.store.map_memory(torch.clone), case.sink_size
    kernels.append(case.keys, case.values, store, case.lengths, None, sink_size, case.num_slots)
    plan = kernels.plan(case.lengths, case.pruned_lengths, sink_size, case.num_slots)
    return kernels.attend(
        case.query,
        store,
        case.lengths,
        case.pruned_lengths,
        plan,
        sink_size=sink_size,
        num_slots=case.num_slots,
        softmax_scale=softmax_scale,
    )


def disagreement(kernels: DecodeKernels) -> float:
    """Return the largest error of kernels on small cases, relative to what is expected; inf for NaN."""
    case = _small_case(kernels.key)
    # Neither TF32 nor autocast, which a caller may have on, touches fp64.
    pairs = [(run_case(kernels, case, _SCALE), case.expected(_SCALE, torch.float64))]
    pairs += _run_glue(kernels, case)
    errors = torch.stack([(ours - expected).norm() / expected.norm() for ours, expected in pairs])
    return float(errors.nan_to_num(nan=torch.inf).max())


def in_parts(outputs: torch.Tensor) -> Product:
    """Return outputs `[B, 1, n]` as a product of which some blocks are cut in two."""
    steps, stretch, block_size = 3, 4, 64
    block = torch.arange(outputs.shape[-1], device=outputs.device) // block_size
    cut = (block * steps + steps - 1) // stretch > block * steps // stretch
    whole = outputs[:, 0].float()
    parts = [torch.where(cut, whole / 4, whole), torch.where(cut, whole * 0.75, torch.nan)]
    return Product(torch.stack(parts), steps, stretch, block_size)


def _run_glue(kernels: DecodeKernels, case: DecodeCase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what the kernels around attention give, and what is expected in fp64.

    Queries, keys and values of `case` are taken for projections, normed and rotated before they are appended.
    """
    batch_size, _, _, head_dim = case.query.shape
    dtype, device = case.query.dtype, case.query.device
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def normed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        states = states.double()
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + _EPS) * weight.double()

    def rotated(states: torch.Tensor) -> torch.Tensor:
        across = torch.cat([-states[..., head_dim // 2 :], states[..., : head_dim // 2]], dim=-1)
        return states * cos.double()[:, None] + across * sin.double()[:, None]

    angle = random(batch_size, 1, head_dim // 2).repeat(1, 1, 2).double()
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weights = random(head_dim), random(head_dim)
    query, keys = (
        rotated(normed(states, weight))
        for states, weight in zip((case.query, case.keys), weights, strict=True)
    )
    projected = torch.cat([case.query, case.keys, case.values], dim=1).view(batch_size, 1, -1)
    store = case.store.map_memory(torch.clone)
    ours = kernels.rope_append(
        in_parts(projected),
        cos,
        sin,
        (*weights, _EPS),
        store,
        case.lengths,
        None,
        case.sink_size,
        case.num_slots,
    )
    pairs = [(ours, query)]
    appended = replace(case, keys=keys.to(dtype)).appended()
    pairs += [
        (held.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0).double())
        for held, expected in zip(store[:4], appended[:4], strict=True)
    ]
    hidden, delta = random(batch_size, 1, _HIDDEN_SIZE), random(batch_size, 1, _HIDDEN_SIZE)
    weight = random(_HIDDEN_SIZE)
    summed = hidden.double() + delta.double()
    pairs += zip(
        kernels.add_norm(hidden, in_parts(delta), weight, _EPS), (summed, normed(summed, weight)), strict=True
    )
    pairs.append((kernels.add_norm(hidden, None, weight, _EPS)[1], normed(hidden, weight)))
    gate, up = delta.double().chunk(2, dim=-1)
    pairs.append((kernels.silu_mul(in_parts(delta)), torch.nn.functional.silu(gate) * up))
    matrix, bias = random(_NUM_OUTPUTS, _HIDDEN_SIZE), random(_NUM_OUTPUTS)
    for most_rows in kernels.product_rows:
        states = random(most_rows - 3, 1, _HIDDEN_SIZE)
        expected = torch.nn.functional.linear(states.double(), matrix.double(), bias.double())
        pairs.append((kernels.product(states, matrix, bias).outputs(), expected))
    return pairs


def _small_case(key: KernelKey) -> DecodeCase:
    spare = 3 if key.max_chunks > key.head_dim // key.chunk_size else 0
    half = key.head_dim // 2 // key.chunk_size * key.chunk_size
    widths = (0, key.chunk_size - spare, half + spare, key.head_dim)
    mask = torch.arange(key.head_dim).flip(0)[None] < torch.tensor(widths)[:, None]
    return make_case(
        mask,
        _ROWS,
        chunk_size=key.chunk_size,
        num_groups=key.num_groups,
        sink_size=_SINK_SIZE,
        num_slots=_NUM_SLOTS,
        dtype=key.dtype,
        device=key.device,
    )
