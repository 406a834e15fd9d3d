"""`verify` of an ONNX folder: every file, key and weight that is not what was exported is found and named."""

import hashlib
import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx.external_data_helper import ExternalDataInfo
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from safetensors.torch import load_file, save_file

from leank_convert.cli import main
from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask, load_mask, save_mask
from leank_convert.onnx import export_onnx, write
from leank_convert.verify import verify_artifact

SIZES = {"sink_size": 3, "recent_size": 6, "flush_size": 4}
# The heads of layer 0 change places, layer 1 has one bucket.
WIDTHS = [[7, 0], [4, 4]]
WEIGHTS = "model.onnx.data"


@pytest.fixture(scope="session")
def mask():
    generator = torch.Generator().manual_seed(0)
    values = torch.zeros(2, 2, 16, dtype=torch.bool)
    for layer, row in enumerate(WIDTHS):
        for head, width in enumerate(row):
            values[layer, head, torch.randperm(16, generator=generator)[:width]] = True
    return ChannelMask(values)


@pytest.fixture(scope="session")
def exported(tmp_path_factory, retriever_folder, mask):
    """Not to be changed."""
    return export_onnx(retriever_folder, mask, tmp_path_factory.mktemp("verify") / "out", **SIZES)


@pytest.fixture
def folder(exported, tmp_path):
    """A copy, to be spoiled."""
    return shutil.copytree(exported, tmp_path / "out")


@pytest.fixture
def changed_source(retriever_folder, tmp_path):
    """Build the source with one tensor changed."""

    def build(name, edit):
        copy = shutil.copytree(retriever_folder, tmp_path / "source")
        tensors = load_file(copy / "model.safetensors")
        tensors[name] = edit(tensors[name]).contiguous()
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        return copy

    return build


def failed(folder, source=None):
    report = verify_artifact(folder, source)
    assert report.ok == all(check.ok for check in report.checks)
    return {check.name: check.detail for check in report.checks if not check.ok}


def made(folder, source=None):
    return [check.name for check in verify_artifact(folder, source).checks]


def read(folder):
    return json.loads((folder / "leank_onnx.json").read_text())


def describe(folder, edit):
    """Change the description."""
    content = read(folder)
    edit(content)
    (folder / "leank_onnx.json").write_text(json.dumps(content))


