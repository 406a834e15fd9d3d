"""Decode kernel lookup by device and shape, with a self-check against the reference before first use."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers.utils import logging as transformers_logging

from .constants_leank import Constants, centre
from .decode_kernels_leank import DecodeKernels
from .fp8_leank import as_bytes, quantise
from .kernel_key_leank import (
    KERNEL_DTYPES,
    MAX_DRAFT,
    TILE,
    KernelKey,
    Product,
    queries_at_once,
)
from .layout_leank import ChunkLayout, StoreTensors, order_channels
from .reference_leank import decode_attention
from .turns_leank import StoredRow, with_new

logger = transformers_logging.get_logger(__name__)

# The self-check. Tokens and pruned ones among them: nothing pruned, one tile of both kinds, pruned tiles too.
_ROWS = ((33, 0), (90, 15), (333, 260))
_SINK_SIZE = 8
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
    num_columns: int = 1,
    load_tokens: int = TILE,
    cache_dtype: torch.dtype | None = None,
    has_sinks: bool = False,
) -> DecodeKernels | None:
    """Return the kernels for a device, a dtype and a shape, None if plain torch must do.

    The first call for a shape compiles them, or loads them from TileLang's cache on disk, and holds them to
    the reference on a small case; if that fails, one warning says so. The arguments are a `KernelKey`'s, and
    the new tokens of a row, at most `MAX_DRAFT`.
    """
    if device.type != "cuda":
        return None
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    num_queries = queries_at_once(num_columns, num_groups, head_dim, device)
    sizes = (head_dim, num_groups, chunk_size, max_chunks, num_queries, load_tokens)
    key = KernelKey(device, dtype, *sizes, cache_dtype, has_sinks)
    if key not in _found:
        with _LOCK:
            if key not in _found:
                _found[key] = _make_kernels(key)
    return _found[key]


def _unsupported(key: KernelKey) -> str | None:
    """Return why no kernel can serve a shape, None if one can."""
    if key.dtype not in KERNEL_DTYPES:
        return f"kernels serve bfloat16 and float16, not {str(key.dtype).removeprefix('torch.')}"
    if key.cache_dtype == torch.uint8:
        return "no kernels serve an int4 cache"
    if key.cache_dtype not in (None, torch.float8_e4m3fn):
        return f"no kernels serve a cache of {str(key.cache_dtype).removeprefix('torch.')}"
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
    """One decode step on random data: a cache that lacks every row's new tokens, and these tokens.

    Attributes:
        layout: How channels are cut into chunks.
        sink_size: Tokens at the front that are never pruned.
        query: `[B, H, d, D]`.
        keys: New tokens `[B, H_kv, d, D]`, NaN at padding.
        values: `[B, H_kv, d, D]`.
        valid: Columns that are no padding `[B, d]`, bool; None if all are.
        store: K and V on shuffled pages, NaN where no token lies.
        seen: Tokens that a column sees, itself among them `[B, d]`, int32.
        pruned: Pruned ones among them `[B, d]`, int32.
        sinks: Logits of attention sinks `[H]`; None without any.
    """

    layout: ChunkLayout
    sink_size: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor | None
    store: StoreTensors
    seen: torch.Tensor
    pruned: torch.Tensor
    sinks: torch.Tensor | None = None

    def appended(self) -> StoreTensors:
        """Return the store with the new tokens in it, by plain indexing."""
        store = self.store.map_memory(lambda pool: as_bytes(pool).clone())
        kept, index = self.layout.num_kept_chunks, store.chunk_index
        page_size, window_size = store.kept_keys.shape[2], store.window_keys.shape[2]
        centred = centre(self.keys, None if store.key_mean is None else store.key_mean[:, :, None])
        keys, values = (
            states if scale is None else as_bytes(quantise(states, scale[:, :, None]))
            for states, scale in ((centred, store.key_scale), (self.values, store.value_scale))
        )
        for row, column in torch.ones_like(self.seen).nonzero().tolist():
            token = int(self.seen[row, column]) - 1
            if token < 0 or (self.valid is not None and not self.valid[row, column]):
                continue
            order = index[min(row, index.shape[0] - 1)]
            lanes = keys[row, :, column].flatten()[order.clamp(min=0)].masked_fill(order < 0, 0)
            if self.layout.value_heads:
                page, place = store.page_table[row, token // page_size], token % page_size
                store.kept_keys[page, :, place] = lanes[:kept]
                store.values[page, :, place] = values[row, list(self.layout.value_heads), column]
            if self.layout.num_dropped_chunks:
                page, place = store.window_table[row, token // window_size], token % window_size
                store.window_keys[page, :, place] = lanes[kept:]
                store.window_values[page, :, place] = values[row, list(self.layout.window_heads), column]
        return store.map_memory(lambda pool: pool.view(self.store.kept_keys.dtype))

    def expected(self, softmax_scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return what the reference gives after the append, computed in `dtype` `[B, H, d, D]`."""
        # The reference needs finite memory.
        store = self.appended().map_memory(lambda tensor: tensor.to(dtype).nan_to_num(nan=0.0))
        return decode_attention(
            self.query.to(dtype),
            store,
            self.seen,
            self.pruned,
            layout=self.layout,
            sink_size=self.sink_size,
            max_length=max(int(self.seen.max()), 1),
            softmax_scale=softmax_scale,
            sinks=self.sinks,
        )


