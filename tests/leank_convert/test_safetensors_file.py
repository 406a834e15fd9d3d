import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leank_convert.errors import LeanKError
from leank_convert.safetensors_file import encode_header, read_header
from tests.checks import refused


def file_of(header, data=b"", *, claim=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if claim is None else claim).to_bytes(8, "little") + text + data


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_headers_of_the_safetensors_package_are_read(tmp_path):
    tensors = {
        "b": torch.rand(3, 5),
        "a": torch.rand(7).to(torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / "f.safetensors", {"format": "pt", "note": "x"})
    header = read_header(tmp_path / "f.safetensors")
    assert header.metadata == {"format": "pt", "note": "x"}
    assert {name: info.shape for name, info in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    content = (tmp_path / "f.safetensors").read_bytes()
    info = header.tensors["b"]
    raw = content[header.data_start + info.start : header.data_start + info.stop]
    assert raw == tensors["b"].numpy().tobytes()
    assert header.data_start + header.num_data_bytes == len(content)


def test_the_safetensors_package_reads_our_headers(tmp_path):
    values, mask = torch.rand(2, 3), torch.tensor([[True], [False]])
    header = encode_header(
        [("naïve", "F32", (2, 3), 24), ("mask", "BOOL", (2, 1), 2)], {"format": "pt", "x": '"y"\n'}
    )
    (tmp_path / "f.safetensors").write_bytes(header + values.numpy().tobytes() + mask.numpy().tobytes())
    assert len(header) % 8 == 0
    read = load_file(tmp_path / "f.safetensors")
    assert read["naïve"].equal(values) and read["mask"].equal(mask)
    assert read_header(tmp_path / "f.safetensors").metadata == {"format": "pt", "x": '"y"\n'}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated or damaged"),
        (file_of({"a": entry([2], 0, 8)}, b"1234567"), "file not fully covered"),
        (file_of({"a": entry([1], 4, 8)}, b"12345678"), "invalid offset for tensor `a`"),
        (file_of(b"{}", claim=2**63), "is truncated or damaged"),
        (file_of(b" " * (16 << 20) + b"{}"), "is none of a model's weights"),
        (file_of(b'{"__metadata__": {}, "__metadata__": {}}'), "duplicate field `__metadata__`"),
        (file_of({"": entry([1], 0, 4)}, b"1234"), "'' is not a valid tensor name"),
    ],
)
def test_damaged_and_absurd_files_are_refused_in_a_sentence(tmp_path, content, message):
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    refused(read_header, path, message)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "f.safetensors")
    for path in (tmp_path / "f.safetensors", Path("/dev/zero"), tmp_path):
        with pytest.raises(LeanKError, match="not a file"):
            read_header(path)
