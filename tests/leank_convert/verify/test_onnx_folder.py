"""`verify` of an ONNX folder: what is not as it was exported is found and named, and other answers, too."""

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx.external_data_helper import ExternalDataInfo
from safetensors.torch import load_file, save_file

from leank_convert.errors import LeanKError
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json, sha256_of
from leank_convert.inspection import inspect_artifact
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from leank_convert.onnx import export_onnx
from leank_convert.verify import verify_checkpoint
from tests.checks import failed, prune_values
from tests.tiny_families import OPTIONS

DESCRIPTION, GRAPH, WEIGHTS = "leank_onnx.json", "model.onnx", "model.onnx.data"
INT4 = {"operator": "MatMulNBits", "bits": 4, "block_size": 32, "difference": None}


@pytest.fixture
def out(retriever_onnx, tmp_path):
    """A copy of an exported folder, to be spoiled."""
    return shutil.copytree(retriever_onnx, tmp_path / "out")


def made(out, source=None):
    return [check.name for check in verify_checkpoint(out, source).checks]


def describe(place, edit):
    """Change what stands at a place, keys and numbers between dots: to a value, or by a function of it.

    A value of `...` removes the key.
    """

    def spoil(out):
        content = holder = read_json(out / DESCRIPTION)
        *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
        for part in way:
            holder = holder[part]
        if edit is ...:
            del holder[last]
        else:
            before = holder.get(last) if isinstance(holder, dict) else holder[last]
            holder[last] = edit(before) if callable(edit) else edit
        (out / DESCRIPTION).write_text(json.dumps(content))

    return spoil


def bless(out):
    """Bring the digests up to date, so that what lies behind them is looked at alone."""
    describe("files", lambda files: {name: sha256_of(out / name) for name in files})(out)


def replaced_mask(change):
    def spoil(out):
        save_mask(change(load_mask(out / MASK_FILE_NAME)), out / MASK_FILE_NAME)
        bless(out)

    return spoil


def rewritten(edit):
    """Change the graph, its weights left where they are."""

    def spoil(out):
        model = onnx.load(out / GRAPH, load_external_data=False)
        edit(model)
        (out / GRAPH).write_bytes(model.SerializeToString())
        bless(out)

    return spoil


def put(name, content):
    return lambda out: (out / name).write_bytes(content)


def cut(name):
    return lambda out: (out / name).write_bytes((out / name).read_bytes()[:-9000])


def remove(name):
    return lambda out: (out / name).unlink()


def swap(layer):
    return lambda rows: [row[::-1] if index == layer else row for index, row in enumerate(rows)]


def misplace(model):
    (tensor, *_) = (tensor for tensor in model.graph.initializer if tensor.external_data)
    next(item for item in tensor.external_data if item.key == "offset").value = "-1"


def rename(model):
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "tokens"


