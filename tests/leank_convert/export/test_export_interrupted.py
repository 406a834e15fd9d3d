"""A full disk and a killed process: the target is as it was, and a second run succeeds."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask, save_mask
from leank_convert.verify import verify_checkpoint


@pytest.mark.parametrize("file", ["shard", "channel_mask", "README.md"])
def test_no_space_at_any_file_leaves_the_folder_as_it_was(
    file, source_model, fitting_mask, tmp_path, monkeypatch, refused
):
    source, out = source_model(), tmp_path / "out"
    mask = fitting_mask(source)
    export_checkpoint(source, mask, out)
    real = os.fsync

    def fail(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if name.startswith(file) or (file == "shard" and name.startswith("model-")):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr("os.fsync", fail)
    refused(source, mask, out, "o space left", overwrite=True)


KILLED = """
import os, signal, sys
from pathlib import Path
import leank_convert.export as export
from leank_convert.mask import load_mask

real, written = export.write_shard, []

def then_die(*arguments, **options):
    written.append(real(*arguments, **options))
    if len(written) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return written[-1]

export.write_shard = then_die
export.export_checkpoint(Path(sys.argv[1]), load_mask(sys.argv[2]), Path(sys.argv[3]), overwrite=True)
"""


def test_a_killed_export_leaves_the_folder_as_it_was_and_can_be_run_again(
    source_model, fitting_mask, tmp_path, snapshot
):
    source, out = source_model(), tmp_path / "out"
    mask = fitting_mask(source)
    save_mask(mask, tmp_path / "m.safetensors")
    export_checkpoint(source, ChannelMask(torch.ones_like(mask.channel_mask)), out)
    before = snapshot(out)
    arguments = [str(source), str(tmp_path / "m.safetensors"), str(out)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert snapshot(out) == before and (tmp_path / "out.partial").exists()
    export_checkpoint(source, mask, out, overwrite=True)
    assert verify_checkpoint(out, source).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-model", "m.safetensors", "out"]


def test_a_source_that_cannot_be_read_is_not_called_unwritable(
    source_model, fitting_mask, tmp_path, monkeypatch, refused
):
    source = source_model(shards=False)

    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", str(source / "model.safetensors"))

    monkeypatch.setattr("leank_convert.export.write_shard", fail)
    message = f"cannot read `{source}/model.safetensors`: Permission denied"
    refused(source, fitting_mask(source), tmp_path / "out", message)
