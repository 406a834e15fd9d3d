"""The whole way from a model and a mask to a folder; what is refused, and that then it is as it was."""

import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from leank_convert.checkpoint_io import INDEX_NAME
from leank_convert.export import check_exportable, export_checkpoint
from leank_convert.export.runtime_files import PARTS, needed_parts, read_runtime_files
from leank_convert.families import ARCHITECTURES
from leank_convert.files import read_json
from leank_convert.leank_block import LEANK_KEYS
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from leank_convert.safetensors_file import read_header
from leank_convert.verify import verify_checkpoint
from tests.checks import (
    edit_json,
    edit_tensors,
    facts_of,
    fitting_mask,
    provenance_of,
    ragged_mask,
    refusal,
    refused_export,
    snapshot,
)
from tests.tiny_families import weights_of

ATTENTION = "model.layers.1.self_attn."
BY_HEADS = [f"{name}_proj.{part}" for name in "qkv" for part in ("weight", "bias")] + ["o_proj.weight"]


@pytest.mark.parametrize(
    ("family", "dtype", "shards"),
    [("llama", "float32", True), ("qwen3", "float32", True), ("qwen2", "bfloat16", False)],
)
def test_heads_move_as_one_and_everything_else_stays(family, dtype, shards, source_model, tmp_path):
    source = source_model(family, dtype=dtype, shards=shards)
    facts, mask = facts_of(source), fitting_mask(source)
    out = export_checkpoint(source, mask, tmp_path / "out")
    before, after = weights_of(source), weights_of(out)
    leank = read_json(out / "config.json")["leank"]
    expected = dict(before)
    assert (f"{ATTENTION}q_proj.bias" in before) == (family != "qwen3")
    for layer, order in enumerate(leank["head_permutation"]):
        assert order != sorted(order), "the mask must move heads, or this test holds nothing"
        for part in BY_HEADS:
            name, dim = f"model.layers.{layer}.self_attn.{part}", int(part == "o_proj.weight")
            if name in before:
                heads = before[name].unflatten(dim, (len(order), -1))  # a KV head's, or its query heads'
                expected[name] = heads.index_select(dim, torch.tensor(order)).flatten(dim, dim + 1)
        # The first channel is the highest bit of the first byte.
        packed = np.frombuffer(bytes.fromhex(leank["channel_masks"][layer]), dtype=np.uint8)
        bits = torch.from_numpy(np.unpackbits(packed)).view(len(order), -1)
        channel_mask = bits[:, : facts.head_dim].bool()
        assert channel_mask.equal(mask.channel_mask[layer][order])
        assert channel_mask.sum(-1).tolist() == leank["widths"][layer] == sorted(leank["widths"][layer])
    assert after.keys() == expected.keys()
    for name, tensor in expected.items():
        assert after[name].dtype == tensor.dtype and after[name].equal(tensor), name


def test_config_is_the_sources_with_the_leank_block(source_model, tmp_path):
    family = "qwen3"
    source = source_model(family)
    mask = fitting_mask(source)
    out = export_checkpoint(source, mask, tmp_path / "out", sink_size=4, recent_size=0, flush_size=1)
    before, config = read_json(source / "config.json"), read_json(out / "config.json")
    stem = ARCHITECTURES[family].stem
    leank = config.pop("leank")
    assert config == {
        **before,
        "model_type": f"leank_{family}",
        "architectures": [f"LeanK{stem}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_leank.LeanK{stem}Config",
            "AutoModel": f"modeling_leank.LeanK{stem}Model",
            "AutoModelForCausalLM": f"modeling_leank.LeanK{stem}ForCausalLM",
        },
    }
    assert list(leank) == list(LEANK_KEYS)
    assert (leank["sink_size"], leank["recent_size"], leank["flush_size"]) == (4, 0, 1)
    assert leank["pruning_ratio"] == mask.pruning_ratio
    assert (leank["format_version"], leank["prune"], leank["config_overrides"]) == (1, "eager", {})
    assert leank["pruning_ratio_asked"] is None and leank["width_multiple"] is None


