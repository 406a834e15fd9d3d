"""Copies between pages and dense K and V: launch of `page_kernels`, and their check against plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from leank_convert._runtime.decode_kernels_leank import DecodeKernels
from leank_convert._runtime.find_kernels_leank import make_checked
from leank_convert._runtime.fp8_leank import FP8, as_bytes
from leank_convert._runtime.kernel_key_leank import KernelKey
from leank_convert._runtime.layout_leank import ChunkLayout, order_channels
from leank_convert._runtime.stored_leank import StoreTensors
from leank_convert.vllm.attention import append_by_slot, gather_tokens
from leank_convert.vllm.pages import Numbers, numbers_of, view_layer
from leank_convert.vllm.rows import PromptRun

# The check's pages, of two sizes, and its rows: one token, pages that end within a tile, and tiles in a page.
_PAGE_SIZES, _LENGTHS = (48, 80), (1, 77, 300)


class PageKernels:
    """The compiled kernels for the device and shape of some decode kernels."""

    def __init__(self, kernels: DecodeKernels) -> None:
        """Compile, or load from TileLang's cache on disk."""
        from leank_convert.vllm.page_kernels import compile_page_kernels

        self.kernels = kernels
        self._append, self._gather = compile_page_kernels(kernels.key, kernels.arch)

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        store: StoreTensors,
        slots: torch.Tensor,
        window_slots: torch.Tensor,
    ) -> None:
        """Write tokens to both groups' pages, in place.

        Args:
            keys: `[T, H_kv, D]`; tokens may be strided.
            values: `[T, H_kv, D]`; the same.
            store: What they are written to.
            slots: Page times P plus place of each token `[T]`, int64; of padding -1.
            window_slots: The same of the window's pages.
        """
        *memory, _, _, key_scale, value_scale = self.kernels.arguments(store)
        states, mean = (_as_rows(keys), _as_rows(values)), self.kernels.mean_of(store)
        with torch.cuda.device(keys.device):
            self._append(*states, *memory, key_scale, value_scale, mean, slots, window_slots)

    def gather(
        self, store: StoreTensors, requests: torch.Tensor, starts: torch.Tensor, longest: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put K and V of requests' first tokens together, all whole, each `[num_tokens, H_kv, D]`.

        Args:
            store: What holds them.
            requests: Rows of the tables `[n]`, int32.
            starts: First token of each in the result, and one past the last `[n + 1]`, int32.
            longest: Most tokens of one.
            num_tokens: Tokens of all.
        """
        key = self.kernels.key
        shape = (2, num_tokens, store.head_table.shape[0] - 1, key.head_dim)
        dense = torch.empty(shape, dtype=key.dtype, device=requests.device)
        with torch.cuda.device(dense.device):
            self._gather(*self.kernels.arguments(store), requests, starts, *dense, longest)
        return dense[0], dense[1]


def gather_run(
    copies: PageKernels | None, store: StoreTensors, layout: ChunkLayout, run: PromptRun, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put K and V of a run's prompts together, one behind the other, each `[num_keys, H_kv, D]`."""
    if copies is not None:
        return copies.gather(store, run.requests, run.key_starts, run.longest_keys, run.num_keys)
    rows = [gather_tokens(store, layout, part.request, part.num_tokens, dtype) for part in run.parts]
    keys, values = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return keys, values


def _as_rows(states: torch.Tensor) -> torch.Tensor:
    """Return `[T, H_kv, D]` as kernels take it: only tokens may be strided, from 16 bytes to 16 bytes."""
    _, _, head_dim = states.shape
    aligned = states.stride(0) % 8 == 0 and states.storage_offset() % 8 == 0
    return states if aligned and states.stride()[1:] == (head_dim, 1) else states.contiguous()


@functools.cache
def find_page_kernels(kernels: DecodeKernels | None) -> PageKernels | None:
    """Return the kernels beside decode kernels, None if plain torch must do.

    They are compiled, and held to plain torch, when they are first asked for; if that fails, one warning says
    so.
    """
    if kernels is None:
        return None
    told = "Kernels that copy prompts to pages are not used, plain torch is slower"
    return make_checked(functools.partial(PageKernels, kernels), find_fault, told)


def find_fault(copies: PageKernels) -> str:
    """Look whether tokens arrive in pages, and come back, as by plain torch; return what is wrong."""
    key = copies.kernels.key
    generator = torch.Generator(key.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=key.device).to(key.dtype)

    with torch.device("cpu"):  # whatever torch's default device is
        layout, store, slots, window_slots = _make_store(key, random)
        # K beside V, as a projection leaves them.
        keys, values = random(len(slots), 2, len(layout.widths), key.head_dim).unbind(1)
        expected = store.map_memory(torch.clone)
        copies.append(keys, values, store, slots, window_slots)
        append_by_slot(keys, values, expected, layout, slots, window_slots)
        pools = zip(store[:4], expected[:4], strict=True)
        pairs = [(as_bytes(one)[1:], as_bytes(other)[1:]) for one, other in pools]  # page 0 is nobody's
        starts = torch.tensor([0, *accumulate(_LENGTHS)], dtype=torch.int32)
        requests = torch.arange(len(_LENGTHS), dtype=torch.int32).to(key.device)
        ours = copies.gather(expected, requests, starts.to(key.device), max(_LENGTHS), sum(_LENGTHS))
        rows = [gather_tokens(expected, layout, row, count, key.dtype) for row, count in enumerate(_LENGTHS)]
        pairs += zip(ours, (torch.cat(parts) for parts in zip(*rows, strict=True)), strict=True)
    return "" if all(torch.equal(one, other) for one, other in pairs) else "they disagree with plain torch"


def _make_store(
    key: KernelKey, random: Callable[..., torch.Tensor]
) -> tuple[ChunkLayout, StoreTensors, torch.Tensor, torch.Tensor]:
    """Make pages for some rows, of heads of several widths, and the slots of their tokens and of padding."""
    head_dim, size, device = key.head_dim, key.chunk_size, key.device
    spare = 3 if key.max_chunks > head_dim // size else 0
    widths = (0, size - spare, head_dim // 2 // size * size + spare, head_dim)
    values = (0, key.value_chunk, 0, head_dim) if key.value_chunk < head_dim else None
    layout = ChunkLayout(widths, head_dim, size, values, key.value_chunk)
    mask = torch.arange(head_dim).flip(0) < torch.tensor(widths)[:, None]
    dtype = FP8 if key.is_fp8 else key.dtype
    pools, tables, slots = [], [], []
    for page_size, numbers in zip(_PAGE_SIZES, numbers_of(layout), strict=True):
        counts = [-(-length // page_size) for length in _LENGTHS]
        pages = (sum(counts) - torch.arange(sum(counts), dtype=torch.int32)).split(counts)
        token = torch.cat([torch.arange(length) for length in _LENGTHS])
        page = torch.cat([own[torch.arange(n) // page_size] for own, n in zip(pages, _LENGTHS, strict=True)])
        own = page.long() * page_size + token % page_size
        slots.append(torch.cat([own, torch.tensor([-1, -1])]).to(device))
        tables.append(pad_sequence(pages, batch_first=True).to(device))
        pools.append(torch.zeros(sum(counts) + 1, 1, page_size, numbers, dtype=dtype, device=device))
    scales = [torch.full((1, len(widths), head_dim), 2.0**power).to(device) for power in (-6, -5)]
    store = StoreTensors(
        *view_layer(pools[0], pools[1], layout, Numbers(0, 0)),
        layout.chunk_index(order_channels(mask)[None]).to(device),
        torch.tensor(layout.head_table, dtype=torch.int32).to(device),
        tables[0],
        tables[1],
        random(1, len(widths), head_dim).float(),
        scales[0] if key.is_fp8 else None,
        scales[1] if key.is_fp8 else None,
    )
    return layout, store, slots[0], slots[1]
