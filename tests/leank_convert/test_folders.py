"""Folders to write to: what cannot be one is refused in a sentence, and one process at a time writes."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from leank_convert.folders import check_folder, locked
from tests.checks import refusal, rejected

NOT_FOLDERS = {
    "nul\0": "is not text in UTF-8 without NUL characters",
    "not-utf-8\udcff": "is not text in UTF-8 without NUL characters",
    "loop": "cannot be a folder: Too many levels of symbolic links",
    "loop/in/it": "cannot be a folder: Too many levels of symbolic links",
    "nowhere": "is a link to a place that does not exist",
    "nowhere/in/it": "is a link to a place that does not exist",
    "file/": "is a file",
    "file/in/it": "is a file",
    "to-file": "is a file",
    "pipe": "is a file",
    "n" * 300: "File name too long",
    f"new/{'n' * 300}/new": "File name too long",
}
NOT_REPLACED = {
    "n" * 250: "cannot be a folder: File name too long",
    ".": "holds other files",
    "..": "holds other files",
    "/": "is a mount point",
    "/dev/shm": "is a mount point",
    "linked": "`linked.partial` is in the way",
    "other": "`other.leank-lock` is in the way",
}


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "command",
    [
        ["export", "testbed", "--all-channels"],
        ["export-onnx", "testbed", "--all-channels"],
        ["train", "testbed", "--method", "static-norm"],
        ["evaluate", "no-checkpoint"],
        ["evaluate-text", "no-checkpoint", "--text", "file", "--prefix-tokens", "3"],
        ["analyze", "mask.npy"],
    ],
    ids=lambda command: "-".join(command[::4]),
)
def test_commands_say_so_in_one_sentence_and_change_nothing(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for link, target in (
        ("loop", "loop"),
        ("nowhere", "gone"),
        ("to-file", "file"),
        ("linked.partial", ".."),
    ):
        (tmp_path / link).symlink_to(target)
    for name in ("file", "other.leank-lock"):
        (tmp_path / name).write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    np.save(tmp_path / "mask.npy", np.ones((2, 2, 8), dtype=bool))
    before = names(tmp_path)
    for out, reason in {**NOT_FOLDERS, **NOT_REPLACED}.items():
        told = rejected(*command, "-o", out)
        assert told.count("error: ") == 1, told
        if command[0] == "export":
            assert reason in told.replace(f"{tmp_path}/", "")
        assert names(tmp_path) == before, out


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with refusal(rf"folder `{tmp_path}` may not be written to"):
        check_folder(tmp_path / "new" / "out")


def test_a_lock_keeps_others_out_while_it_is_held_and_leaves_nothing(tmp_path):
    path = tmp_path / "new" / "folder" / "lock"
    with ThreadPoolExecutor(1) as other:
        with locked(path, "busy"), locked(path, "busy"):  # who holds it may ask again
            with refusal("busy"):
                other.submit(locked(path, "busy").__enter__).result()
            assert path.exists()
        assert list(tmp_path.iterdir()) == []
        other.submit(locked(path, "busy").__enter__).result()


def test_where_nothing_can_be_locked_a_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with locked(tmp_path / "lock", "busy"):
        assert "cannot be locked here" in caplog.text
