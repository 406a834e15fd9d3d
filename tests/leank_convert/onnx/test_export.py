"""`export-onnx` writes a whole, described and checked folder, or nothing."""

import dataclasses
import json
import re
import shutil

import onnx
import pytest
import torch

from leank_convert.mask import load_mask, save_mask
from leank_convert.onnx import PrunedModel, export
from leank_convert.onnx.check import check_graph, make_trials
from leank_convert.onnx.pruned_model import load_pruned
from leank_convert.windows import Windows
from tests.checks import done, edit_json, failed, refusal, rejected, snapshot
from tests.leank_convert.onnx.conftest import CASES, build


@pytest.fixture
def mask_file(retriever_mask, tmp_path):
    path = tmp_path.with_name(f"{tmp_path.name}-mask") / "channel_mask.safetensors"
    path.parent.mkdir()
    save_mask(retriever_mask, path)
    return path


@pytest.fixture(scope="session")
def checkpoint(retriever_centred):
    return retriever_centred / "checkpoint"


@pytest.fixture
def description(retriever_onnx):
    return json.loads((retriever_onnx / "leank_onnx.json").read_text())


@pytest.fixture
def without_tracing(monkeypatch):
    """Exports are instant, their graph an empty file."""
    monkeypatch.setattr(export, "write_graph", lambda pruned, path: path.touch())
    monkeypatch.setattr(export, "check_graph", lambda trials, path: None)


def test_folder_holds_graph_weights_description_runner_and_tokenizer_and_digests_of_them(
    retriever_onnx, description, retriever_folder
):
    own = {"model.onnx", "model.onnx.data", "leank_onnx.json", "README.md", "channel_mask.safetensors"}
    own |= {"leank_onnx.py", "leank_onnx_session.py", "leank_onnx_cache.py"}
    travelling = {path.name for path in retriever_folder.iterdir()} - {"config.json", "model.safetensors"}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= travelling
    assert {path.name for path in retriever_onnx.iterdir()} == own | travelling
    names = (own | travelling) - {"leank_onnx.json"}
    digests = snapshot(retriever_onnx)
    assert description["files"] == {name: digests[name] for name in names}


def test_description_gives_the_order_of_heads_and_lanes_and_every_tensor_of_the_cache(
    retriever_onnx, description, retriever_mask
):
    mask = retriever_mask.channel_mask
    assert load_mask(retriever_onnx / "channel_mask.safetensors").channel_mask.equal(mask)
    assert description["head_permutation"] == [[1, 0], [0, 1]]
    assert description["widths"] == [[0, 7], [4, 4]] and "value_widths" not in description
    assert description["buckets"] == [
        [{"width": 0, "heads": [0, 1]}, {"width": 7, "heads": [1, 2]}],
        [{"width": 4, "heads": [0, 2]}],
    ]
    for layer, permutation in enumerate(description["head_permutation"]):
        for new, old in enumerate(permutation):
            order = sorted(range(16), key=lambda channel: not mask[layer, old, channel])
            assert description["channel_order"][layer][new] == order
    assert [description[name] for name in ("sink_size", "recent_size", "flush_size")] == [3, 6, 4]
    assert (description["weights"], description["quantization"]) == ("float32", None)
    keys = ("name", "layer", "region", "width", "part", "shape")
    assert [tuple(tensor[key] for key in keys) for tensor in description["inputs"][4:8]] == [
        ("past_key_values.0.window.key", 0, "window", None, "key", ["batch", 2, "window_slots", 16]),
        ("past_key_values.0.window.value", 0, "window", None, "value", ["batch", 2, 16, "window_slots"]),
        ("past_key_values.0.pruned.7.key", 0, "pruned", 7, "key", ["batch", 1, "pruned_slots", 7]),
        ("past_key_values.0.pruned.7.value", 0, "pruned", 7, "value", ["batch", 1, 16, "pruned_slots"]),
    ]


def test_weights_are_stored_once_beside_the_graph_which_tells_nothing_of_the_machine(
    retriever_onnx, retriever_half, retriever_folder
):
    # Padding to pages, and small constants of the graph, are not a second copy of the weights.
    weights = (retriever_folder / "model.safetensors").stat().st_size
    assert (retriever_onnx / "model.onnx.data").stat().st_size < 1.5 * weights
    assert (retriever_half / "model.onnx.data").stat().st_size < 0.75 * weights
    graph = onnx.load(retriever_onnx / "model.onnx", load_external_data=False).graph
    entries = [entry for tensor in graph.initializer for entry in tensor.external_data]
    assert {entry.value for entry in entries if entry.key == "location"} == {"model.onnx.data"}
    content = (retriever_onnx / "model.onnx").read_bytes()
    assert b".py" not in content
    assert str(retriever_onnx.parent).encode() not in content


def test_a_converted_checkpoint_gives_the_same_folder(retriever_onnx, retriever_half):
    def content(path):
        described = json.loads((path / "leank_onnx.json").read_text())
        described["model"].pop("name")
        for key in ("dtype", "weights", "inputs", "outputs", "sha256"):
            described.pop(key)
        others = ("model.onnx", "model.onnx.data", "README.md")
        files = {name: described["files"].pop(name) for name in others}
        return described, files.keys(), {file.name for file in path.iterdir()}

    assert content(retriever_half) == content(retriever_onnx)


