import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from leank_convert.analyze.report import load_artifact
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.inspection import inspect_artifact, render_inspection
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, save_mask
from leank_convert.onnx.pruned_model import load_pruned
from tests.checks import edit_json, fitting_mask, provenance_of, refusal, rejected
from tests.leank_convert.onnx.conftest import change_description


@pytest.fixture
def mask():
    values = torch.zeros(3, 4, 12, dtype=torch.bool)
    values[0, 0] = True
    values[1, 3, :4] = True
    values[2, 1:3, 5] = True
    return values


def in_one_line(facts):
    return " ".join(render_inspection(facts).split())


def test_a_bare_mask_assumes_two_bytes_and_says_so(tmp_path, mask):
    torch.save(mask.float(), tmp_path / "m.pth")
    facts = inspect_artifact(tmp_path / "m.pth")
    assert facts["kind"] == "mask"
    assert facts["widths"] == [[12, 0, 0, 0], [0, 0, 0, 4], [0, 1, 1, 0]]
    assert facts["heads_per_width"] == {"0": 8, "1": 2, "4": 1, "12": 1}
    assert facts["pruning_ratio"] == pytest.approx(1 - 18 / 144)
    assert facts["element_bytes"] == 2 and facts["element_bytes_assumed"]
    whole = dict.fromkeys(("key_dense", "value_dense", "key_window", "value_window"), 288)
    pruned = {"key_pruned": 36, "value_pruned": 96, "saved": pytest.approx(1 - 132 / 576)}
    assert facts["bytes_per_token"] == whole | pruned
    assert facts["model"] is None and facts["windows"] is None and facts["provenance"] is None
    text = render_inspection(facts)
    assert "2 (assumed)" in text and "asked: not known" in text
    assert "    1    8%  0  0  0  4" in text


def test_a_checkpoint_is_described_by_its_own_head_order_and_dtype(mask, source, out):
    export_checkpoint(source, ChannelMask(mask), out, sink_size=3, prune="deferred")
    facts = inspect_artifact(out)
    assert facts["kind"] == "checkpoint" and facts["model_type"] == "leank_llama"
    assert facts["widths"] == [[0, 0, 0, 12], [0, 0, 0, 4], [0, 0, 1, 1]]
    assert facts["head_permutation"][0] == [1, 2, 3, 0]
    assert facts["element_bytes"] == 4 and not facts["element_bytes_assumed"]
    assert facts["bytes_per_token"]["key_dense"] == 576
    assert facts["windows"] == {"sink_size": 3, "recent_size": 1024, "flush_size": 32, "prune": "deferred"}
    assert facts["provenance"]["method"] == "imported"
    assert json.loads(json.dumps(facts)) == facts
    assert "(assumed)" not in render_inspection(facts)


def test_requests_that_fit_into_an_engine_are_counted_dense_and_pruned():
    facts = inspect_artifact("llama-3.1-8b-instruct", 40 << 30, 8192)
    assert facts["capacity"] == {
        "memory_bytes": 40 << 30,
        "tokens": 8192,
        "block_size": 64,
        "kv_dtype": None,
        "dense": {"blocks": 5120, "requests": 39},
        "pruned": {"blocks": 9070, "requests": 60},
    }
    text = render_inspection(facts)
    assert "blocks of 64 tokens: dense 5,120, pruned 9,070 (1.77x)" in text
    assert "requests of 8,192 tokens at once: dense 39, pruned 60 (1.54x)" in text
    eight = in_one_line(inspect_artifact("llama-3.1-8b-instruct", 40 << 30, 8192, "fp8"))
    assert "blocks of 64 tokens: dense 5,120, dense fp8 10,240, pruned fp8 18,141 (3.54x)" in eight
    none = inspect_artifact("llama-3.1-8b-instruct", 1, 8192)
    assert none["capacity"]["pruned"] == {"blocks": 0, "requests": 0}
    assert "blocks of 64 tokens: dense 0, pruned 0\n" in render_inspection(none)


