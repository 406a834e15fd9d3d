"""Decode kernels as they are planned and compiled; no device is needed for it."""

import itertools
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from runtime.decode_kernels_leank import DecodeKernels
from runtime.fp8_leank import FP8
from runtime.kernel_key_leank import KernelKey

ALONE = {"has_glue": False, "has_turns": False}  # attention without what is around it


@pytest.mark.parametrize(
    ("per_sm", "per_block", "queries"),
    [(233472, 232448, 64), (167936, 166912, 64), (102400, 101376, 32)],
    ids=["H200", "A100", "L40S"],
)
def test_buffers_fit_in_shared_memory(per_sm, per_block, queries):
    pytest.importorskip("tilelang")
    sizes = (
        (64, 32, 2, 64),
        (64, 16, 4, 16),
        (96, 16, 7, 96),
        (128, 32, 4, 128),
        (128, 16, 9, 128),
        (128, 32, 4, 64),
    )
    for (head_dim, chunk_size, max_chunks, chunk), count in itertools.product(sizes, (8, queries)):
        shape = (head_dim, 4, chunk_size, max_chunks, count)
        key = KernelKey(torch.device("cuda", 0), torch.bfloat16, *shape, value_chunk=chunk)
        shape = DecodeKernels.fit(SimpleNamespace(key=key), per_sm, per_block)
        stage = 64 * (max_chunks * chunk_size + shape.value_size) * 2
        assert shape.num_stages >= 2
        assert shape.num_stages * stage <= per_block
        assert shape.num_instances * (shape.num_stages * stage + 1024) <= per_sm


def ask_nvcc(source, paths):
    """Return what nvcc says of a kernel for Hopper, with TileLang's headers."""
    headers = [f"-I{path}" for path in (paths.TILELANG_TEMPLATE_PATH, paths.CUTLASS_INCLUDE_DIR)]
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", *headers, "-x", "cu", "-o", os.devnull, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc compiles the kernels for GPUs")
@pytest.mark.parametrize(
    ("generation", "instructions", "num_kernels", "num_overlapping", "change"),
    [
        ((9, 0), ("wgmma_ss", "tma_load"), 15, 12, {}),
        ((9, 0), ("wgmma_ss", "tma_load"), 13, 12, {"has_turns": False}),
        ((9, 0), ("wgmma_ss", "tma_load"), 3, 2, {**ALONE, "value_chunk": 64}),
        ((9, 0), ("wgmma_rs", "tma_load"), 3, 2, {**ALONE, "value_chunk": 32, "cache_dtype": FP8}),
        ((8, 0), ("mma", "cp_async_gs"), 7, 0, {"value_chunk": 64}),
    ],
    ids=["Hopper", "without turns", "attention alone, V in chunks", "the same in FP8", "Ampere, V in chunks"],
)
def test_what_decoding_launches_compiles_without_a_gpu(
    generation, instructions, num_kernels, num_overlapping, change, monkeypatch
):
    major, minor = generation
    memory = {"shared_memory_per_multiprocessor": 167936, "shared_memory_per_block_optin": 166912}
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=4, **memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    tilelang = pytest.importorskip("tilelang")
    compile_, sources = tilelang.compile, []

    def compiled(function, **options):
        kernel = compile_(function, **options)
        sources.append(kernel.adapter.get_device_source())
        return kernel

    monkeypatch.setattr(tilelang, "compile", compiled)
    DecodeKernels(KernelKey(torch.device("cpu"), torch.bfloat16, 128, 4, 32, 4, 8, **change))
    assert len(sources) == num_kernels
    (attention,) = (source for source in sources if "leank_attention" in source)
    assert all(instruction in attention for instruction in instructions)
    if generation == (9, 0):  # ptxas says so where a product has to wait for each of its instructions
        assert "wgmma.mma_async instructions are serialized" not in ask_nvcc(attention, tilelang.env)
    # Launches overlap where the GPU has that.
    assert len([source for source in sources if "cudaGridDependencySynchronize" in source]) == num_overlapping
