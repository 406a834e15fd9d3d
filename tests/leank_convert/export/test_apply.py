import errno
import os
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from leank_convert.export import apply
from leank_convert.export.apply import write_shard
from leank_convert.export.plan import TensorEdit
from leank_convert.safetensors_file import read_header
from tests.checks import refusal

ORDER = (2, 0, 1)


@pytest.fixture
def tensors():
    return {
        "rows": torch.rand(9, 5),
        "columns": torch.rand(7, 12).to(torch.bfloat16),
        "bias": torch.rand(6).to(torch.float16),
        "kept": torch.rand(4, 3),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 2),
        "odd": torch.arange(5, dtype=torch.uint8),
    }


ROWS = dict.fromkeys(("rows", "bias", "elsewhere"), TensorEdit(0, ORDER))
EDITS = {**ROWS, "columns": TensorEdit(1, ORDER)}


def permute(tensors):
    order = list(ORDER)
    return {
        **tensors,
        "rows": tensors["rows"].view(3, 3, 5)[order].view(9, 5),
        "columns": tensors["columns"].view(7, 3, 4)[:, order].reshape(7, 12),
        "bias": tensors["bias"].view(3, 2)[order].view(6),
    }


def run(tmp_path, tensors):
    save_file(tensors, tmp_path / "in.safetensors")
    source = read_header(tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    write_shard(source, out, edits=EDITS, metadata={"format": "pt"})
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    return load_file(tmp_path / "out.safetensors")


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name


@pytest.mark.parametrize("buffer", [1, 60, 1 << 20])
def test_rows_and_columns_are_permuted_whatever_fits_the_buffer(buffer, tmp_path, tensors, monkeypatch):
    monkeypatch.setattr(apply, "_BUFFER_BYTES", buffer)
    assert_equal(run(tmp_path, tensors), permute(tensors))


@pytest.mark.parametrize("copies", [0, 3])
def test_a_kernel_that_cannot_copy_is_made_do_without(copies, tmp_path, tensors, monkeypatch):
    calls = []
    real = os.copy_file_range

    def refuse(source, target, count, **options):
        calls.append(count)
        if len(calls) > copies:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(source, target, max(1, count // 2), **options)

    monkeypatch.setattr(apply, "_BUFFER_BYTES", 7)
    monkeypatch.setattr("os.copy_file_range", refuse)
    assert_equal(run(tmp_path, tensors), permute(tensors))
    assert calls


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_source_that_shrinks_under_the_export_is_an_error(in_kernel, tmp_path, tensors, monkeypatch):
    error = OSError(errno.EXDEV, "Invalid cross-device link")
    if not in_kernel:
        monkeypatch.setattr("os.copy_file_range", Mock(side_effect=error))
    save_file(tensors, tmp_path / "in.safetensors")
    source = read_header(tmp_path / "in.safetensors")
    os.truncate(source.path, source.data_start + 10)
    out = tmp_path / "out.safetensors"
    with refusal("became shorter while it was read"):
        write_shard(source, out, edits=EDITS, metadata={})