def test_provenance_of_a_trained_mask_is_told(tmp_path, mask, source):
    known = provenance_of(
        source, pruning_ratio_asked=0.75, width_multiple=4, recipe="steps: 3\nseed: 7\n", seed=7
    )
    (tmp_path / "run").mkdir()
    save_mask(ChannelMask(mask, None, known), tmp_path / "run" / "channel_mask.safetensors")
    facts = inspect_artifact(tmp_path / "run")
    assert facts["kind"] == "mask" and facts["pruning_ratio_asked"] == 0.75
    text = render_inspection(facts)
    for part in (
        "llama-model (llama)",
        "0.8750 (asked: 0.75), widths in multiples of 4",
        "sink_size 4, recent_size 16, flush_size 4",
        "made by",
        "2 lines; `--with-recipe` prints them\n",
    ):
        assert part in text
    assert "seed: 7\n" not in text
    facts["provenance"]["recipe"] = "steps: 3\nseed: 7 # \x1b[2J\n"
    assert "  seed: 7 # \\x1b[2J\n" in render_inspection(facts, with_recipe=True)


def test_a_block_that_lacks_a_key_or_has_nonsense_in_it_points_to_verify(mask, source, out):
    export_checkpoint(source, ChannelMask(mask), out)
    whole = read_json(out / "config.json")["leank"]
    for key, value in itertools.product(
        ("flush_size", "widths", "head_permutation", "pruning_ratio"), (..., None, True, [[1, 2]])
    ):
        block = {name: item for name, item in {**whole, key: value}.items() if item is not ...}
        edit_json(out / "config.json", leank=block)
        message = rf"the `leank` block (lacks|has no) `{key}`" if value is ... else rf"`leank\.{key}` is "
        with refusal(message, "verify"):
            inspect_artifact(out)


def test_a_mask_in_the_place_of_the_exported_one_is_told(mask, source, out):
    export_checkpoint(source, ChannelMask(mask), out)
    save_mask(ChannelMask(~mask), out / MASK_FILE_NAME)
    for read in (inspect_artifact, lambda folder: load_artifact(str(folder)), load_pruned):
        with refusal(f"{out / MASK_FILE_NAME}` is not the mask that the checkpoint was exported with"):
            read(out)


@pytest.fixture
def onnx_folder(retriever_half, tmp_path):
    """A copy, to be spoiled; its graph is an empty file: nothing but its size is told of it."""
    copy = Path(shutil.copytree(retriever_half, tmp_path / "out"))
    (copy / "model.onnx").write_bytes(b"12345")
    return copy


def test_an_onnx_folder_is_described_by_the_graphs_head_order_dtype_and_files(onnx_folder):
    facts = inspect_artifact(onnx_folder)
    assert facts["kind"] == "onnx" and (facts["model"], facts["model_type"]) == ("retriever", "llama")
    assert (facts["opset"], facts["dtype"], facts["weights"]) == (23, "float16", "float16")
    assert facts["widths"] == [[0, 7], [4, 4]] and facts["head_permutation"] == [[1, 0], [0, 1]]
    assert facts["windows"] == {"sink_size": 3, "recent_size": 6, "flush_size": 4}
    assert facts["pruning_ratio"] == pytest.approx(1 - 15 / 64)
    assert facts["element_bytes"] == 2 and not facts["element_bytes_assumed"]
    assert facts["bytes_per_token"]["key_pruned"] == 30
    assert facts["files"]["model.onnx"] == 5 and facts["files"]["channel_mask.safetensors"] > 64
    assert facts["provenance"]["method"] == "leank"
    assert json.loads(json.dumps(facts)) == facts
    text = render_inspection(facts)
    assert "opset 23, cache float16, weights float16" in text and "(the graph's head order)" in text
    assert "model.onnx: 5 bytes" in text
    scheme = {"operator": "MatMulNBits", "bits": 4, "block_size": 32, "difference": 0.25}
    change_description(onnx_folder, weights="int4", quantization=scheme)
    told = "weights int4 in blocks of 32 (logits differ by 2.5e-01 of their norm)"
    assert told in in_one_line(inspect_artifact(onnx_folder))
    (onnx_folder / "model.onnx").unlink()
    assert "model.onnx: missing" in render_inspection(inspect_artifact(onnx_folder))
    with refusal("is an ONNX folder, which vLLM does not serve"):
        inspect_artifact(onnx_folder, 1 << 30, 8192)


def test_a_damaged_onnx_folder_is_refused(onnx_folder):
    save_mask(ChannelMask(torch.ones(2, 2, 16, dtype=torch.bool)), onnx_folder / "channel_mask.safetensors")
    with refusal(r"channel_mask.safetensors` differs from what was exported"):
        inspect_artifact(onnx_folder)
    edit_json(onnx_folder / "leank_onnx.json", widths=[[7, 0], [4, 4]])
    with refusal(r"leank_onnx.json` was changed: its `sha256` is not that of its"):
        inspect_artifact(onnx_folder)


