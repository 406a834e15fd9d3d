"""Kernels that copy tokens to pages and back, on TileLang's CPU target, against plain torch."""

import shutil

import pytest
import torch

pytest.importorskip("tilelang")

import tilelang

from leank_convert._runtime.find_kernels_leank import find_kernels
from leank_convert._runtime.fp8_leank import FP8, as_bytes
from leank_convert._runtime.kernel_leank import KernelShape
from leank_convert.vllm.attention import append_by_slot
from leank_convert.vllm.page_copies import PageKernels, find_fault, find_page_kernels, gather_run
from leank_convert.vllm.page_kernels import append_slots, gather_rows
from leank_convert.vllm.rows import Prompt, PromptRun
from tests.runtime.cpu_kernels import CpuKernels, compiled_for_cpu
from tests.vllm.stores import FILL, make_store

pytestmark = pytest.mark.usefixtures("no_device_to_choose")
D = 32


class CpuPageKernels(PageKernels):
    """The kernels on the CPU, which knows no strides: they are given copies, which are copied back."""

    def __init__(self, chunk_size=16, max_chunks=3, is_fp8=False, value_chunk=D):
        sizes, cache_dtype = (D, 2, chunk_size, max_chunks, 8), FP8 if is_fp8 else None
        options = {"cache_dtype": cache_dtype, "value_chunk": value_chunk}
        shape = KernelShape(torch.device("cpu"), torch.float32, *sizes, **options)
        self.kernels = CpuKernels(shape, 1)
        self._append, self._gather = (self._with_copies(make, shape) for make in (append_slots, gather_rows))

    @staticmethod
    def _with_copies(make, shape):
        def call(*given):
            copies = [part.contiguous() if isinstance(part, torch.Tensor) else part for part in given]
            before = [copy.clone() if isinstance(copy, torch.Tensor) else copy for copy in copies]
            compiled_for_cpu(make, shape)(*copies)
            for part, copy, old in zip(given, copies, before, strict=True):
                # What was not written may be a view of what was.
                if copy is not part and not torch.equal(copy, old):
                    part.copy_(copy)

        return call


def slots_of(table, page_size, row, tokens):
    return table[row, tokens // page_size].long() * page_size + tokens % page_size


CASES = [
    ((0, 16, 32), (16, 32), False, None),
    ((0, 5, 20, 32), (48, 16), False, None),
    ((0, 0), (32, 32), False, None),
    ((32, 32), (16, 64), False, None),
    ((0, 16, 32), (32, 48), True, None),
    ((0, 5, 20, 32), (48, 16), False, (0, 16, 0, 32)),
    ((16, 32), (16, 64), False, (0, 0)),
    ((32, 32), (48, 80), False, (16, 0)),
    ((0, 16, 32), (32, 48), True, (0, 24, 8)),
]


@pytest.mark.parametrize(
    ("widths", "page_sizes", "is_fp8", "value_widths", "is_centred"),
    [(*case, True) for case in CASES] + [(*CASES[number], False) for number in (0, 4, 5)],
    ids=str,
)
def test_tokens_go_where_their_slots_say_and_come_back(widths, page_sizes, is_fp8, value_widths, is_centred):
    """The middle of one row, a single token of another, the start of a third, and padding among them."""
    options = {"is_fp8": is_fp8, "is_centred": is_centred, "value_widths": value_widths}
    layout, _, store = make_store(widths, D, page_sizes, chunk_size=16, **options)
    copies = CpuPageKernels(is_fp8=is_fp8, value_chunk=layout.value_chunk)
    parts = [(0, torch.arange(0, 90)), (2, torch.arange(0, 1)), (1, torch.arange(0, 70))]
    nowhere = torch.full((3,), -1)
    slots, window_slots = (
        torch.cat([*(slots_of(table, size, *part) for part in parts), nowhere])
        for table, size in zip((store.page_table, store.window_table), page_sizes, strict=True)
    )
    keys, values = torch.randn(2, len(slots), len(widths), D, generator=torch.Generator().manual_seed(1))
    expected = store.map_memory(torch.clone)
    copies.append(keys, values, store, slots, window_slots)
    append_by_slot(keys, values, expected, layout, slots, window_slots)
    for ours, others in zip(store[:4], expected[:4], strict=True):
        assert torch.equal(as_bytes(ours)[1:], as_bytes(others)[1:])
        assert (ours[0].float() == FILL).all(), "page 0 is nobody's"
    # In another order, one of them in part, tables of no meaning behind what they have.
    store.page_table[0, -(-90 // page_sizes[0]) :] = 2**30
    store.window_table[0, -(-90 // page_sizes[1]) :] = -(2**30)
    lengths = {1: 65, 0: 90, 2: 1}
    starts = torch.tensor([0, *lengths.values()]).cumsum(0).to(torch.int32)
    run = PromptRun(
        tuple(Prompt(request, 0, 1, length) for request, length in lengths.items()),
        starts,
        starts,
        torch.tensor(list(lengths), dtype=torch.int32),
        *(slice(0, 3), 1, 90, 156),
    )
    ours = gather_run(copies, store, layout, run, torch.float32)
    others = gather_run(None, store, layout, run, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(ours, others, strict=True))
    if not is_fp8:
        mean = store.key_mean if is_centred else 0
        assert torch.equal(ours[0][starts[1] : starts[2]], (keys[:90] - mean))
        assert torch.equal(ours[1][: starts[1]], values[91 : 91 + 65])


@pytest.mark.parametrize(
    ("chunks", "value_chunk", "is_fp8"),
    [((16, 3), D, False), ((16, 2), D, True), ((8, 4), 16, True)],
    ids=str,
)
def test_the_check_on_first_use_is_exact_and_notices_either_kernel(chunks, value_chunk, is_fp8):
    copies = CpuPageKernels(*chunks, is_fp8, value_chunk)
    with torch.device("meta"):
        assert not find_fault(copies)
    for name in ("_append", "_gather"):
        copies = CpuPageKernels(*chunks, is_fp8, value_chunk)
        setattr(copies, name, lambda *given: None)
        assert find_fault(copies)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc compiles the kernels for GPUs")
@pytest.mark.parametrize("value_chunk", [128, 32])
def test_pages_are_read_and_written_by_16_bytes(value_chunk):
    shape = KernelShape(torch.device("cuda"), torch.bfloat16, 128, 4, 32, 4, 8, value_chunk=value_chunk)
    append, gather = (
        tilelang.compile(make(shape), target={"kind": "cuda", "arch": "sm_90a"}).get_kernel_source()
        for make in (append_slots, gather_rows)
    )
    assert "*(uint4*)(values" in append and "*(uint2*)(kept_keys" in append
    assert "*(uint4*)(dense_keys" in gather and "= *(uint4*)(kept_keys" in gather


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=["as they come", "fp8"])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, (128, 32, 4, 128)),
        (torch.bfloat16, (128, 32, 4, 64)),
        (torch.float16, (80, 16, 6, 80)),
    ],
)
def test_on_a_gpu_they_are_exact(dtype, sizes, cache_dtype):
    shape = dict(zip(("head_dim", "chunk_size", "max_chunks", "value_chunk"), sizes, strict=True))
    options = {"num_groups": 4, "num_columns": 32, "has_glue": False, "has_turns": False}
    kernels = find_kernels(torch.device("cuda"), dtype, cache_dtype=cache_dtype, **shape, **options)
    assert find_page_kernels(kernels) is not None
