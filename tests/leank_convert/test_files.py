"""Files of JSON and of tensors: what is read as such, and what is refused in a sentence, values cut."""

import json
import os
from functools import reduce
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leank_convert.errors import cut
from leank_convert.files import read_json
from leank_convert.safetensors_file import encode_header, read_header
from tests.checks import refusal, refused


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


def test_what_is_json_is_read(tmp_path):
    value = {"a": 10**30, "b": [1e30, None, True], "c": {"\U0001f600 ü": "\\ud"}}
    for ascii_only in (False, True):
        (tmp_path / "x.json").write_text(json.dumps(value, ensure_ascii=ascii_only))
        assert read_json(tmp_path / "x.json") == value


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_json, b"{", "is not JSON"),
        (read_json, b"[1]", "holds a `list`, not an object"),
        (read_json, b"\xef\xbb\xbf{}", "is not JSON: Unexpected UTF-8 BOM"),
        (read_json, b'{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate key 'c'"),
        (read_json, b'{"a": [NaN]}', "number 'NaN' is not finite"),
        (read_json, b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested too deep"),
        (read_json, b'{"a": "\\uD800"}', "half of a surrogate pair"),
        (read_json, b" " * (17 << 20) + b"{}", "larger than 16 MB"),
        (read_header, b"", "is truncated or damaged"),
        (read_header, file_of({"a": entry([2], 0, 8)}, b"1234567"), "file not fully covered"),
        (read_header, file_of({"a": entry([1], 4, 8)}, b"12345678"), "invalid offset for tensor `a`"),
        (read_header, file_of(b"{}", claim=2**63), "is truncated or damaged"),
        (read_header, file_of(b" " * (16 << 20) + b"{}"), "is none of a model's weights"),
        (read_header, file_of(b'{"__metadata__": {}, "__metadata__": {}}'), "duplicate field `__metadata__`"),
        (read_header, file_of({"": entry([1], 0, 4)}, b"1234"), "'' is not a valid tensor name"),
    ],
)
def test_what_is_no_file_of_a_model_is_refused_in_a_sentence(tmp_path, read, content, message):
    (tmp_path / "file").write_bytes(content)
    refused(read, tmp_path / "file", message)


@pytest.mark.parametrize("read", [read_json, read_header])
def test_what_may_never_end_is_not_opened(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        refused(read, path, "not a file")
    for name, message in (("loop", "symbolic links"), ("none", "No such file")):
        with refusal(message):
            read(tmp_path / name)


_LARGE = {
    "number": 10**5000,
    "text": "a" * 10**6,
    "deep": reduce(lambda inner, _: [inner], range(10**5), []),
    "wide": reduce(lambda value, _: [value] * 9, range(60), "ha"),
}


@pytest.mark.parametrize("value", _LARGE.values(), ids=_LARGE)
def test_a_value_in_a_message_is_short_whatever_it_is(value):
    assert len(cut(value)) <= 121


def test_text_and_numbers_can_be_told_apart():
    assert (cut("1"), cut(1), cut(True), cut([1, None])) == ("'1'", "1", "True", "[1, None]")
