"""Decode kernels as they are found, compiled, launched and shown to torch; no device is needed for it."""

import contextlib
import importlib
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime import decode_kernels_leank, find_kernels_leank
from runtime.decode_kernels_leank import DecodeKernels, KernelKey, plan_tiles
from runtime.find_kernels_leank import find_kernels

SHAPE = {"head_dim": 128, "num_groups": 4, "chunk_size": 32, "max_chunks": 4}


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch):
    monkeypatch.setattr(find_kernels_leank, "_found", {})
    monkeypatch.setattr(find_kernels_leank.logger, "propagate", True)


def find(dtype=torch.bfloat16, device="cuda:0", **change):
    return find_kernels(torch.device(device), dtype, **{**SHAPE, **change})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "kernels serve bfloat16 and float16, not float32"),
        ({"chunk_size": 8}, "chunks of 16 or 32"),
        ({"num_groups": 32}, "at most 16 query heads"),
    ],
    ids=str,
)
def test_one_warning_names_what_no_kernel_serves(change, reason, monkeypatch, caplog):
    monkeypatch.setattr(find_kernels_leank.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert [find(**change), find(**change)] == [None, None]
    assert [reason in record.getMessage() for record in caplog.records] == [True]


@pytest.fixture
def makes(monkeypatch):
    """A GPU whose kernels are made at once; errors to end with, and keys of all made."""
    made = SimpleNamespace(keys=[], errors=[])

    def make(key):
        made.keys.append(key)
        time.sleep(0.02)  # so that threads meet
        if made.errors:
            raise made.errors.pop()
        return SimpleNamespace(key=key)

    monkeypatch.setattr(find_kernels_leank, "DecodeKernels", make)
    monkeypatch.setattr(find_kernels_leank, "disagreement", lambda kernels: 0.0)
    monkeypatch.setattr(find_kernels_leank.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


def test_kernels_are_made_once_also_for_threads_at_once(makes):
    found = []
    threads = [threading.Thread(target=lambda: found.append(find())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(makes.keys) == 1 and len(found) == 4
    assert all(kernels is found[0] is not None for kernels in found)


def test_out_of_memory_is_the_callers_and_does_not_last(makes, caplog):
    makes.errors.append(torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        find()
    assert find() is not None and not caplog.records


def test_another_failure_is_one_warning_and_lasts(makes, caplog):
    makes.errors.append(RuntimeError("nvcc: no such file"))
    assert [find(), find()] == [None, None]
    assert ["RuntimeError: nvcc: no such file" in record.getMessage() for record in caplog.records] == [True]


def test_the_cpu_decodes_in_plain_torch_without_a_warning(caplog):
    assert find(device="cpu") is None and not caplog.records


def test_the_plan_counts_every_row_by_itself():
    # A full sink, tile borders, a ring that is full, that has gone round, that wraps inside a tile.
    rows = [(1, 0), (8, 0), (9, 0), (64, 0), (65, 0), (88, 0), (72, 63), (73, 64), (137, 65), (500, 413)]
    sink, ring = 8, 80
    lengths, pruned = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    plan = plan_tiles(lengths, pruned, sink, sink + ring)
    assert plan.dtype == torch.int32 and plan[0].tolist() == [0, 0]
    for row, (length, pruned_length) in enumerate(rows):
        recent = list(range(sink + pruned_length, length))
        slots = [(token - sink) % ring for token in recent]
        runs = [min(length, sink), len(recent), 0]
        if slots and slots[-1] < slots[0]:
            runs[1:] = [slots.index(0), len(slots) - slots.index(0)]
        expected = [-(-pruned_length // 64), sum(-(-run // 64) for run in runs)]
        assert (plan[row + 1] - plan[row]).tolist() == expected


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc compiles the kernels for GPUs")
@pytest.mark.parametrize(
    ("generation", "instructions", "num_kernels", "num_overlapping"),
    [((9, 0), ("wgmma_ss", "tma_load"), 10, 9), ((8, 0), ("mma", "cp_async"), 6, 0)],
    ids=["Hopper", "Ampere"],
)
def test_what_decoding_launches_compiles_without_a_gpu(
    generation, instructions, num_kernels, num_overlapping, monkeypatch
):
    properties = SimpleNamespace(
        major=generation[0],
        minor=generation[1],
        multi_processor_count=4,
        shared_memory_per_multiprocessor=167936,
        shared_memory_per_block_optin=166912,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(decode_kernels_leank, "_kernels", [])
    tilelang = pytest.importorskip("tilelang")
    compile_, sources = tilelang.compile, []

    def compiled(function, **options):
        kernel = compile_(function, **options)
        sources.append(kernel.adapter.get_device_source())
        return kernel

    monkeypatch.setattr(tilelang, "compile", compiled)
    DecodeKernels(KernelKey(torch.device("cpu"), torch.bfloat16, 128, 4, 32, 4))
    assert len(sources) == num_kernels
    (attention,) = (source for source in sources if "leank_attention" in source)
    assert all(instruction in attention for instruction in instructions)
    # Launches overlap where the GPU has that.
    overlapping = [source for source in sources if "cudaGridDependencySynchronize" in source]
    assert len(overlapping) == num_overlapping


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc compiles the kernels for GPUs")
@pytest.mark.parametrize(("head_dim", "chunk_size"), [(64, 32), (96, 16), (128, 32), (256, 16)])
def test_heads_that_threads_do_not_fill_compile_without_a_gpu(head_dim, chunk_size):
    tilelang = pytest.importorskip("tilelang")
    from runtime.kernel_glue_leank import append_tokens, rope_append
    from runtime.kernel_leank import KernelShape

    shape = KernelShape(head_dim, 4, chunk_size, head_dim // chunk_size + 1, "bfloat16", num_stages=2)
    target = {"kind": "cuda", "arch": "sm_90a"}
    tilelang.compile(append_tokens(shape, overlap=True), target=target)
    kernel = tilelang.compile(rope_append(shape, overlap=True), target=target)
    assert "AllReduce<tl::SumOp, 128" in kernel.adapter.get_device_source()


def test_two_copies_of_the_runtime_keep_their_operators_apart(tmp_path, monkeypatch):
    name = "decode_kernels_leank"
    for copy in ("first_copy", "second_copy"):
        shutil.copytree(Path(decode_kernels_leank.__file__).parent, tmp_path / copy)
    monkeypatch.syspath_prepend(tmp_path)
    query = torch.ones(1, 2, 1, 64)
    rest = [torch.empty(0)] * 9
    modules = [importlib.import_module(f"{copy}.{name}") for copy in ("first_copy", "second_copy")]
    for number, module in enumerate(modules):
        kernels = SimpleNamespace(_launch_attend=lambda query, *_, number=number: query + number)
        module._kernels.append(kernels)
    assert [int(module._attend(0, query, *rest, 0, 8, 1.0)[0, 0, 0, 0]) for module in modules] == [1, 2]


def test_the_operators_have_true_schemas_and_shapes_without_data():
    kernels = SimpleNamespace(
        _launch_attend=lambda query, *_: query * 2,
        _launch_append=lambda keys, values, store, *_: store.kept_keys.add_(1),
    )
    decode_kernels_leank._kernels.append(kernels)
    handle = len(decode_kernels_leank._kernels) - 1
    tensors = [torch.zeros(2, 3) for _ in range(9)]
    checks = ("test_schema", "test_faketensor")
    query = torch.zeros(2, 4, 1, 64)
    torch.library.opcheck(
        decode_kernels_leank._attend, (handle, query, *tensors, 4, 8, 0.1), test_utils=checks
    )
    append = (handle, *tensors, None, 4, 8)
    torch.library.opcheck(decode_kernels_leank._append, append, test_utils=checks)


@pytest.mark.parametrize(
    ("device", "per_sm", "per_block"),
    [("H200", 233472, 232448), ("A100", 167936, 166912), ("L40S", 102400, 101376)],
)
def test_buffers_fit_in_shared_memory(device, per_sm, per_block):
    pytest.importorskip("tilelang")
    for head_dim, chunk_size, max_chunks in ((64, 32, 2), (96, 16, 7), (128, 32, 4), (128, 16, 9)):
        key = KernelKey(torch.device("cuda", 0), torch.bfloat16, head_dim, 4, chunk_size, max_chunks)
        shape, instances = DecodeKernels._fit(SimpleNamespace(key=key), per_sm, per_block)
        stage = 64 * (max_chunks * chunk_size + shape.value_size) * 2
        assert shape.num_stages >= 2
        assert shape.num_stages * stage <= per_block
        assert instances * (shape.num_stages * stage + 1024) <= per_sm
