"""What is read as JSON, and what is not."""

import json
import os
from pathlib import Path

import pytest

from leank_convert.errors import LeanKError
from leank_convert.files import read_json
from tests.checks import refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "holds a `list`, not an object"),
        (b"\xef\xbb\xbf{}", "is not JSON: Unexpected UTF-8 BOM"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate key 'c'"),
        (b'{"a": [NaN]}', "number 'NaN' is not finite"),
        (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested too deep"),
        (b'{"a": "\\uD800"}', "half of a surrogate pair"),
        (b" " * (17 << 20) + b"{}", "larger than 16 MB"),
    ],
)
def test_what_is_no_json_of_a_model_is_refused_in_a_sentence(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    refused(read_json, path, message)


def test_what_is_json_is_read(tmp_path):
    value = {"a": 10**30, "b": [1e30, None, True], "c": {"\U0001f600 ü": "\\ud"}}
    for ascii_only in (False, True):
        (tmp_path / "x.json").write_text(json.dumps(value, ensure_ascii=ascii_only))
        assert read_json(tmp_path / "x.json") == value


def test_what_may_never_end_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path, message in (
        (tmp_path / "pipe", "not a file"),
        (Path("/dev/zero"), "not a file"),
        (tmp_path, "not a file"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(LeanKError, match=message):
            read_json(path)