def write_no_numbers(out):
    graph = onnx.load(out / GRAPH, load_external_data=False).graph
    place = ExternalDataInfo(next(tensor for tensor in graph.initializer if "embed" in tensor.name))
    with (out / WEIGHTS).open("r+b") as file:
        file.seek(place.offset)
        file.write(np.full(place.length // 4, np.nan, np.float32).tobytes())
    bless(out)


# Of one place in the description, as the mask has it otherwise: what stands there instead.
CONTRADICTIONS = [
    ("opset", ..., "`opset` is missing"),
    ("bos_token_id", 10**30, "is 1000000000000000000000000000000, not of the vocabulary"),
    ("quantization", {}, "`quantization.operator` is missing"),
    *(
        ("quantization", {**INT4, key: value}, f"`quantization.{key}` is {value!r}: Input")
        for key, value in (("bits", [8]), *(("difference", number) for number in ("x", math.inf, -1)))
    ),
    ("model.name", 3, "`model.name` is 3: Input should be a valid string"),
    ("model.head_dim", 8, "`model.head_dim` is 8; the mask gives 16"),
    ("flush_size", 0, "flush_size"),
    ("widths", swap(0), "`widths.0.0` is 7; the mask gives 0"),
    ("widths", lambda rows: rows[:1], "`widths` is [[0, 7]]; the mask gives [[0, 7], [4, 4]]"),
    ("buckets.0.1.heads", [0, 2], "`buckets.0.1.heads.0` is 0; the mask gives 1"),
    ("buckets.0.1.value_width", 8, "`buckets.0.1.value_width` is 8; the mask gives None"),
    ("channel_order.1", swap(0), "`channel_order.1.0.0` is"),
    ("head_permutation", swap(1), "`head_permutation.1.0` is 1; the mask gives 0"),
    # Tensor 6 of the inputs is the pruned key of the bucket of width 7.
    ("inputs.6.dtype", "float16", "`inputs.6.dtype` is 'float16'; the mask gives 'float32'"),
    ("inputs.6.width", 8, "`inputs.6.width` is 8; the mask gives 7"),
    ("inputs.6.shape.3", 8, "`inputs.6.shape.3` is 8; the mask gives 7"),
    ("outputs.3.name", "present.9.key", "`outputs.3.name` is 'present.9.key'; the mask"),
    # A host may take what has a region for the cache.
    ("outputs.3.region", "window", "`outputs.3.region` is 'window'; the mask gives None"),
]
# By their names: what is done, the check that fails, and a part of what it says.
SPOILED = {
    "no description": (remove(DESCRIPTION), "description", f"out/{DESCRIPTION}"),
    "a list as description": (put(DESCRIPTION, b"[]"), "description", f"out/{DESCRIPTION}"),
    "another format": (describe("format_version", 2), "description", "is 2, this program reads 1"),
    "no end tokens": (describe("eos_token_ids", ...), "description", "(KeyError: 'eos_token_ids')"),
    "no mask listed": (describe("files", {GRAPH: ""}), "description", f"does not name `{MASK_FILE_NAME}`"),
    **{
        f"{place} {row}": (describe(place, edit), "mask file", said)
        for row, (place, edit, said) in enumerate(CONTRADICTIONS)
    },
    "another model's mask": (
        replaced_mask(lambda _: ChannelMask(torch.ones(3, 2, 16, dtype=torch.bool))),
        "mask file",
        "`widths` is [[0, 7], [4, 4]]; the mask gives",
    ),
    "other channels": (
        replaced_mask(lambda own: replace(own, channel_mask=own.channel_mask.flip(-1))),
        "mask file",
        "`channel_order.0.1.",
    ),
    "weights cut": (cut(WEIGHTS), "external data", "is truncated: it has "),
    "no weights": (remove(WEIGHTS), "external data", f"{WEIGHTS}` is missing: `"),
    "no graph": (remove(GRAPH), "external data", "No such file"),
    "weights not listed": (
        describe("files", lambda files: {name: files[name] for name in files.keys() - {WEIGHTS}}),
        "external data",
        f"`files` does not name `{WEIGHTS}`",
    ),
    "weights misplaced": (rewritten(misplace), "external data", "is nonsense: External data offset must be"),
    "no first node": (rewritten(lambda model: model.graph.node.pop(0)), "graph", "breaks the rules of ONNX"),
    "a size renamed": (rewritten(rename), "graph", "`inputs.0.shape.1` is 'new_tokens'; `model.onnx` has"),
    "another opset": (describe("opset", 22), "graph", "`opset` is 22; `model.onnx` has 23"),
    "another dtype": (describe("weights", "float16"), "graph", "`weights` is 'float16'"),
    "no numbers": (write_no_numbers, "onnxruntime", "holds numbers that are not finite"),
    "a smaller sink": (describe("sink_size", 2), "regions", "slot 2 of the window region counts"),
    "a larger sink": (describe("sink_size", 4), "regions", "slot 3 of the win"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_what_is_not_as_it_was_exported_is_found_and_ends_what_needs_it(kind, out):
    spoil, check, said = SPOILED[kind]
    spoil(out)
    details = failed(out)
    assert said in details[check]
    assert [name for name in details if not name.startswith("digest of model.onnx")] == [check]
    if check == "description":
        assert made(out) == ["description"]
    elif check == "mask file":
        # Files are looked at all the same; the graph is not run.
        assert made(out) == ["description", "digests", "mask file", "external data"]


def test_changed_and_missing_files_are_found_and_an_edited_readme_is_none(out):
    (out / "README.md").write_text("mine")
    (out / "leank_onnx_cache.py").write_text("import os\n")
    (out / "tokenizer.json").unlink()
    (out.parent / "secret").touch()
    describe("files", lambda files: {**files, "../secret": "0"})(out)
    details = failed(out)
    names = ("leank_onnx_cache.py", "tokenizer.json", "../secret")
    assert details.keys() == {f"digest of {name}" for name in names}
    assert "was changed: its SHA-256" in details["digest of leank_onnx_cache.py"]
    assert "is missing" in details["digest of tokenizer.json"]
    assert "is missing" in details["digest of ../secret"]  # digests cannot point outside


@pytest.mark.parametrize(
    ("weights", "quantization", "said"),
    [
        ("int4", INT4, "(bits, block size) in `model.onnx` ar"),
        ("float16", {**INT4, "bits": 8}, "`weights` is 'float16', `quantization` {"),
        ("int8", {**INT4, "bits": 8}, "in `model.onnx` are [(8, 128)]"),
    ],
)
def test_a_quantization_that_is_not_the_graphs_is_found(
    weights, quantization, said, retriever_int8, copy_of, edit_json
):
    out = copy_of(retriever_int8)
    edit_json(out / DESCRIPTION, weights=weights, quantization=quantization)
    details = failed(out)
    assert details.keys() == {"graph"}
    assert said in details["graph"]


def test_an_export_verifies_with_and_without_its_source(retriever_onnx, retriever_folder):
    report = verify_checkpoint(retriever_onnx, retriever_folder)
    own = ["description", "digests", "mask file", "external data", "graph", "onnxruntime", "regions"]
    source = ["source: sizes", "source: prompt", "source: keys and values", "source: logits"]
    assert [check.name for check in report.checks] == own + source
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert made(retriever_onnx) == own


@pytest.mark.parametrize("exporter", ["retriever_half", "retriever_centred"])
def test_an_export_in_float16_or_of_centred_keys_verifies_against_checkpoint_and_model(
    exporter, retriever_folder, request
):
    folder = request.getfixturevalue(exporter)
    for source in (folder / "checkpoint", retriever_folder):
        assert failed(folder / "onnx", source) == {}


def test_another_mean_of_keys_is_found(retriever_centred, retriever_folder, copy_of):
    out = copy_of(retriever_centred / "onnx")
    mask = load_mask(out / MASK_FILE_NAME)
    known = replace(mask.provenance, key_mean_tokens=None)
    for mean in (mask.key_mean + 1, None):
        save_mask(replace(mask, key_mean=mean, provenance=known), out / MASK_FILE_NAME)
        bless(out)
        assert failed(out, retriever_folder).keys() == {"source: keys and values"}


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_graph_of_pruned_v_verifies_and_other_widths_and_bases_are_found(
    weights, source_model, fitting_mask, tmp_path
):
    # Q, K and V in one tensor, partly rotated, to whose dtype the fold is rounded.
    source = source_model("phi3", dtype="bfloat16", pad_token_id=0, **OPTIONS["phi3"])
    (source / "tokenizer.json").unlink()
    mask = prune_values(fitting_mask(source), source)
    checkpoint = export_checkpoint(source, mask, tmp_path / "checkpoint")
    out = export_onnx(checkpoint, None, tmp_path / "out", weights=weights)
    assert failed(out, source) == failed(out, checkpoint) == {}
    facts, expected = inspect_artifact(out), inspect_artifact(checkpoint)
    for key in ("value_widths", "value_pruning_ratio"):
        assert facts[key] == expected[key] != 0
    assert f"V by {mask.value_pruning_ratio:.1%}" in (out / "README.md").read_text()
    save_mask(replace(mask, value_basis=mask.value_basis.flip(-1)), out / MASK_FILE_NAME)
    bless(out)
    assert failed(out, source).keys() == {"source: keys and values"}
    for place, said in (
        ("value_widths", "`value_widths` is None; the mask gives"),
        ("buckets.0.1.value_width", "`buckets.0.1.value_width` is None; the mask gives"),
    ):
        spoiled = shutil.copytree(out, tmp_path / place)
        describe(place, ...)(spoiled)
        assert said in failed(spoiled)["mask file"]
    fewer = mask.value_widths.clamp(max=mask.value_basis.shape[-1] // 4)
    save_mask(replace(mask, value_widths=fewer), out / MASK_FILE_NAME)
    bless(out)
    assert "`value_widths." in failed(out)["mask file"]


def test_a_quantized_export_under_another_rope_says_by_how_much_it_differs(retriever_int8, retriever_folder):
    report = verify_checkpoint(retriever_int8, retriever_folder)
    assert report.ok
    assert report.checks[-1].name == "source: logits"
    assert re.match(r"weights of int8 change them by \d\.\de-\d\d of their norm \(", report.checks[-1].detail)


def test_a_graph_without_sink_recent_tokens_and_pruned_region_verifies(retriever_folder, tmp_path):
    mask = ChannelMask(torch.zeros(2, 2, 16, dtype=torch.bool))
    out = export_onnx(retriever_folder, mask, tmp_path / "out", sink_size=0, recent_size=0, flush_size=1)
    assert failed(out, retriever_folder) == {}


BOTH = {"source: keys and values", "source: logits"}


@pytest.mark.parametrize(
    ("exporter", "name", "edit", "checks"),
    [
        ("retriever_onnx", "model.layers.1.self_attn.k_proj.weight", lambda tensor: tensor * 1.01, BOTH),
        ("retriever_onnx", "lm_head.weight", lambda tensor: tensor * 1.01, {"source: logits"}),
        ("retriever_int8", "model.layers.0.self_attn.k_proj.weight", lambda tensor: tensor.flip(0), BOTH),
        ("retriever_int8", "model.layers.1.mlp.up_proj.weight", lambda t: t.flip(0), {"source: logits"}),
    ],
)
def test_weights_that_are_not_the_sources_are_found(
    exporter, name, edit, checks, request, retriever_folder, copy_of
):
    source = copy_of(retriever_folder)
    tensors = load_file(source / "model.safetensors")
    tensors[name] = edit(tensors[name]).contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    details = failed(request.getfixturevalue(exporter), source)
    assert details.keys() == checks
    if exporter == "retriever_int8":
        assert "other weights" in details["source: logits"]
        keys = details.get("source: keys and values", "layer 0: keys differ .* by 1.0e+00 of the norm")
        assert re.search(r"layer 0: keys differ .* by 1\.\de\+00 of the norm", keys)


def test_a_source_of_other_sizes_or_none_is_found(retriever_onnx, source_model, tmp_path):
    source = source_model("qwen2")
    details = failed(retriever_onnx, source)
    assert details == {"source: sizes": f"`model.model_type` is 'llama'; `{source}` has 'qwen2'"}
    with pytest.raises(LeanKError, match="does not exist"):
        verify_checkpoint(retriever_onnx, tmp_path / "missing")


def test_a_checkpoint_that_also_has_a_graph_is_verified_as_a_checkpoint(retriever_half, copy_of):
    checkpoint = copy_of(retriever_half / "checkpoint")
    (checkpoint / GRAPH).touch()
    assert "header metadata" in made(checkpoint)
