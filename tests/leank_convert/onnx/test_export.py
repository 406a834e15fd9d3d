"""`export --format onnx` writes a whole, described and checked folder, or nothing."""

import dataclasses
import errno
import gc
import hashlib
import json
import shutil
import struct
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from leank_convert.cli import main
from leank_convert.errors import LeanKError
from leank_convert.mask import load_mask, save_mask
from leank_convert.onnx import PrunedModel, check_available, export, libraries
from leank_convert.onnx.check import check_graph, make_trials
from leank_convert.onnx.leank_onnx import LeanKOnnx
from leank_convert.onnx.pruned_model import load_pruned


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def mask_file(retriever_mask, tmp_path):
    path = tmp_path.with_name(f"{tmp_path.name}-mask") / "channel_mask.safetensors"
    path.parent.mkdir()
    save_mask(retriever_mask, path)
    return path


@pytest.fixture(scope="session")
def folder(retriever_onnx):
    return retriever_onnx


@pytest.fixture(scope="session")
def checkpoint(retriever_half):
    return retriever_half / "checkpoint"


@pytest.fixture
def description(folder):
    return json.loads((folder / "leank_onnx.json").read_text())


@pytest.fixture
def without_tracing(monkeypatch):
    """Exports are instant, their graph an empty file."""

    monkeypatch.setattr(export, "write_graph", lambda pruned, path, *, opset: path.touch())
    monkeypatch.setattr(export, "check_graph", lambda trials, path: None)


def test_folder_holds_graph_weights_description_runner_and_tokenizer(folder, retriever_folder):
    own = {"model.onnx", "model.onnx.data", "leank_onnx.json", "leank_onnx.py", "README.md"}
    travelling = {path.name for path in retriever_folder.iterdir()} - {"config.json", "model.safetensors"}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= travelling
    assert {path.name for path in folder.iterdir()} == own | travelling | {"channel_mask.safetensors"}


def test_cache_tensors_are_described_by_layer_region_width_and_part(description):
    described = {
        tensor["name"]: (tensor["layer"], tensor["region"], tensor["width"], tensor["part"], tensor["shape"])
        for tensor in description["inputs"][4:]
    }
    assert described == {
        "past_key_values.0.window.key": (0, "window", None, "key", ["batch", 2, "window_slots", 16]),
        "past_key_values.0.window.value": (0, "window", None, "value", ["batch", 2, 16, "window_slots"]),
        "past_key_values.0.pruned.7.key": (0, "pruned", 7, "key", ["batch", 1, "pruned_slots", 7]),
        "past_key_values.0.pruned.7.value": (0, "pruned", 7, "value", ["batch", 1, 16, "pruned_slots"]),
        "past_key_values.1.window.key": (1, "window", None, "key", ["batch", 2, "window_slots", 16]),
        "past_key_values.1.window.value": (1, "window", None, "value", ["batch", 2, 16, "window_slots"]),
        "past_key_values.1.pruned.4.key": (1, "pruned", 4, "key", ["batch", 2, "pruned_slots", 4]),
        "past_key_values.1.pruned.4.value": (1, "pruned", 4, "value", ["batch", 2, 16, "pruned_slots"]),
    }


def test_description_gives_the_heads_order_and_each_lanes_channel(folder, description, retriever_mask):
    mask = retriever_mask.channel_mask
    assert load_mask(folder / "channel_mask.safetensors").channel_mask.equal(mask)
    assert description["head_permutation"] == [[1, 0], [0, 1]]
    assert description["widths"] == [[0, 7], [4, 4]]
    assert description["buckets"] == [
        [{"width": 0, "heads": [0, 1]}, {"width": 7, "heads": [1, 2]}],
        [{"width": 4, "heads": [0, 2]}],
    ]
    for layer, permutation in enumerate(description["head_permutation"]):
        for new, old in enumerate(permutation):
            kept = [channel for channel in range(16) if mask[layer, old, channel]]
            dropped = [channel for channel in range(16) if not mask[layer, old, channel]]
            assert description["channel_order"][layer][new] == kept + dropped
    sizes = [description[name] for name in ("sink_size", "recent_size", "flush_size")]
    assert sizes == [3, 6, 4]
    assert (description["weights"], description["quantization"]) == ("float32", None)


def test_description_has_the_digest_of_every_file_that_a_user_does_not_edit(folder, description):
    names = {path.name for path in folder.iterdir()} - {"README.md", "leank_onnx.json"}
    assert description["files"] == {name: digest(folder / name) for name in names}


