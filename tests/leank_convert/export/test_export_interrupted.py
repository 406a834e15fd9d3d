"""A full disk and a killed process: the target is as it was, and a second run succeeds."""

import os
from pathlib import Path

import pytest

from leank_convert.export import export_checkpoint


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


def test_a_source_that_cannot_be_read_is_not_called_unwritable(
    source_model, fitting_mask, tmp_path, monkeypatch, refused
):
    source = source_model(shards=False)

    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", str(source / "model.safetensors"))

    monkeypatch.setattr("leank_convert.export.write_shard", fail)
    message = f"cannot read `{source}/model.safetensors`: Permission denied"
    refused(source, fitting_mask(source), tmp_path / "out", message)