@pytest.mark.parametrize(
    ("family", "block", "parts"),
    [
        ("llama", {}, []),
        ("llama", {"kv_dtype": "int4", "kv_scales": None}, []),
        ("llama", {"kv_dtype": "fp8", "kv_scales": None}, ["kernel_fp8"]),
        ("llama", {"kv_scales": {"num_tokens": 1}}, ["model_constants"]),
        ("llama", {"value_basis": True}, ["model_constants"]),
        ("gemma3_text", {"layers": [5]}, ["mixed_cache"]),
        ("gpt_oss", {"layers": [1], "key_mean": True}, ["mixed_cache", "model_constants", "sinks"]),
    ],
)
def test_a_checkpoint_carries_the_parts_that_its_config_needs(family, block, parts):
    names = {f"{part}_leank.py" for part in parts}
    carried = read_runtime_files(needed_parts(ARCHITECTURES[family], block))
    released = read_runtime_files()
    assert released.keys() - carried.keys() == set(PARTS) - names
    assert {name for name in carried if carried[name] != released[name]} <= {"parts_leank.py"}
    # transformers takes these lines for imports, whose files it copies.
    named = re.findall(r"^from \.(\w+) import", carried["parts_leank.py"].decode(), re.MULTILINE)
    assert {f"{name}.py" for name in named} == names


def test_every_runtime_file_and_the_mask_is_there_with_its_digest(tmp_path, source):
    mask = fitting_mask(source)
    out = export_checkpoint(source, mask, tmp_path / "out")
    runtime = Path(__file__).parents[3] / "runtime"
    files = read_json(out / "config.json")["leank"]["files"]
    shipped = {file.name for file in runtime.glob("*_leank.py")} - set(PARTS)
    assert {"configuration_leank.py", "modeling_leank.py"} < shipped
    assert files.keys() == shipped | {"channel_mask.safetensors"}
    for name in shipped - {"parts_leank.py"}:
        assert (out / name).read_bytes() == (runtime / name).read_bytes()
    found = snapshot(out)
    assert files.items() <= found.items()
    del found["leank_digests.json"]
    assert read_json(out / "leank_digests.json") == {"format_version": 1, "files": found}
    assert load_mask(out / "channel_mask.safetensors").channel_mask.equal(mask.channel_mask)
    known = load_mask(out / "channel_mask.safetensors").provenance
    assert known is not None and known.method == "imported" and known.model == "llama-model"


def test_a_trained_mask_gives_its_facts_and_no_file_holds_a_local_path(tmp_path, source):
    edit_json(source / "config.json", _name_or_path=str(source))
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The source\n")
    paths = f"model: {{id: {source}}}\ndata: {{haystack: {{source: '{tmp_path}/my text.txt'}}}}\n"
    known = provenance_of(source, "owner/model", pruning_ratio_asked=0.5, width_multiple=4, recipe=paths)
    out = export_checkpoint(source, ChannelMask(ragged_mask(), None, known), tmp_path / "out", flush_size=2)
    leank = read_json(out / "config.json")["leank"]
    assert (leank["sink_size"], leank["recent_size"], leank["flush_size"]) == (4, 16, 2)
    assert (leank["pruning_ratio_asked"], leank["width_multiple"]) == (0.5, 4)
    assert [path.name for path in out.rglob("*.*") if str(tmp_path).encode() in path.read_bytes()] == []
    recipe = "model: {id: .../llama-model}\ndata: {haystack: {source: '.../my text.txt'}}\n"
    card = (out / "README.md").read_text()
    assert "id: .../llama-model" in card and "source: .../my text.txt" in card
    assert (ModelCard(card).data.license, ModelCard(card).data.base_model) == ("apache-2.0", "owner/model")
    assert load_mask(out / "channel_mask.safetensors").provenance == replace(known, recipe=recipe)