def test_weights_are_stored_once_and_beside_the_graph(folder, retriever_folder):
    with (retriever_folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    num_weights = sum(
        int(np.prod(tensor["shape"])) for name, tensor in header.items() if name != "__metadata__"
    )
    # Padding to pages, and small constants of the graph, are not a second copy of the weights.
    assert (folder / "model.onnx.data").stat().st_size < 1.5 * 4 * num_weights
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    stored = {
        entry.value
        for tensor in graph.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert stored == {"model.onnx.data"}


def test_graph_tells_nothing_of_the_machine_that_wrote_it(folder):
    content = (folder / "model.onnx").read_bytes()
    assert b".py" not in content
    assert str(folder.parent).encode() not in content


def test_float16_graph_is_as_close_to_the_original_model_as_pytorchs_float16(
    folder, retriever_half, retriever_folder
):
    half = retriever_half / "onnx"
    weights = [(path / "model.onnx.data").stat().st_size for path in (half, folder)]
    assert weights[0] < 0.7 * weights[1]
    tokens = torch.randint(3, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, torchs = (
            AutoModelForCausalLM.from_pretrained(retriever_folder, dtype=dtype)(tokens).logits.float()
            for dtype in (torch.float32, torch.float16)
        )
    (logits,) = LeanKOnnx(half, threads=1).start().feed(tokens.tolist(), all_logits=True)
    assert logits.dtype == np.float16
    assert (torch.from_numpy(logits).float() - exact).abs().max() <= 2 * (torchs - exact).abs().max()


def test_a_converted_checkpoint_gives_the_same_folder(folder, retriever_half):
    def content(path):
        described = json.loads((path / "leank_onnx.json").read_text())
        described["model"].pop("name")
        for key in ("dtype", "weights", "inputs", "outputs"):
            described.pop(key)
        files = {name: described["files"].pop(name) for name in ("model.onnx", "model.onnx.data")}
        return described, files.keys(), {file.name for file in path.iterdir()}

    assert content(retriever_half / "onnx") == content(folder)


@pytest.mark.filterwarnings("default")
def test_a_graph_of_centred_keys_answers_as_its_checkpoint_and_others_do_not(retriever_centred, folder):
    """Windows of nine tokens, so that most of what is fed is pruned: a dropped channel counts as its mean."""
    rows = [torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(0)) for count in (40, 12)]
    model = AutoModelForCausalLM.from_pretrained(retriever_centred / "checkpoint", trust_remote_code=True)
    ours, plain = (
        LeanKOnnx(path, threads=1).start().generate([row.tolist() for row in rows], max_new_tokens=20)
        for path in (retriever_centred / "onnx", folder)
    )
    for row, answer in zip(rows, ours, strict=True):
        expected = model.generate(
            row[None], max_new_tokens=20, do_sample=False, pad_token_id=0, prune="deferred"
        )
        assert answer == expected[0, len(row) :].tolist()
    assert ours != plain


def test_tracing_leaves_weights_as_they_were_and_held_by_the_model_alone(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    masks = torch.zeros(1, 2, 16, dtype=torch.bool)
    masks[0, 1, ::3] = True
    export.write_graph(PrunedModel(model, masks, 3, 6, 4), tmp_path / "model.onnx", opset=23)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(weight.equal(before[name]) for name, weight in after.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight

    held = {name: StorageWeakRef(weight.untyped_storage()) for name, weight in after.items()}
    del after
    model.to("meta")
    gc.collect()
    assert [name for name, storage in held.items() if not storage.expired()] == []


def test_check_finds_weights_that_are_not_the_models(folder, checkpoint):
    pruned = load_pruned(checkpoint)
    with torch.no_grad():
        pruned.model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    with pytest.raises(LeanKError, match="logits of a prompt differ from PyTorch's") as caught:
        check_graph(make_trials(pruned), folder / "model.onnx")
    assert caught.value.exit_code == 1


def test_check_finds_channels_that_are_not_the_masks(folder, checkpoint):
    pruned = load_pruned(checkpoint)
    other = dataclasses.replace(pruned, channel_masks=pruned.channel_masks.flip(-1))
    with pytest.raises(LeanKError, match="logits of a decode step differ from PyTorch's"):
        check_graph(make_trials(other), folder / "model.onnx")


def test_check_tells_what_onnxruntime_cannot_run(folder, checkpoint, tmp_path):
    spoiled = shutil.copytree(folder, tmp_path / "spoiled")
    (spoiled / "model.onnx.data").write_bytes(b"short")
    with pytest.raises(LeanKError, match=r"onnxruntime .* cannot load `.*model\.onnx`") as caught:
        check_graph(make_trials(load_pruned(checkpoint)), spoiled / "model.onnx")
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        (["--format", "onnx", "--opset", "17"], "opset 17 is not supported", "leave `--opset` out: 23"),
        (
            ["--format", "onnx", "--prune", "eager"],
            "--prune goes with checkpoints",
            "see `leank-convert export --help`",
        ),
        (["--format", "onnx", "--push-to-hub", "a/b"], "--push-to-hub uploads checkpoints", "`hf upload`"),
        (["--opset", "23"], "--opset goes with --format onnx", "see `leank-convert export --help`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together_are_refused(
    options, message, remedy, retriever_folder, mask_file, tmp_path
):
    result = run("export", retriever_folder, "--mask", mask_file, *options, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.stderr
    assert remedy in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_library_is_named_with_the_extra_to_install(
    retriever_folder, mask_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(libraries, "_LIBRARIES", ("onnx", "onnxruntime_that_is_not_here"))
    arguments = ["--mask", mask_file, "--format", "onnx", "-o", tmp_path / "out"]
    result = run("export", retriever_folder, *arguments)
    assert result.exit_code == 2
    assert "`onnxruntime_that_is_not_here`, which cannot be imported" in result.stderr
    assert "hint: pip install 'leank-convert[onnx]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("library", "version", "opset", "fits"),
    [
        ("onnxruntime", "1.22.1", 23, False),
        ("onnxruntime", "1.22.1", 22, True),
        ("onnxruntime", "1.23.2", 24, False),
        ("onnxruntime", "1.9.0", 18, False),
        ("onnx", "1.18.0", 24, False),
    ],
)
def test_opset_that_a_library_is_too_old_for_is_refused_with_both_remedies(
    library, version, opset, fits, monkeypatch
):
    monkeypatch.setattr(f"{library}.__version__", version)
    if library == "onnx":
        monkeypatch.setattr("onnx.defs.onnx_opset_version", lambda: 23)
    if fits:
        check_available(opset)
        return
    with pytest.raises(LeanKError, match=f"opset {opset} needs a later `{library}` than {version}") as caught:
        check_available(opset)
    assert caught.value.hint == f"pip install --upgrade {library}, or pass a lower `--opset`"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, "attend within a sliding window only"),
        ({"model_type": "gpt2"}, "unknown architecture"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "`rope_type` is `dynamic`"),
    ],
    ids=["sliding window", "unknown family", "rope that changes with the length"],
)
def test_model_that_cannot_be_a_graph_is_refused_and_nothing_written(
    config, message, retriever_folder, mask_file, tmp_path, edit_json
):
    source = shutil.copytree(retriever_folder, tmp_path / "source")
    edit_json(source / "config.json", **config)
    result = run("export", source, "--mask", mask_file, "--format", "onnx", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("option", ["mask", "sink_size"])
def test_checkpoints_own_mask_and_windows_are_not_to_be_replaced(option, checkpoint, mask_file, tmp_path):
    given = ["--mask", mask_file] if option == "mask" else ["--sink-size", "0"]
    result = run("export", checkpoint, *given, "--format", "onnx", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "already is a LeanK checkpoint, with a mask and windows of its own" in result.stderr
    assert "hint: leave out --mask" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_graph_is_not_written_into_the_checkpoint_it_is_made_of(checkpoint):
    before = sorted(checkpoint.iterdir())
    result = run("export", checkpoint, "--format", "onnx", "-o", checkpoint / "graph", "--overwrite")
    assert result.exit_code == 2
    assert "overlaps the source" in result.stderr
    assert sorted(checkpoint.iterdir()) == before


@pytest.mark.usefixtures("without_tracing")
def test_graph_is_replaced_only_when_that_is_asked_for(checkpoint, tmp_path):
    arguments = ["export", checkpoint, "--format", "onnx", "-o", tmp_path / "out"]
    assert run(*arguments).exit_code == 0
    (tmp_path / "out" / "model.onnx").write_text("first")
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert "hint: name another folder" in refused.stderr
    assert (tmp_path / "out" / "model.onnx").read_text() == "first"
    assert run(*arguments, "--overwrite").exit_code == 0
    assert (tmp_path / "out" / "model.onnx").read_text() == ""


@pytest.mark.usefixtures("without_tracing")
def test_mask_that_training_left_in_the_folder_is_taken_and_kept(retriever_folder, mask_file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    shutil.copyfile(mask_file, out / "channel_mask.safetensors")
    result = run("export", retriever_folder, "--format", "onnx", "-o", out)
    assert result.exit_code == 0, result.output
    assert load_mask(out / "channel_mask.safetensors").channel_mask.equal(load_mask(mask_file).channel_mask)
    assert (out / "model.onnx").exists()


def test_disk_that_is_full_while_weights_are_written_is_no_traceback(checkpoint, tmp_path, monkeypatch):
    def save(path, external_data):
        path.with_name("model.onnx.data").write_bytes(b"a part")
        raise OSError("problem writing element 24576 to file")  # numpy's, without a number

    program = SimpleNamespace(save=save)
    monkeypatch.setattr(export, "write_graph", lambda pruned, path, opset: export._save(program, path))
    result = run("export", checkpoint, "--format", "onnx", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "model.onnx.data` could not be written to its end: problem writing element 24576" in result.stderr
    assert "hint: most likely the disk is full" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_tracing")
def test_full_disk_leaves_nothing_behind(retriever_folder, mask_file, tmp_path, monkeypatch):
    def fill(trials, path):
        raise OSError(errno.ENOSPC, "No space left on device", "model.onnx.data")

    monkeypatch.setattr(export, "check_graph", fill)
    arguments = ["--mask", mask_file, "--format", "onnx", "-o", tmp_path / "out"]
    result = run("export", retriever_folder, *arguments)
    assert result.exit_code == 2
    assert result.stderr == "error: `model.onnx.data`: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_tracing")
def test_model_without_a_fast_tokenizer_is_exported_with_a_warning(checkpoint, tmp_path, caplog):
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    result = run("export", bare, "--format", "onnx", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "`leank_onnx.py` will take tokens alone" in caplog.text
