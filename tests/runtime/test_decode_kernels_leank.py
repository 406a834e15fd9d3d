"""When kernels are found, once and for all, and when the reason why not is told; without a device."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from runtime import decode_kernels_leank
from runtime.decode_kernels_leank import find_kernels

SHAPE = {"head_dim": 128, "num_groups": 4, "chunk_size": 32, "max_chunks": 4}


@pytest.fixture
def made(monkeypatch):
    """Kernels made so far, on a device that could have them; `made.ends`: what the next end with."""
    made = SimpleNamespace(keys=[], ends=[])

    def make(key):
        made.keys.append(key)
        time.sleep(0.02)
        if made.ends:
            raise made.ends.pop()
        return SimpleNamespace(key=key)

    monkeypatch.setattr(decode_kernels_leank, "_found", {})
    monkeypatch.setattr(decode_kernels_leank, "DecodeKernels", make)
    monkeypatch.setattr(decode_kernels_leank, "disagreement", lambda kernels: 0.0)
    monkeypatch.setattr(decode_kernels_leank.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(decode_kernels_leank.logger, "propagate", True)
    return made


def find(dtype=torch.bfloat16, device="cuda:0", **change):
    return find_kernels(torch.device(device), dtype, **{**SHAPE, **change})


def test_kernels_are_made_once_also_for_threads_at_once(made):
    found = []
    threads = [threading.Thread(target=lambda: found.append(find())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made.keys) == 1
    assert len(found) == 4 and all(kernels is found[0] is not None for kernels in found)


def test_out_of_memory_is_the_callers_and_does_not_last(made, caplog):
    made.ends.append(torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        find()
    assert find() is not None and not caplog.records


def test_another_failure_is_told_once(made, caplog):
    made.ends.append(RuntimeError("nvcc: no such file"))
    assert [find(), find()] == [None, None]
    assert ["RuntimeError: nvcc: no such file" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "kernels serve bfloat16 and float16, not float32"),
        ({"chunk_size": 8}, "chunks of 16 or 32"),
        ({"num_groups": 32}, "at most 16 query heads"),
    ],
    ids=str,
)
def test_what_no_kernel_serves_is_told_once(change, reason, made, caplog):
    assert [find(**change), find(**change)] == [None, None]
    assert [reason in record.getMessage() for record in caplog.records] == [True] and not made.keys


def test_the_cpu_decodes_in_plain_torch_without_a_word(made, caplog):
    assert find(device="cpu") is None and not caplog.records