@pytest.mark.parametrize("beyond", [False, True])
def test_windows_that_leave_nothing_to_prune_are_told_of(tmp_path, caplog, beyond, source):
    positions = read_json(source / "config.json")["max_position_embeddings"]
    sizes = {"sink_size": positions - 9 + beyond, "recent_size": 8}
    export_checkpoint(source, fitting_mask(source), tmp_path / "out", **sizes)
    assert ("nothing is ever pruned" in caplog.text) == beyond


def test_companions_travel_and_nothing_else(source_model, tmp_path, caplog):
    source = source_model(max_position_embeddings=2048)
    copied = {
        "tokenizer.model": b"\0\1",
        "special_tokens_map.json": b"{}",
        "vocab.json": b"{}",
        "merges.txt": b"a b",
        "additional_chat_templates/tool.jinja": b"x",
        "LICENSE": b"terms",
    }
    left = {
        "README.md": b"the source's own",
        "original/params.json": b"{}",
        **dict.fromkeys(("pytorch_model.bin", "model.pt", "training_args.bin", ".git/config"), b"x"),
        "consolidated.safetensors": b"x",
    }
    for name, content in {**copied, **left}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
    copied["generation_config.json"] = (source / "generation_config.json").read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copied[name] = (source / name).read_bytes()
    for name, content in copied.items():
        assert (out / name).read_bytes() == content
    assert not [name for name in left if name != "README.md" and (out / name).exists()]
    assert "the source's own" not in (out / "README.md").read_text()
    (told,) = caplog.messages
    assert told.startswith(f"the tokenizer of `{source}` cannot be loaded")


def test_equal_inputs_give_equal_folders(tmp_path, source):
    mask = fitting_mask(source)
    first, second = (snapshot(export_checkpoint(source, mask, tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert snapshot(export_checkpoint(source, mask, tmp_path / "a", overwrite=True)) == first


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


def test_options_masks_configs_and_weights_that_do_not_fit_are_refused(tmp_path, source, out):
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


def test_a_source_in_another_frameworks_name_becomes_one_of_torchs(tmp_path, source):
    shard = sorted(source.glob("*.safetensors"))[0]
    edit_tensors(shard, {"format": "mlx", "note": "x"})
    out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
    assert verify_checkpoint(out, source).ok
    metadata = read_header(out / shard.name).metadata
    assert (metadata["format"], metadata["note"]) == ("pt", "x")


@pytest.mark.parametrize("where", ["", "inside/deep", ".."])
def test_the_source_is_never_written_to(where, source):
    before = snapshot(source)
    with refusal("overlaps the source"):
        export_checkpoint(source, fitting_mask(source), source / where, overwrite=True)
    assert snapshot(source) == before


def test_another_mask_in_the_folder_is_not_lost(source, out):
    """Other channels are another mask, and the same ones with another mean of keys, or without."""
    channels = fitting_mask(source).channel_mask
    mean = torch.ones(channels.shape).half()
    trained = ChannelMask(channels, provenance=provenance_of(source), key_mean=mean)
    (out / "leank").mkdir(parents=True)
    (out / "leank" / "log.jsonl").write_text("step\n")
    save_mask(trained, out / "channel_mask.safetensors")
    for changes in ({"channel_mask": ~channels}, {"key_mean": None}, {"key_mean": mean + 1}):
        other = replace(trained, **changes)
        refused_export(source, other, out, "is another mask than the one to export; it would be lost")
    export_checkpoint(source, trained, out)
    assert (out / "leank" / "log.jsonl").read_text() == "step\n"
    assert verify_checkpoint(out, source).ok


def test_what_no_mask_would_help_is_known_before_there_is_one(tmp_path, source, out):
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


def test_names_that_a_checkpoint_has_for_its_masks_are_refused(tmp_path, source):
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
def test_no_space_at_any_file_leaves_the_folder_as_it_was(file, monkeypatch, source, out):
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
