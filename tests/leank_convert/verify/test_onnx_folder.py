"""`verify` of an ONNX folder: what is not as it was exported is found and named, and other answers, too."""

import json
import re
import shutil

import numpy as np
import onnx
import pytest
from onnx.external_data_helper import ExternalDataInfo

from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.inspection import inspect_artifact
from leank_convert.mask import MASK_FILE_NAME
from leank_convert.onnx import export_onnx
from leank_convert.verify import verify_checkpoint
from tests.checks import edit_json, edit_tensors, failed, fitting_mask, prune_values, refusal, remove, write
from tests.leank_convert.onnx.conftest import bless, change_description

DESCRIPTION, GRAPH, WEIGHTS = "leank_onnx.json", "model.onnx", "model.onnx.data"


@pytest.fixture
def out(retriever_onnx, tmp_path):
    """A copy of an exported folder, to be spoiled."""
    return shutil.copytree(retriever_onnx, tmp_path / "out")


def made(out, source=None):
    return [check.name for check in verify_checkpoint(out, source).checks]


def describe(**values):
    return lambda out: change_description(out, **values)


def take_first_node_away(out):
    """Its weights are left where they are."""
    model = onnx.load(out / GRAPH, load_external_data=False)
    model.graph.node.pop(0)
    (out / GRAPH).write_bytes(model.SerializeToString())
    bless(out)


def cut(name):
    return lambda out: (out / name).write_bytes((out / name).read_bytes()[:-9000])


