"""A full disk and a killed process: the target is as it was, and a second run succeeds."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask, save_mask
from leank_convert.verify import verify_checkpoint


def test_a_full_disk_leaves_nothing(
    source_model: Callable[..., Path],
    fitting_mask: Callable[[Path], ChannelMask],
    tmp_path: Path,
    refused: Callable[..., LeanKError],
) -> None:
    source, disk = source_model(vocab_size=4096), tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        error = refused(source, fitting_mask(source), disk / "out", "no space left while writing")
        assert re.search(r"`.*out\.partial/model-\d+.*safetensors`", str(error))
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("file", ["shard", "channel_mask", "README.md"])
def test_no_space_at_any_file_leaves_the_folder_as_it_was(
    file: str,
    source_model: Callable[..., Path],
    fitting_mask: Callable[[Path], ChannelMask],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., LeanKError],
) -> None:
    source, out = source_model(), tmp_path / "out"
    mask = fitting_mask(source)
    export_checkpoint(source, mask, out)
    real = os.fsync

    def fail(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name.startswith(file) or (file == "shard" and name.startswith("model-")):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr("os.fsync", fail)
    refused(source, mask, out, "o space left", overwrite=True)


KILLED = """
import os, signal, sys, torch
from pathlib import Path
import leank_convert.export as export
from leank_convert.mask import load_mask

written = []
real = getattr(export, sys.argv[4])

def then_die(*arguments, **options):
    result = real(*arguments, **options)
    written.append(result)
    if len(written) == int(sys.argv[5]):
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(export, sys.argv[4], then_die)
export.export_checkpoint(Path(sys.argv[1]), load_mask(sys.argv[2]), Path(sys.argv[3]), overwrite=True)
"""


@pytest.mark.parametrize(
    ("step", "count", "existing"), [("write_shard", 4, True), ("_check_written", 1, False)]
)
def test_a_killed_export_leaves_the_folder_as_it_was_and_can_be_run_again(
    step: str,
    count: int,
    existing: bool,
    source_model: Callable[..., Path],
    fitting_mask: Callable[[Path], ChannelMask],
    tmp_path: Path,
    snapshot: Callable[[Path], dict[str, str] | None],
) -> None:
    source, out = source_model(), tmp_path / "out"
    mask = fitting_mask(source)
    save_mask(mask, tmp_path / "m.safetensors")
    if existing:
        export_checkpoint(source, ChannelMask(torch.ones_like(mask.channel_mask)), out)
    before = snapshot(out)
    arguments = [str(source), str(tmp_path / "m.safetensors"), str(out), step, str(count)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert snapshot(out) == before
    assert (tmp_path / "out.partial").exists()
    export_checkpoint(source, mask, out, overwrite=True)
    assert verify_checkpoint(out, source).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-model", "m.safetensors", "out"]


def test_a_source_that_cannot_be_read_is_not_called_unwritable(
    source_model: Callable[..., Path],
    fitting_mask: Callable[[Path], ChannelMask],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., LeanKError],
) -> None:
    source = source_model(shards=False)

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(source / "model.safetensors"))

    monkeypatch.setattr("leank_convert.export.write_shard", fail)
    message = f"cannot read `{source}/model.safetensors`: Permission denied"
    refused(source, fitting_mask(source), tmp_path / "out", message)


PAUSED = """
import sys
from pathlib import Path
import leank_convert.export as export
from leank_convert.mask import load_mask

real = export.write_shard

def paused(*arguments, **options):
    print("writing", flush=True)
    sys.stdin.readline()
    return real(*arguments, **options)

export.write_shard = paused
export.export_checkpoint(Path(sys.argv[1]), load_mask(sys.argv[2]), Path(sys.argv[3]), overwrite=True)
"""


def test_of_two_exports_at_once_the_second_is_refused_and_the_first_is_whole(
    source_model: Callable[..., Path],
    fitting_mask: Callable[[Path], ChannelMask],
    tmp_path: Path,
    snapshot: Callable[[Path], dict[str, str] | None],
) -> None:
    source, out = source_model(shards=False), tmp_path / "out"
    mask = fitting_mask(source)
    save_mask(mask, tmp_path / "m.safetensors")
    arguments = [sys.executable, "-c", PAUSED, str(source), str(tmp_path / "m.safetensors"), str(out)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == "writing\n"
        before = snapshot(tmp_path)
        with pytest.raises(LeanKError, match=f"another process is writing to `{out}`"):
            export_checkpoint(source, mask, out, overwrite=True)
        assert snapshot(tmp_path) == before
        first.communicate("\n")
    assert first.returncode == 0
    assert verify_checkpoint(out, source).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-model", "m.safetensors", "out"]
