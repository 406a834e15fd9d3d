"""What an export refuses, and that it then leaves nothing."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from leank_convert.checkpoint_io import INDEX_NAME
from leank_convert.errors import LeanKError
from leank_convert.export import check_exportable, export_checkpoint
from leank_convert.files import read_json
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, save_mask
from leank_convert.safetensors_file import read_header
from leank_convert.verify import verify_checkpoint


def rewrite(source, name, change):
    file = source / read_json(source / INDEX_NAME)["weight_map"][name]
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, file, {"format": "pt"})
    return file


ATTENTION = "model.layers.1.self_attn."


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("llama", ATTENTION + "o_proj.weight", [32, 96]),
        ("qwen3", ATTENTION + "q_norm.weight", [6]),
        ("llama", "model.layers.2.mlp.down_proj.weight", [32, 48]),
    ],
)
def test_tensors_of_another_shape_are_named(
    family, name, expected, source_model, fitting_mask, tmp_path, refused
):
    source = source_model(family)
    mask = fitting_mask(source)
    file = rewrite(source, name, lambda tensor: torch.zeros(7, *tensor.shape[1:]))
    message = f"`{file}`: tensor `{name}` has shape {[7, *expected[1:]]}; config.json asks for {expected}"
    refused(source, mask, tmp_path / "out", message)


def test_weights_that_are_quantized_nobody_says_how_are_refused(
    source_model, fitting_mask, edit_json, tmp_path, refused
):
    source = source_model()
    mask = fitting_mask(source)
    rewrite(source, ATTENTION + "k_proj.weight", lambda tensor: tensor.to(torch.int8))
    refused(source, mask, tmp_path / "out", "has dtype I8, and config.json no `quantization_config`")
    rewrite(source, "model.layers.0.mlp.up_proj.weight", lambda tensor: tensor.to(torch.uint8))
    refused(source, mask, tmp_path / "out", "has dtype U8, and config.json no `quantization_config`")
    edit_json(source / "config.json", compression_config={"quant_method": "gptq"})
    refused(source, mask, tmp_path / "out", "is quantized (`compression_config`")


def test_a_config_that_transformers_would_not_take_is_refused(
    source_model, fitting_mask, edit_json, tmp_path, refused
):
    source = source_model()
    mask = fitting_mask(source)
    edit_json(source / "config.json", use_cache="yes")
    told = str(refused(source, mask, tmp_path / "out", "config.json` is refused by transformers: "))
    assert "Field 'use_cache' expected bool, got str" in told
    with pytest.raises(LeanKError, match="is refused by transformers"):
        check_exportable(source, tmp_path / "out")


def test_options_masks_and_checkpoints_that_do_not_fit_are_refused(
    source_model, ragged_mask, fitting_mask, tmp_path, refused
):
    source, out = source_model(), tmp_path / "out"
    mask, wrong = fitting_mask(source), ChannelMask(ragged_mask(head_dim=16))
    for options, message in (
        ({"sink_size": -1}, "`sink_size` is -1"),
        ({"flush_size": 0}, "`flush_size` is 0"),
        ({"prune": "lazy"}, "`prune` is 'lazy'"),
        ({"config_overrides": {"head_dim": 4}}, "`config_overrides.head_dim`"),
    ):
        refused(source, mask, out, message, **options)
    refused(source, wrong, out, "mask `mask` has shape [3, 4, 16]; model")
    export_checkpoint(source, mask, out)
    assert "original" in str(refused(out, mask, tmp_path / "again", "already is a LeanK checkpoint").hint)


def test_a_source_in_another_frameworks_name_becomes_one_of_torchs(source_model, fitting_mask, tmp_path):
    source = source_model()
    shard = sorted(source.glob("*.safetensors"))[0]
    save_file(load_file(shard), shard, {"format": "mlx", "note": "x"})
    out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
    assert verify_checkpoint(out, source).ok
    metadata = read_header(out / shard.name).metadata
    assert (metadata["format"], metadata["note"]) == ("pt", "x")


@pytest.mark.parametrize("where", ["", "inside/deep", ".."])
def test_the_source_is_never_written_to(where, source_model, fitting_mask, snapshot):
    source = source_model()
    before = snapshot(source)
    with pytest.raises(LeanKError, match="overlaps the source"):
        export_checkpoint(source, fitting_mask(source), source / where, overwrite=True)
    assert snapshot(source) == before


def test_another_mask_in_the_folder_is_not_lost(source_model, fitting_mask, tmp_path, refused):
    source, out = source_model(), tmp_path / "out"
    trained = fitting_mask(source)
    (out / "leank").mkdir(parents=True)
    (out / "leank" / "log.jsonl").write_text("step\n")
    save_mask(trained, out / "channel_mask.safetensors")
    other = ChannelMask(torch.ones_like(trained.channel_mask))
    refused(source, other, out, "is another mask than the one to export")
    export_checkpoint(source, trained, out)
    assert (out / "leank" / "log.jsonl").read_text() == "step\n"
    assert verify_checkpoint(out, source).ok


def test_what_no_mask_would_help_is_known_before_there_is_one(
    source_model, fitting_mask, edit_json, tmp_path, snapshot
):
    source, out = source_model(), tmp_path / "out"

    def refused(message, target=out, **options):
        before = snapshot(tmp_path)
        with pytest.raises(LeanKError, match=re.escape(message)):
            check_exportable(source, target, **options)
        assert snapshot(tmp_path) == before

    check_exportable(source, out)
    assert not out.exists()
    refused("overlaps the source", source / "inside")
    refused("the weights fix this key", config_overrides={"hidden_size": 3})
    export_checkpoint(source, fitting_mask(source), out)
    refused("already holds a checkpoint")
    check_exportable(source, out, overwrite=True)
    edit_json(source / "config.json", sliding_window=64, model_type="mistral")
    refused("sliding window", overwrite=True)
    check_exportable(source, out, overwrite=True, config_overrides={"sliding_window": None})
    rewrite(source, ATTENTION + "v_proj.weight", lambda tensor: tensor.to(torch.int8))
    refused("has dtype I8", overwrite=True, config_overrides={"sliding_window": None})
    edit_json(source / "config.json", quantization_config={"quant_method": "gptq"})
    refused("is quantized by `gptq`", overwrite=True, config_overrides={"sliding_window": None})


def test_names_that_a_checkpoint_has_for_its_masks_are_refused(
    source_model, fitting_mask, edit_json, tmp_path, refused
):
    source = source_model()
    mask = fitting_mask(source)
    weight_map = read_json(source / INDEX_NAME)["weight_map"]
    shard = weight_map["model.norm.weight"]
    own = {name: MASK_FILE_NAME if file == shard else file for name, file in weight_map.items()}
    (source / MASK_FILE_NAME).write_bytes((source / shard).read_bytes())
    edit_json(source / INDEX_NAME, weight_map=own)
    refused(source, mask, tmp_path / "out", f"a shard is named `{MASK_FILE_NAME}`")
    name = ATTENTION + "key_scale"
    save_file({**load_file(source / shard), name: torch.ones(1)}, source / shard, {"format": "pt"})
    edit_json(source / INDEX_NAME, weight_map={**weight_map, name: shard})
    refused(source, mask, tmp_path / "out", f"has a tensor `{name}`")