def test_check_finds_what_is_not_the_models(retriever_onnx, checkpoint, tmp_path):
    pruned = load_pruned(checkpoint)
    (tmp_path / "model.onnx").write_bytes((retriever_onnx / "model.onnx").read_bytes())
    (tmp_path / "model.onnx.data").write_bytes(b"short")
    trials = make_trials(pruned)
    channels = make_trials(dataclasses.replace(pruned, channel_masks=pruned.channel_masks.flip(-1)))
    with torch.no_grad():
        pruned.model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    for held, path, message in (
        (make_trials(pruned), retriever_onnx, "logits of a prompt differ from PyTorch's"),
        (channels, retriever_onnx, "logits of a decode step differ from PyTorch's"),
        (trials, tmp_path, r"onnxruntime .* cannot load `.*model\.onnx`"),
    ):
        with refusal(message, exit_code=1):
            check_graph(held, path / "model.onnx")
    with torch.no_grad():
        pruned.model.model.layers[1].mlp.down_proj.weight.mul_(torch.inf)  # as what float16 overflows in
    with refusal("answers random tokens with what is no number in float32", "look at its weights"):
        make_trials(pruned)
    pruned.model.half()
    with refusal("answers random tokens with what is no number in float16", "with `--weights int8`"):
        make_trials(pruned)


def test_a_graph_without_sink_recent_tokens_and_pruned_region_is_tried_too(exported):
    folder, windows = exported("Mistral").folder, Windows(*CASES["Mistral"][1])
    dense, _, masks = build("Mistral", windows.sizes.values())
    assert check_graph(make_trials(PrunedModel(dense, masks, windows)), folder / "model.onnx") < 1e-4
    assert "onnxruntime" not in failed(folder)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, "--set stage1.steps=9", "--set stage1.steps has no effect"),
        ({}, "--prune eager", "no such option `--prune`"),
        ({"model_type": "mistral", "sliding_window": 8}, "", "attend within a sliding window only"),
        ({"model_type": "gpt2"}, "", "unknown architecture"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "", "`rope_type` is `dynamic`"),
    ],
    ids=["recipe", "option of export", "sliding window", "family", "rope that changes by length"],
)
def test_what_cannot_be_a_graph_is_refused_and_nothing_written(
    config, options, message, retriever_folder, mask_file, tmp_path
):
    source = shutil.copytree(retriever_folder, tmp_path / "source")
    edit_json(source / "config.json", **config)
    options = ["--mask", mask_file, *options.split(), "-o", tmp_path / "out"]
    assert message in rejected("export-onnx", source, *options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("changed", "value", "told"),
    [
        ("leank_convert.onnx.libraries._LIBRARIES", ("absent",), r"`absent`, which cannot.*convert\[onnx\]'"),
        ("onnxruntime.__version__", "1.9.1", r"onnxruntime 1\.9\.1 loads no graph.*--upgrade 'onnxruntime>="),
    ],
)
def test_missing_or_old_library_is_named_with_what_to_install(
    changed, value, told, retriever_onnx, tmp_path, monkeypatch
):
    monkeypatch.setattr(changed, value)
    for command in (["export-onnx", "testbed", "-o", str(tmp_path / "out")], ["verify", retriever_onnx]):
        assert re.search(told, rejected(*command), re.DOTALL)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoints_mask_windows_and_folder_are_not_to_be_replaced(checkpoint, mask_file, tmp_path):
    before = sorted(checkpoint.iterdir())
    own = "already is a LeanK checkpoint, with a mask and windows of its own\nhint: leave out `--mask`"
    for options, out, message in (
        (["--mask", mask_file], tmp_path / "out", own),
        (["--sink-size", "0"], tmp_path / "out", own),
        (["--overwrite"], checkpoint / "graph", "overlaps the source"),
    ):
        assert message in rejected("export-onnx", checkpoint, *options, "-o", out)
    assert list(tmp_path.iterdir()) == [] and sorted(checkpoint.iterdir()) == before


@pytest.mark.usefixtures("without_tracing")
def test_graph_is_replaced_only_when_that_is_asked_for_and_does_without_a_tokenizer(
    checkpoint, tmp_path, caplog
):
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    out = tmp_path / "out"
    done("export-onnx", bare, "-o", out)
    assert "`leank_onnx.py` will take tokens alone" in caplog.text
    (out / "model.onnx").write_text("first")
    assert "hint: name another folder" in rejected("export-onnx", bare, "-o", out)
    told = rejected("export-onnx", bare, "-o", out, "--overwrite")
    assert "model.onnx` is not what the export wrote" in told
    assert (out / "model.onnx").read_text() == "first"
    (out / "model.onnx").unlink()
    done("export-onnx", bare, "-o", out, "--overwrite")
    assert (out / "model.onnx").read_text() == ""


@pytest.mark.usefixtures("without_tracing")
def test_mask_that_training_left_in_the_folder_is_taken_and_kept(retriever_folder, mask_file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    shutil.copyfile(mask_file, out / "channel_mask.safetensors")
    done("export-onnx", retriever_folder, "-o", out)
    assert load_mask(out / "channel_mask.safetensors").channel_mask.equal(load_mask(mask_file).channel_mask)
    assert (out / "model.onnx").exists()


@pytest.mark.usefixtures("without_tracing")
def test_a_full_disk_is_named_and_leaves_nothing_behind(checkpoint, tmp_path, monkeypatch):
    def save(_, path):
        with export.full_disk_named(path):
            path.with_name("model.onnx.data").write_bytes(b"a part")
            raise OSError("problem writing element 24576 to file")  # numpy's, without a number

    monkeypatch.setattr(export, "write_graph", save)
    told = rejected("export-onnx", checkpoint, "-o", tmp_path / "out")
    assert "model.onnx.data` could not be written to its end: problem writing element 24576" in told
    assert "hint: most likely the disk is full" in told
    assert list(tmp_path.iterdir()) == []