def bless(folder):
    """Bring the digests up to date, so that what lies behind them is looked at alone."""

    def edit(content):
        for name in content["files"]:
            content["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()

    describe(folder, edit)


def rewrite(folder, edit):
    """Change the graph, its weights left where they are."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    edit(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    bless(folder)


def test_an_export_verifies_against_its_source(exported, retriever_folder):
    report = verify_artifact(exported, retriever_folder)
    assert failed(exported, retriever_folder) == {}
    names = [check.name for check in report.checks]
    digests = {f"digest of {name}" for name in read(exported)["files"]}
    assert digests <= set(names)
    own = ["description", "heads", "mask file", "external data", "graph", "tensors", "onnxruntime", "regions"]
    source = ["source: sizes", "source: prompt", "source: keys and values", "source: logits"]
    assert [name for name in names if name not in digests] == own + source
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert [name for name in made(exported) if name not in digests] == own


def test_a_float16_export_verifies_against_its_checkpoint(mask, retriever_folder, tmp_path):
    checkpoint = export_checkpoint(retriever_folder, mask, tmp_path / "checkpoint", **SIZES)
    out = export_onnx(checkpoint, None, tmp_path / "out", dtype="float16")
    for source in (checkpoint, retriever_folder):
        assert failed(out, source) == {}


def test_an_export_under_another_rope_verifies_against_the_model_as_it_is(mask, retriever_folder, tmp_path):
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    out = export_onnx(retriever_folder, mask, tmp_path / "out", config_overrides=rope)
    assert failed(out, retriever_folder) == {}


def test_a_quantized_graph_is_told_by_how_much_it_differs(folder, retriever_folder, changed_source):
    quantizer = MatMulNBitsQuantizer(onnx.load(folder / "model.onnx"), bits=8, block_size=16)
    quantizer.process()
    for name in ("model.onnx", WEIGHTS):
        (folder / name).unlink()
    quantizer.model.save_model_to_file(str(folder / "model.onnx"), use_external_data_format=True)
    bless(folder)
    details = failed(folder)
    assert details.keys() == {"graph"}
    assert "`weights` is `float32`; `model.onnx` has `MatMulNBits`" in details["graph"]
    describe(folder, lambda content: content.update(weights="int8"))
    assert failed(folder, retriever_folder) == {}
    *_, last = verify_artifact(folder, retriever_folder).checks
    assert last.name == "source: logits"
    assert last.detail.startswith("weights of int8 make them differ by ")
    other = changed_source("model.layers.0.self_attn.k_proj.weight", lambda tensor: tensor.flip(0))
    assert "layer 0: keys differ" in failed(folder, other)["source: keys and values"]


def test_weights_that_are_called_quantized_and_are_not_are_found(folder):
    describe(folder, lambda content: content.update(weights="int4"))
    assert "`weights` is `int4`; `model.onnx` has no quantized product" in failed(folder)["graph"]


def test_missing_keys_are_all_named(folder):
    def edit(content):
        del content["eos_token_ids"], content["model"]["head_dim"], content["inputs"][2]["shape"]

    describe(folder, edit)
    (detail,) = failed(folder).values()
    assert "lacks `model.head_dim`, `eos_token_ids`, `inputs.2.shape`" in detail
    assert made(folder) == ["description"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "`format_version` is `2`; this release reads 1"),
        ({"flush_size": 0}, "`flush_size` is `0`: input should be greater than or equal to 1"),
        ({"sink_size": True}, "`sink_size` is `True`: input should be a valid integer"),
        ({"dtype": "bfloat16"}, "`dtype` is `'bfloat16'`: input should be 'float32' or 'float16'"),
        ({"model": 3}, "`model` is `3`"),
        ({"widths": [[0, None], [4, 4]]}, "`widths.0.1` is `None`"),
        ({"buckets": [[{"width": 4, "heads": [0]}]]}, "`buckets.0.0.heads` is `[0]`"),
        ({"files": {"model.onnx": "0"}}, "`files` does not name `channel_mask.safetensors`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_description_with_nonsense_in_it_is_found(changes, message, folder):
    describe(folder, lambda content: content.update(changes))
    details = failed(folder)
    assert message in details["description"]
    assert made(folder) == ["description"]


@pytest.mark.parametrize("content", ["", "[]", "{", None])
def test_a_description_that_cannot_be_read_is_found(content, folder):
    path = folder / "leank_onnx.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    details = failed(folder)
    assert details.keys() == {"description"}
    assert str(path) in details["description"]


def swap(rows, layer=0):
    return [row[::-1] if index == layer else row for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("key", "edit", "message"),
    [
        ("widths", swap, "`widths[0]` is [7, 0]: not 2 numbers ascending within 0 and 16"),
        ("widths", lambda rows: [rows[0], [4, 17]], "`widths[1]` is [4, 17]"),
        ("widths", lambda rows: [rows[0], [4]], "`widths[1]` is [4]"),
        ("widths", lambda rows: rows[:1], "`widths` has 1 layers, the model 2"),
        ("widths", lambda rows: [[0, 8], rows[1]], "the widths are [0, 8]"),
        ("buckets", swap, "`buckets[0]` is [{'width': 7, 'heads': [1, 2]}"),
        ("channel_order", lambda orders: [orders[0], orders[1][:1]], "`channel_order[1]` has 1 heads"),
        (
            "channel_order",
            lambda orders: [orders[0], [[0] * 16, orders[1][1]]],
            "no order of the 16 channels",
        ),
        ("channel_order", lambda orders: [orders[0], swap(orders[1])], "`channel_order[1][0]` is"),
        ("head_permutation", lambda rows: [[1, 1], rows[1]], "`head_permutation[0]` is [1, 1], no perm"),
        ("head_permutation", lambda rows: swap(rows, 1), "[1, 0], not stable within a bucket"),
    ],
)
def test_heads_that_contradict_one_another_are_found(key, edit, message, folder):
    describe(folder, lambda content: content.update({key: edit(content[key])}))
    details = failed(folder)
    assert details.keys() == {"heads"}
    assert message in details["heads"]
    # The files are looked at all the same, what needs the heads is not.
    assert {"digest of model.onnx", "external data", "graph"} <= set(made(folder))
    assert not {"mask file", "tensors", "onnxruntime"} & set(made(folder))


def test_other_channels_than_the_masks_are_found(folder, retriever_folder):
    other = load_mask(folder / "channel_mask.safetensors").channel_mask.flip(-1)
    kept = [sorted((~mask).nonzero().flatten().tolist()) for mask in other[1]]
    order = [mask.nonzero().flatten().tolist() + rest for mask, rest in zip(other[1], kept, strict=True)]
    describe(folder, lambda content: content["channel_order"].__setitem__(1, order))
    details = failed(folder, retriever_folder)
    assert details.keys() == {"mask file", "source: keys and values"}
    assert "layer 1 keeps other channels than `channel_order`" in details["mask file"]
    assert "layer 1: keys differ from the source's" in details["source: keys and values"]


def test_a_mask_file_of_another_model_is_found(folder):
    save_mask(ChannelMask(torch.ones(3, 2, 16, dtype=torch.bool)), folder / "channel_mask.safetensors")
    bless(folder)
    assert "has shape [3, 2, 16]; the graph has [2, 2, 16]" in failed(folder)["mask file"]


def test_changed_and_missing_files_are_found_and_an_edited_readme_is_none(folder):
    (folder / "README.md").write_text("mine")
    (folder / "leank_onnx.py").write_text("import os\n")
    (folder / "tokenizer.json").unlink()
    details = failed(folder)
    assert details.keys() == {"digest of leank_onnx.py", "digest of tokenizer.json"}
    assert "was changed: its SHA-256" in details["digest of leank_onnx.py"]
    assert "is missing" in details["digest of tokenizer.json"]


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname"])
def test_a_digest_cannot_point_outside(name, folder):
    (folder.parent / "secret").touch()
    describe(folder, lambda content: content["files"].update({name: "0"}))
    assert "is missing" in failed(folder)[f"digest of {name}"]


def test_weights_cut_short_are_told_with_the_tensor_that_lacks(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    details = failed(folder)
    assert details.keys() == {f"digest of {WEIGHTS}", "external data"}
    assert f"is truncated: it has {len(content) // 2} bytes, and tensor `" in details["external data"]


def test_weights_that_are_missing_or_not_listed_are_found(folder):
    (folder / WEIGHTS).unlink()
    assert f"`{folder / WEIGHTS}` is missing: `" in failed(folder)["external data"]
    describe(folder, lambda content: content["files"].pop(WEIGHTS))
    assert f"`files` does not name `{WEIGHTS}`" in failed(folder)["external data"]


def test_a_graph_cut_short_is_found(folder):
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[: len(content) // 2])
    bless(folder)
    details = failed(folder)
    assert details.keys() == {"external data"}
    assert "is truncated or no ONNX graph" in details["external data"]


def test_a_graph_that_is_missing_is_found(folder):
    (folder / "model.onnx").unlink()
    assert failed(folder).keys() == {"digest of model.onnx", "external data"}


def test_a_graph_that_breaks_the_rules_is_found(folder):
    rewrite(folder, lambda model: model.graph.node.pop(0))
    details = failed(folder)
    assert details.keys() == {"graph"}
    assert "`model.onnx` breaks the rules of ONNX" in details["graph"]


def test_another_opset_than_the_graphs_is_found(folder):
    describe(folder, lambda content: content.update(opset=22))
    assert "`model.onnx` has opset 23; `leank_onnx.json`: 22" in failed(folder)["graph"]


@pytest.mark.parametrize(
    ("part", "edit", "message"),
    [
        (
            "inputs",
            lambda tensor: tensor.update(dtype="float16"),
            "the widths give `past_key_values.0",
        ),
        ("inputs", lambda tensor: tensor.update(width=8), "width 8, part key); the widths give"),
        ("inputs", lambda tensor: tensor.update(shape=["batch", 1, "pruned_slots", 8]), "'pruned_slots', 8]"),
        ("outputs", lambda tensor: tensor.update(name="present.9.key"), "number 3 is `present.9.key`"),
    ],
    ids=["dtype", "width", "shape", "name"],
)
def test_a_tensor_described_otherwise_than_the_heads_are_is_found(part, edit, message, folder):
    # Tensor 6 of the inputs is the pruned key of the bucket of width 7.
    describe(folder, lambda content: edit(content[part][6 if part == "inputs" else 3]))
    details = failed(folder)
    assert details.keys() == {"tensors"}
    assert message in details["tensors"]


def test_a_tensor_that_is_not_described_is_found(folder):
    describe(folder, lambda content: content["outputs"].pop())
    assert "there are 4; the widths give 5" in failed(folder)["tensors"]


def test_a_graph_whose_tensors_are_not_those_described_is_found(folder):
    def edit(model):
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "tokens"

    rewrite(folder, edit)
    details = failed(folder)
    assert "number 0 is `input_ids` (int64 ['batch', 'tokens'])" in details["tensors"]
    assert "the description says `input_ids` (int64 ['batch', 'new_tokens'])" in details["tensors"]


def test_weights_that_are_no_numbers_are_found(folder):
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    place = ExternalDataInfo(next(tensor for tensor in graph.initializer if "embed" in tensor.name))
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(place.offset)
        file.write(np.full(place.length // 4, np.nan, np.float32).tobytes())
    bless(folder)
    details = failed(folder)
    assert details.keys() == {"onnxruntime"}
    assert "`logits` holds numbers that are not finite" in details["onnxruntime"]


@pytest.mark.parametrize(
    ("size", "what"), [(2, "slot 2 of the window region counts"), (4, "slot 3 of the win")]
)
def test_another_sink_than_the_graphs_is_found(size, what, folder):
    describe(folder, lambda content: content.update(sink_size=size))
    details = failed(folder)
    assert details.keys() == {"regions"}
    assert what in details["regions"]


@pytest.mark.parametrize("sizes", [(0, 0, 1), (0, 3, 2), (2, 0, 9)])
def test_graphs_without_sink_or_recent_tokens_or_pruned_heads_verify(sizes, retriever_folder, tmp_path):
    mask = torch.zeros(2, 2, 16, dtype=torch.bool)
    mask[0, 0] = sizes[0] == 0
    names = dict(zip(SIZES, sizes, strict=True))
    out = export_onnx(retriever_folder, ChannelMask(mask), tmp_path / "out", **names)
    assert failed(out, retriever_folder) == {}


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("model.layers.1.self_attn.k_proj.weight", {"source: keys and values", "source: logits"}),
        ("model.layers.0.self_attn.v_proj.weight", {"source: keys and values", "source: logits"}),
        ("lm_head.weight", {"source: logits"}),
    ],
)
def test_weights_that_are_not_the_sources_are_found(name, checks, exported, changed_source):
    assert failed(exported, changed_source(name, lambda tensor: tensor * 1.01)).keys() == checks


def test_a_checkpoint_that_also_has_a_graph_is_verified_as_a_checkpoint(mask, retriever_folder, tmp_path):
    checkpoint = export_checkpoint(retriever_folder, mask, tmp_path / "checkpoint", **SIZES)
    (checkpoint / "model.onnx").touch()
    assert "header metadata" in made(checkpoint)


def test_a_source_of_other_sizes_is_found(exported, source_model):
    source = source_model("qwen2")
    details = failed(exported, source)
    assert details == {"source: sizes": f"`model.model_type` is `llama`; `{source}` has `qwen2`"}


def test_a_source_that_is_none_is_an_error(exported, tmp_path):
    with pytest.raises(LeanKError, match="does not exist"):
        verify_artifact(exported, tmp_path / "missing")


def test_missing_packages_are_named_with_the_extra_to_install(exported, monkeypatch):
    monkeypatch.setattr(write, "_LIBRARIES", ("onnx", "onnxruntime_that_is_not_here"))
    result = CliRunner().invoke(main, ["verify", str(exported)])
    assert result.exit_code == 2
    assert "`onnxruntime_that_is_not_here`, which cannot be imported" in result.stderr
    assert "hint: pip install 'leank-convert[onnx]'" in result.stderr


def test_the_command_reports_line_by_line_and_its_exit_code_tells(folder, retriever_folder):
    result = CliRunner().invoke(main, ["verify", str(folder), "--source", str(retriever_folder), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True
    (folder / "leank_onnx.py").write_text("raise SystemExit\n")
    result = CliRunner().invoke(main, ["verify", str(folder)])
    assert result.exit_code == 1
    assert "FAIL  digest of leank_onnx.py" in result.stdout
    assert "ok    onnxruntime: a decode step behind 12 tokens" in result.stdout
