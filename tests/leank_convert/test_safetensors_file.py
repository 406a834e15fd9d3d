import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from leank_convert.errors import LeanKError
from leank_convert.safetensors_file import DTYPE_BITS, encode_header, read_header


def write(path: Path, header: object, data: bytes = b"", *, claim: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if claim is None else claim).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[Any], start: Any, stop: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_headers_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
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


def test_the_safetensors_package_reads_our_headers(tmp_path: Path) -> None:
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
    ("header", "data", "message"),
    [
        ({"a": entry([2], 0, 8)}, b"1234567", "its header promises"),
        ({"a": entry([2], 0, 8)}, b"123456789", "its header promises"),
        ({"a": entry([3], 0, 8)}, b"12345678", "of shape [3] and dtype F32 has 8 bytes, not 12"),
        ({"a": entry([1], 4, 8)}, b"12345678", "`a` begins at byte 4, not 0"),
        ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"1234", "`b` begins at byte 0, not 4"),
        ({"a": entry([1], 4, 0)}, b"1234", "`a` begins at byte 4"),
        ({"a": entry([1], 0, "4")}, b"1234", "cannot be parsed"),
        ({"a": entry([-1], 0, 4)}, b"1234", "cannot be parsed"),
        ({"a": {"dtype": "F32"}}, b"", "cannot be parsed"),
        ({"a": 3}, b"", "cannot be parsed"),
        ([1, 2], b"", "cannot be parsed"),
        (b"{", b"", "cannot be parsed"),
        (b"\xff\xfe{}", b"", "cannot be parsed"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    path = write(tmp_path / "f.safetensors", header, data)
    with pytest.raises(LeanKError, match=re.escape(message)) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("claim", [3, 10**6, 2**63])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, claim: int) -> None:
    path = write(tmp_path / "f.safetensors", b"{}", claim=claim)
    with pytest.raises(LeanKError, match=f"its header claims {claim} bytes, the file has 10"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\1\0\0"])
def test_files_too_short_for_a_header_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.safetensors").write_bytes(content)
    with pytest.raises(LeanKError, match="truncated or damaged"):
        read_header(tmp_path / "f.safetensors")


def test_known_dtypes_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    path = write(tmp_path / "f.safetensors", {"a": entry([0], 0, 0, "?")})
    with pytest.raises(SafetensorError) as caught, safe_open(path, "pt"):
        pass
    _, _, listed = str(caught.value).partition("expected one of")
    known = re.findall(r"`(\w+)`", listed)
    assert {"BF16", "F8_E4M3"} <= set(known) <= DTYPE_BITS.keys()
    for dtype in known:
        size = DTYPE_BITS[dtype]
        write(path, {"a": entry([8], 0, size, dtype)}, b"\0" * size)
        with safe_open(path, "pt") as file:
            assert file.keys() == ["a"]
        assert read_header(path).tensors["a"].num_bytes == size


@pytest.mark.parametrize("dtype", ["F128", "f32", "X" * 10**6])
def test_a_dtype_that_no_one_reads_is_refused(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "f.safetensors", {"a": entry([1], 0, 4, dtype)}, b"1234")
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass
    with pytest.raises(LeanKError, match=r"tensor `a` has dtype .*which the safetensors package") as caught:
        read_header(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "duplicate key 'dtype'"),
        (b"[" * 10**5, "nested too deep"),
        ({"a": [[]] * 10**6}, "`dtype`, `shape` and `data_offsets`"),
        ({"a": entry([10**200] * 4000, 0, 4)}, "has shape"),
        ({"a": entry([9] * 10**6, 0, 4)}, "has shape"),
        ({"a": entry([2**40, 2**40, 0], 0, 0)}, "has shape"),
        ({"a": entry([1.0], 0, 4)}, "has shape [1.0]"),
        ({"a": entry([True], 0, 4)}, "has shape [True]"),
        ({"a": {**entry([1], 0, 4), "dtype": {}}}, "has dtype {}"),
        ({"": entry([1], 0, 4)}, "'' is not a valid tensor name"),
        ({"a\n\0": entry([1], 0, 4)}, "is not a valid tensor name"),
        ({"a" * 10**6: entry([1], 0, 4)}, "is not a valid tensor name"),
        ({"__metadata__": {"x": 1}}, "`__metadata__` is no object of texts"),
        ({"__metadata__": ["x"]}, "`__metadata__` is no object of texts"),
        ({"a": entry([3], 0, 2, "F4")}, "has 2 bytes, not 1.5"),
        (b" " * (16 << 20) + b"{}", "is none of a model's weights"),
    ],
)
def test_absurd_headers_are_refused_in_a_sentence(tmp_path: Path, header: object, message: str) -> None:
    path = write(tmp_path / "f.safetensors", header)
    with pytest.raises(LeanKError, match=re.escape(message)) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.safetensors")
    for path in (tmp_path / "f.safetensors", Path("/dev/zero"), tmp_path):
        with pytest.raises(LeanKError, match="not a file"):
            read_header(path)