def make_case(
    channel_mask: torch.Tensor,
    rows: Sequence[tuple[int, ...]],
    *,
    chunk_size: int,
    num_groups: int,
    sink_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    num_columns: int = 1,
    valid: torch.Tensor | None = None,
    page_sizes: tuple[int, int] = (TILE, TILE),
    cache_dtype: torch.dtype | None = None,
    has_sinks: bool = False,
) -> DecodeCase:
    """Make a decode step on random data, with a mean of keys and with scales of every row's own.

    Args:
        channel_mask: Kept channels `[H_kv, D]`, bool.
        rows: Per row tokens, new ones counted, and pruned ones among them: one number for all columns, or
            that of the first and that of the last.
        chunk_size: E.
        num_groups: Query heads per KV head, G.
        sink_size: Tokens at the front that are never pruned.
        dtype: Of queries and cache.
        device: Where everything lies.
        seed: Of the random data.
        num_columns: New tokens, d.
        valid: Columns that are no padding `[B, d]`, bool; None if all are.
        page_sizes: Tokens of a page, and of one of the window.
        cache_dtype: `torch.float8_e4m3fn` for a cache of it; None for `dtype`.
        has_sinks: Whether query heads have attention sinks.
    """
    num_heads, head_dim = channel_mask.shape
    batch_size, device = len(rows), torch.device(device)
    widths = tuple(int(width) for width in channel_mask.sum(-1))
    layout = ChunkLayout(widths, head_dim, chunk_size)
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def random_scale() -> torch.Tensor | None:
        if cache_dtype is None:
            return None
        size = (batch_size, num_heads, head_dim)
        return torch.randint(-8, -5, size, generator=generator, device=device).float().exp2()

    real = torch.ones(batch_size, num_columns, dtype=torch.bool) if valid is None else valid.cpu()
    lengths = torch.tensor([row[0] for row in rows])
    stored = (lengths - real.sum(1)).clamp(min=0)[:, None]
    seen = (lengths[:, None] - real.sum(1, keepdim=True) + real.cumsum(1)).clamp(min=0)
    first, last = (torch.tensor([row[place] for row in rows])[:, None] for place in (1, -1))
    pruned = first + (last - first) * torch.arange(num_columns) // max(num_columns - 1, 1)
    index = layout.chunk_index(order_channels(channel_mask.to(device))[None])
    num_kept = layout.num_kept_chunks
    memory: list[torch.Tensor] = []
    tables: list[torch.Tensor] = []
    for page_size, in_window in zip(page_sizes, (False, True), strict=True):
        num_entries = -(-max(int(lengths.max()), 1) // page_size)
        token = torch.arange(num_entries * page_size)
        used = (token < lengths[:, None]).expand(batch_size, -1)
        if in_window:
            used = used & ((token < sink_size) | (token >= sink_size + first))
        is_page = used.view(batch_size, num_entries, page_size).any(2)
        num_pages = int(is_page.sum()) + 2
        # Entries without a token name a page that holds none.
        table = torch.full((batch_size, num_entries), num_pages - 1, dtype=torch.int32)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed))
        table[is_page] = order[: num_pages - 2].to(torch.int32)
        free = torch.ones(num_pages, page_size, dtype=torch.bool)
        holds = (used & (token < stored)).view(batch_size, num_entries, page_size)
        free[table[is_page].long()] = ~holds[is_page]
        heads = layout.window_heads if in_window else layout.value_heads
        chunks = index[0, num_kept:] if in_window else index[0, :num_kept]
        keys = random(num_pages, len(chunks), page_size, chunk_size)
        keys.masked_fill_((chunks < 0)[None, :, None, :], 0)
        for pool in (keys, random(num_pages, len(heads), page_size, head_dim)):
            pool.masked_fill_(free.to(device)[:, None, :, None], torch.nan)
            memory.append(pool if cache_dtype is None else quantise(pool, torch.tensor(2.0**-6)))
        tables.append(table.to(device))
    table = torch.tensor(layout.head_table, dtype=torch.int32, device=device)
    padding = ~real.to(device)[:, None, :, None]
    key_mean = random(batch_size, num_heads, head_dim).float()
    constants = Constants(key_mean, random_scale(), random_scale())
    return DecodeCase(
        layout=layout,
        sink_size=sink_size,
        query=random(batch_size, num_heads * num_groups, num_columns, head_dim),
        keys=random(batch_size, num_heads, num_columns, head_dim).masked_fill(padding, torch.nan),
        values=random(batch_size, num_heads, num_columns, head_dim).masked_fill(padding, torch.nan),
        valid=valid,
        store=StoreTensors._make([*memory, index, table, *tables, *constants, None]),
        seen=seen.to(device, torch.int32),
        pruned=pruned.to(device, torch.int32),
        sinks=random(num_heads * num_groups) if has_sinks else None,
    )


