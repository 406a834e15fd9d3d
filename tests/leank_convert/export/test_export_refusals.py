"""What an export refuses, and that then, or on a full disk, the target is as it was."""

import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from leank_convert.checkpoint_io import INDEX_NAME
from leank_convert.export import check_exportable, export_checkpoint
from leank_convert.files import read_json
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, save_mask
from leank_convert.safetensors_file import read_header
from leank_convert.verify import verify_checkpoint
from tests.checks import edit_json, edit_tensors, fitting_mask, ragged_mask, refusal, refused_export, snapshot

ATTENTION = "model.layers.1.self_attn."


def rewrite(source, name, change):
    """Change a tensor where it lies; the file."""
    file = source / read_json(source / INDEX_NAME)["weight_map"][name]
    edit_tensors(file, **{name: change})
    return file


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("llama", ATTENTION + "o_proj.weight", [32, 96]),
        ("qwen3", ATTENTION + "q_norm.weight", [6]),
        ("llama", "model.layers.2.mlp.down_proj.weight", [32, 48]),
    ],
)
def test_tensors_of_another_shape_are_named(family, name, expected, source_model, tmp_path):
    source = source_model(family)
    file = rewrite(source, name, lambda tensor: torch.zeros(7, *tensor.shape[1:]))
    message = f"`{file}`: tensor `{name}` has shape {[7, *expected[1:]]}; config.json asks for {expected}"
    refused_export(source, fitting_mask(source), tmp_path / "out", message)


def test_options_masks_configs_and_weights_that_do_not_fit_are_refused(source_model, tmp_path):
    source, out = source_model(), tmp_path / "out"
    mask, wrong = fitting_mask(source), ChannelMask(ragged_mask(head_dim=16))
    for options, message in (
        ({"sink_size": -1}, "`sink_size` is -1"),
        ({"prune": []}, "`prune` is []"),  # not hashable
        ({"config_overrides": {"head_dim": 4}}, "`config_overrides.head_dim`"),
    ):
        refused_export(source, mask, out, message, **options)
    refused_export(source, wrong, out, "mask `mask` has shape [3, 4, 16]; model")
    export_checkpoint(source, mask, out)
    refused_export(out, mask, tmp_path / "again", "already is a LeanK checkpoint", "original")
    edit_json(source / "config.json", use_cache="yes")
    refused_export(source, mask, tmp_path / "again", "Field 'use_cache' expected bool, got str")
    with refusal("config.json` is refused by transformers: "):
        check_exportable(source, tmp_path / "again")
    edit_json(source / "config.json", use_cache=True)
    for name, dtype in (("1.self_attn.k_proj", torch.int8), ("0.mlp.up_proj", torch.uint8)):
        rewrite(source, f"model.layers.{name}.weight", lambda tensor, dtype=dtype: tensor.to(dtype))
        told = f"has dtype {'I' if dtype == torch.int8 else 'U'}8, and config.json no `quantization_config`"
        refused_export(source, mask, tmp_path / "again", told)
    edit_json(source / "config.json", compression_config={"quant_method": "gptq"})
    refused_export(source, mask, tmp_path / "again", "is quantized (`compression_config`")


def test_a_source_in_another_frameworks_name_becomes_one_of_torchs(source_model, tmp_path):
    source = source_model()
    shard = sorted(source.glob("*.safetensors"))[0]
    edit_tensors(shard, {"format": "mlx", "note": "x"})
    out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
    assert verify_checkpoint(out, source).ok
    metadata = read_header(out / shard.name).metadata
    assert (metadata["format"], metadata["note"]) == ("pt", "x")


@pytest.mark.parametrize("where", ["", "inside/deep", ".."])
def test_the_source_is_never_written_to(where, source_model):
    source = source_model()
    before = snapshot(source)
    with refusal("overlaps the source"):
        export_checkpoint(source, fitting_mask(source), source / where, overwrite=True)
    assert snapshot(source) == before


def test_another_mask_in_the_folder_is_not_lost(source_model, tmp_path):
    source, out = source_model(), tmp_path / "out"
    trained = fitting_mask(source)
    (out / "leank").mkdir(parents=True)
    (out / "leank" / "log.jsonl").write_text("step\n")
    save_mask(trained, out / "channel_mask.safetensors")
    other = ChannelMask(torch.ones_like(trained.channel_mask))
    refused_export(source, other, out, "is another mask than the one to export")
    export_checkpoint(source, trained, out)
    assert (out / "leank" / "log.jsonl").read_text() == "step\n"
    assert verify_checkpoint(out, source).ok


def test_what_no_mask_would_help_is_known_before_there_is_one(source_model, tmp_path):
    source, out = source_model(), tmp_path / "out"

    def refused(message, target=out, **options):
        before = snapshot(tmp_path)
        with refusal(re.escape(message)):
            check_exportable(source, target, **options)
        assert snapshot(tmp_path) == before

    check_exportable(source, out)
    assert not out.exists()
    refused("overlaps the source", source / "inside")
    refused("the weights fix this key", config_overrides={"hidden_size": 3})
    export_checkpoint(source, fitting_mask(source), out)
    refused("already holds an export")
    check_exportable(source, out, overwrite=True)
    edit_json(source / "config.json", sliding_window=64, model_type="mistral")
    refused("sliding window", overwrite=True)
    whole = {"overwrite": True, "config_overrides": {"sliding_window": None}}
    check_exportable(source, out, **whole)
    rewrite(source, ATTENTION + "v_proj.weight", lambda tensor: tensor.to(torch.int8))
    refused("has dtype I8", **whole)
    edit_json(source / "config.json", quantization_config={"quant_method": "gptq"})
    refused("is quantized by `gptq`", **whole)


def test_names_that_a_checkpoint_has_for_its_masks_are_refused(source_model, tmp_path):
    source = source_model()
    mask = fitting_mask(source)
    weight_map = read_json(source / INDEX_NAME)["weight_map"]
    shard = weight_map["model.norm.weight"]
    own = {name: MASK_FILE_NAME if file == shard else file for name, file in weight_map.items()}
    (source / MASK_FILE_NAME).write_bytes((source / shard).read_bytes())
    edit_json(source / INDEX_NAME, weight_map=own)
    refused_export(source, mask, tmp_path / "out", f"a shard is named `{MASK_FILE_NAME}`")
    name = ATTENTION + "key_scale"
    edit_tensors(source / shard, **{name: torch.ones(1)})
    edit_json(source / INDEX_NAME, weight_map={**weight_map, name: shard})
    refused_export(source, mask, tmp_path / "out", f"has a tensor `{name}`")


@pytest.mark.parametrize("file", ["shard", "channel_mask", "README.md"])
def test_no_space_at_any_file_leaves_the_folder_as_it_was(file, source_model, tmp_path, monkeypatch):
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
    refused_export(source, mask, out, "o space left", overwrite=True)


def test_a_source_that_cannot_be_read_is_not_called_unwritable(source_model, tmp_path, monkeypatch):
    source = source_model(shards=False)
    error = PermissionError(13, "Permission denied", str(source / "model.safetensors"))
    monkeypatch.setattr("leank_convert.export.write_shard", Mock(side_effect=error))
    message = f"cannot read `{source}/model.safetensors`: Permission denied"
    refused_export(source, fitting_mask(source), tmp_path / "out", message)