def test_of_a_model_the_bytes_are_told_that_pruning_would_save(tmp_path, source_model):
    source = source_model("qwen2", dtype="bfloat16")  # 3 layers, 4 KV heads of 4 channels, 512 positions
    facts = inspect_artifact(source)
    assert (facts["kind"], facts["model_type"], facts["recipe"]) == ("model", "qwen2", None)
    assert "does not say by which recipe" in rejected("inspect", source, "--with-recipe")
    assert facts["bytes_per_token"] == {
        "key_dense": 96,
        "value_dense": 96,
        "key_pruned": 29,
        "saved": pytest.approx(67 / 192),
    }
    # 24 tokens are whole, in the windows that are derived for so few positions.
    assert facts["bytes_per_row"] == {"512": {"dense": 192 * 512, "pruned": 192 * 24 + 125 * 488}}
    config = tmp_path / "alone" / "config.json"
    config.parent.mkdir()
    config.write_text((source / "config.json").read_text())
    edit_json(config, max_position_embeddings=40960)
    facts = inspect_artifact(config)
    whole, rest = 128 + 1024 + 32, 32768 - (128 + 1024 + 32)
    assert facts["bytes_per_row"]["32768"] == {"dense": 192 * 32768, "pruned": 192 * whole + 125 * rest}
    assert "at least 34.9% saved" in in_one_line(facts)
    assert "dense 6.0 MiB, pruned at most 4.0 MiB" in in_one_line(facts)
    with refusal("is not converted"):
        inspect_artifact(config, 10**9, 100)
    edit_json(config, _name_or_path="Qwen/Qwen2.5-7B-Instruct")
    for known in (config, config.parent):  # as `train` and `export` know it
        assert inspect_artifact(known)["recipe"] == "qwen2.5-7b-instruct"


def test_requests_of_mixed_models_are_not_counted(source_model, tmp_path):
    source = source_model("olmo3", num_hidden_layers=4)
    out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
    with refusal("what layers that are not pruned hold in vLLM's cache is not counted"):
        inspect_artifact(out, 1 << 30, 8192)


def test_of_a_mixed_model_the_whole_caches_bytes_are_told(tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 128}
    keys = {"model_type": "gpt_oss", "num_hidden_layers": 4, **heads, "num_local_experts": 4}
    keys |= {"sliding_window": 128, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    facts = inspect_artifact(tmp_path)
    assert facts["bytes_per_token"]["key_dense"] == 2 * 2 * 64 * 2  # of the two layers with full attention
    whole, window = 128 + 1024 + 32, 2 * 512 * 128
    assert facts["bytes_per_row"]["8192"] == {
        "dense": 1024 * 8192 + window,
        "pruned": 1024 * whole + 666 * (8192 - whole) + window,
    }
    assert "prunes 2 of 4 layers, those with full attention; K+V bytes per token" in in_one_line(facts)
    dtype = {"dtype": keys.pop("dtype")}  # of a model that also reads images, the whole's
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sees", "text_config": keys, **dtype}))
    found = inspect_artifact(tmp_path)
    assert found == {**facts, "part_of_larger": True}
    assert "the text model of a larger one, which also reads images" in render_inspection(found)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "bends every logit"),
        ({"model_type": "llava", "text_config": {"model_type": "gpt2"}}, "of a kind that is not converted"),
        ({"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"]}, "1 of its 2"),
        ({"model_type": {"llama": 1}}, "unknown architecture"),
        (None, r"has no `config\.json`"),
        ("some/folder/nope", "^`some/folder/nope` does not exist\n"),
        ("some/nope", "^`some/nope` is not here, and the hub"),  # which may be a model's id
    ],
)
def test_what_is_neither_a_mask_nor_a_model_to_convert_is_refused_with_the_reason(
    keys, reason, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if isinstance(keys, dict):
        (tmp_path / "config.json").write_text(json.dumps(keys))
    with refusal(reason):
        inspect_artifact(keys if isinstance(keys, str) else tmp_path)


def test_a_checkpoint_on_the_hub_is_named_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.json").write_text('{"leank": {}}')
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names: tmp_path / "theirs.json")
    with refusal("`me/model` on the hub is a LeanK checkpoint", "`hf download me/model --local-dir"):
        inspect_artifact("me/model")