def write_no_numbers(out):
    graph = onnx.load(out / GRAPH, load_external_data=False).graph
    place = ExternalDataInfo(next(tensor for tensor in graph.initializer if "embed" in tensor.name))
    with (out / WEIGHTS).open("r+b") as file:
        file.seek(place.offset)
        file.write(np.full(place.length // 4, np.nan, np.float32).tobytes())
    bless(out)


# By their names: what is done, the check that fails, and a part of what it says.
SPOILED = {
    "no description": (remove(DESCRIPTION), "description", f"out/{DESCRIPTION}"),
    "a list as description": (write(DESCRIPTION, "[]"), "description", f"out/{DESCRIPTION}"),
    "another format": (describe(format_version=2), "description", "is 2, this program reads 1"),
    "another value": (lambda out: edit_json(out / DESCRIPTION, sink_size=2), "description", "was changed"),
    "no mask": (remove(MASK_FILE_NAME), "mask file", MASK_FILE_NAME),
    "weights cut": (cut(WEIGHTS), "onnxruntime", "cannot load"),
    "no weights": (remove(WEIGHTS), "onnxruntime", f"{WEIGHTS}` is missing"),
    "no graph": (remove(GRAPH), "onnxruntime", f"{GRAPH}` is missing"),
    "no first node": (take_first_node_away, "onnxruntime", "cannot load"),
    "another dtype": (describe(dtype="float16"), "onnxruntime", "onnxruntime cannot run the graph"),
    "no numbers": (write_no_numbers, "onnxruntime", "holds numbers that are not finite"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_what_is_not_as_it_was_exported_is_found_and_ends_what_needs_it(kind, out):
    spoil, check, said = SPOILED[kind]
    spoil(out)
    details = failed(out)
    assert said in details[check]
    assert [name for name in details if not name.startswith("digest of ")] == [check]
    if check == "description":
        assert made(out) == ["description"]


def test_changed_and_missing_files_are_found(out):
    (out / "README.md").write_text("mine")
    (out / "leank_onnx_cache.py").write_text("import os\n")
    (out / "tokenizer.json").unlink()
    (out.parent / "secret").touch()
    change_description(out, files={**read_json(out / DESCRIPTION)["files"], "../secret": "0"})
    details = failed(out)
    names = ("README.md", "leank_onnx_cache.py", "tokenizer.json", "../secret")
    assert details.keys() == {f"digest of {name}" for name in names}
    for changed in names[:2]:
        assert "was changed: its SHA-256" in details[f"digest of {changed}"]
    assert "is missing" in details["digest of tokenizer.json"]
    assert "is missing" in details["digest of ../secret"]  # digests cannot point outside


def test_an_export_verifies_with_and_without_its_source(retriever_onnx, retriever_folder):
    report = verify_checkpoint(retriever_onnx, retriever_folder)
    own = ["description", "digests", "mask file", "onnxruntime"]
    source = ["source: sizes", "source: logits"]
    assert [check.name for check in report.checks] == own + source
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert made(retriever_onnx) == own


@pytest.mark.parametrize("exporter", ["retriever_half", "retriever_onnx"])
def test_an_export_in_float16_or_of_centred_keys_verifies_against_checkpoint_and_model(
    exporter, retriever_folder, retriever_centred, request
):
    for source in (retriever_centred / "checkpoint", retriever_folder):
        assert failed(request.getfixturevalue(exporter), source) == {}


def test_a_graph_of_pruned_v_verifies_and_is_described(source_model, tmp_path):
    # Q, K and V in one tensor, partly rotated, to whose dtype the fold is rounded.
    source = source_model("phi3", dtype="bfloat16", num_hidden_layers=1, pad_token_id=0)
    (source / "tokenizer.json").unlink()
    mask = prune_values(fitting_mask(source), source)
    checkpoint = export_checkpoint(source, mask, tmp_path / "checkpoint")
    out = export_onnx(checkpoint, None, tmp_path / "out")
    assert failed(out, source) == failed(out, checkpoint) == {}
    facts, expected = inspect_artifact(out), inspect_artifact(checkpoint)
    for key in ("value_widths", "value_pruning_ratio"):
        assert facts[key] == expected[key] != 0
    assert f"V by {mask.value_pruning_ratio:.1%}" in (out / "README.md").read_text()


def test_a_quantized_export_under_another_rope_says_by_how_much_it_differs(retriever_int8):
    report = verify_checkpoint(retriever_int8, retriever_int8.with_name("source"))
    assert report.ok
    assert report.checks[-1].name == "source: logits"
    assert re.match(r"weights of int8 change them by \d\.\de-\d\d of their norm \(", report.checks[-1].detail)


@pytest.mark.parametrize(
    ("exporter", "name", "edit"),
    [
        ("retriever_onnx", "model.layers.1.self_attn.k_proj.weight", lambda tensor: tensor * 1.01),
        ("retriever_onnx", "lm_head.weight", lambda tensor: tensor * 1.01),
        ("retriever_int8", "model.layers.0.self_attn.k_proj.weight", lambda tensor: tensor.flip(0)),
        ("retriever_int8", "model.layers.0.mlp.up_proj.weight", lambda t: t.flip(0)),
    ],
)
def test_weights_that_are_not_the_sources_are_found(exporter, name, edit, request, retriever_folder, copy_of):
    folder, is_int8 = request.getfixturevalue(exporter), exporter == "retriever_int8"
    source = copy_of(folder.with_name("source") if is_int8 else retriever_folder)
    edit_tensors(source / "model.safetensors", **{name: edit})
    details = failed(folder, source)
    assert details.keys() == {"source: logits"}
    assert "other weights" in details["source: logits"] or not is_int8


def test_a_source_of_other_sizes_or_none_is_found(retriever_onnx, source_model, tmp_path):
    source = source_model("qwen2")
    details = failed(retriever_onnx, source)
    assert details == {"source: sizes": f"`model.model_type` is 'llama'; `{source}` has 'qwen2'"}
    with refusal("does not exist"):
        verify_checkpoint(retriever_onnx, tmp_path / "missing")


def test_a_checkpoint_that_also_has_a_graph_is_verified_as_a_checkpoint(retriever_centred, copy_of):
    checkpoint = copy_of(retriever_centred / "checkpoint")
    (checkpoint / GRAPH).touch()
    assert "header metadata" in made(checkpoint)