def run_case(kernels: DecodeKernels, case: DecodeCase, softmax_scale: float) -> torch.Tensor:
    """Append and attend by kernel; return the output `[B, H, d, D]`. The case's store is left as it is."""
    store, sink_size = case.store.map_memory(torch.clone), case.sink_size
    plan = kernels.plan(case.seen, case.pruned, sink_size)
    kernels.append(case.keys, case.values, store, case.seen, case.valid)
    return kernels.attend(
        case.query,
        store,
        case.seen,
        case.pruned,
        plan,
        sink_size=sink_size,
        softmax_scale=softmax_scale,
        sinks=case.sinks,
    )


def disagreement(kernels: DecodeKernels) -> float:
    """Return the largest error of kernels on small cases, relative to what is expected; inf for NaN."""
    key = kernels.key
    with torch.device("cpu"):  # whatever torch's default device is
        several = _small_case(key, min(max(key.num_queries // key.num_groups, 1), MAX_DRAFT))
        one = _small_case(key, 1)
    # Neither TF32 nor autocast, which a caller may have on, touches fp64.
    pairs = [(run_case(kernels, several, _SCALE), several.expected(_SCALE, torch.float64))]
    pairs += _run_glue(kernels, several)
    if key.load_tokens == TILE:
        pairs += _copy_rows(kernels, one)
    errors = torch.stack([(ours - expected).norm() / expected.norm() for ours, expected in pairs])
    return float(errors.nan_to_num(nan=torch.inf).max())


def _copy_rows(kernels: DecodeKernels, case: DecodeCase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rows' K and V laid out densely by the kernel and by plain torch."""
    store, none = case.appended(), case.keys[:1, :, :0]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    spans = torch.stack([case.seen[:, -1], case.pruned[:, 0]], dim=1).tolist()
    plain = store.map_memory(lambda pool: pool.to(case.keys.dtype))._replace(key_scale=None, value_scale=None)
    for row, (seen, pruned) in enumerate(spans):
        # The first of what is yielded is what the kernel copies.
        (heads, *ours), (_, *expected) = (
            next(with_new([StoredRow(held, case.layout, row, seen, pruned, case.sink_size)], none, none, by))
            for held, by in ((store, kernels), (plain, None))
        )
        for made, states, scale in zip(ours, expected, (store.key_scale, store.value_scale), strict=True):
            pairs.append((made, states if scale is None else states * scale[row, heads]))
    return pairs


def in_parts(outputs: torch.Tensor) -> Product:
    """Return outputs `[T, n]` as a product of which some blocks are cut in two."""
    steps, stretch = 3, 4
    block = torch.arange(outputs.shape[-1], device=outputs.device) // 64
    cut = (block * steps + steps - 1) // stretch > block * steps // stretch
    whole = outputs.float()
    parts = [torch.where(cut, whole / 4, whole), torch.where(cut, whole * 0.75, torch.nan)]
    return Product(torch.stack(parts), steps, stretch)


def _run_glue(kernels: DecodeKernels, case: DecodeCase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what the kernels around attention give, and what is expected in fp64.

    Queries, keys and values of `case` are taken for projections, normed and rotated before they are appended.
    """
    batch_size, _, num_columns, head_dim = case.query.shape
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

    angle = random(batch_size, num_columns, head_dim // 2).repeat(1, 1, 2).double()
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weights = random(head_dim), random(head_dim)
    query, keys = (
        rotated(normed(states, weight))
        for states, weight in zip((case.query, case.keys), weights, strict=True)
    )
    projected = (
        torch.cat([case.query, case.keys, case.values], dim=1).transpose(1, 2).flatten(2).flatten(0, 1)
    )
    store = case.store.map_memory(torch.clone)
    ours = kernels.rope_append(in_parts(projected), cos, sin, (*weights, _EPS), store, case.seen, None)
    pairs = [(ours, query)]
    appended = replace(case, keys=keys.to(dtype)).appended()
    pairs += [
        (held.to(dtype).nan_to_num(nan=0.0), expected.double().nan_to_num(nan=0.0))
        for held, expected in zip(store[:4], appended[:4], strict=True)
    ]
    hidden, delta = random(batch_size, _HIDDEN_SIZE), random(batch_size, _HIDDEN_SIZE)
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
        states = random(most_rows - 3, _HIDDEN_SIZE)
        expected = torch.nn.functional.linear(states.double(), matrix.double(), bias.double())
        pairs.append((kernels.product(states, matrix, bias).outputs(), expected))
    return pairs


def _small_case(key: KernelKey, num_columns: int) -> DecodeCase:
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
        dtype=key.dtype,
        device=key.device,
        num_columns=num_columns,
        page_sizes=(TILE, TILE) if key.load_tokens == TILE else (3 * key.load_tokens, key.load_tokens),
        cache_dtype=key.cache_dtype,
        has_sinks=key.has_sinks,
    )
