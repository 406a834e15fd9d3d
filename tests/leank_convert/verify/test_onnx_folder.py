"""`verify` of an ONNX folder: what is not as it was exported is found and named, and other answers, too."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx.external_data_helper import ExternalDataInfo

from leank_convert.cli import main
from leank_convert.errors import LeanKError
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, load_mask, save_mask
from leank_convert.onnx import export_onnx
from leank_convert.verify import verify_checkpoint

WEIGHTS = "model.onnx.data"


def test_an_export_verifies_against_its_source(exported, retriever_folder):
    report = verify_checkpoint(exported.path, retriever_folder)
    assert exported.failed(retriever_folder) == {}
    own = ["description", "digests", "mask file", "external data", "graph", "onnxruntime", "regions"]
    source = ["source: sizes", "source: prompt", "source: keys and values", "source: logits"]
    assert [check.name for check in report.checks] == own + source
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert exported.made() == own


def test_a_float16_export_verifies_against_its_checkpoint_and_the_model(retriever_half, retriever_folder):
    for source in (retriever_half / "checkpoint", retriever_folder):
        assert verify_checkpoint(retriever_half / "onnx", source).ok


def test_an_export_of_centred_keys_verifies_and_another_mean_does_not(
    exported, retriever_centred, retriever_folder, tmp_path
):
    for source in (retriever_centred / "checkpoint", retriever_folder):
        report = verify_checkpoint(retriever_centred / "onnx", source)
        assert report.ok, [check for check in report.checks if not check.ok]
        details = {check.name: check.detail for check in report.checks}
        assert details["mask file"].endswith(", and the mean of keys")
    folder = type(exported)(Path(shutil.copytree(retriever_centred / "onnx", tmp_path / "out")))
    mask = load_mask(folder.path / MASK_FILE_NAME)
    for mean in (None, mask.key_mean + 1):
        known = replace(mask.provenance, key_mean_tokens=None)
        save_mask(replace(mask, key_mean=mean, provenance=known), folder.path / MASK_FILE_NAME)
        folder.bless()
        assert folder.failed(retriever_folder).keys() == {"source: keys and values"}


def test_a_quantized_export_under_another_rope_says_by_how_much_it_differs(retriever_int8, retriever_folder):
    report = verify_checkpoint(retriever_int8, retriever_folder)
    assert report.ok
    assert report.checks[-1].name == "source: logits"
    assert re.match(r"weights of int8 change them by \d\.\de-\d\d of their norm \(", report.checks[-1].detail)


def test_a_graph_without_sink_recent_tokens_and_pruned_region_verifies(retriever_folder, tmp_path):
    mask = ChannelMask(torch.zeros(2, 2, 16, dtype=torch.bool))
    out = export_onnx(retriever_folder, mask, tmp_path / "out", sink_size=0, recent_size=0, flush_size=1)
    assert verify_checkpoint(out, retriever_folder).ok


def swap(rows, layer=0):
    return [row[::-1] if index == layer else row for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("place", "edit", "message"),
    [
        ("format_version", lambda _: 2, "format_version is 2, this program reads 1"),
        ("eos_token_ids", None, "(KeyError: 'eos_token_ids')"),
        ("files", lambda _: {"model.onnx": "0"}, "`files` does not name `channel_mask.safetensors`"),
    ],
)
def test_a_description_that_no_host_can_use_ends_the_checks(place, edit, message, folder):
    folder.describe(place, edit)
    assert message in folder.failed()["description"]
    assert folder.made() == ["description"]


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_description_that_cannot_be_read_is_found(content, folder):
    path = folder.path / "leank_onnx.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    details = folder.failed()
    assert details.keys() == {"description"}
    assert str(path) in details["description"]


@pytest.mark.parametrize(
    ("place", "edit", "message"),
    [
        ("opset", None, "`opset` is missing"),
        ("bos_token_id", lambda _: True, "`bos_token_id` is True: Input should be a valid integer"),
        ("bos_token_id", lambda _: 10**30, "is 1000000000000000000000000000000, not of the vocabulary"),
        ("quantization", lambda _: {}, "`quantization.operator` is missing"),
        *(
            (f"quantization.{key}", lambda _, value=value: value, f"`quantization.{key}` is {value!r}: Input")
            for key, value in (
                ("bits", [8]),
                ("difference", "x"),
                ("difference", math.inf),
                ("difference", -1),
            )
        ),
        ("model.name", lambda _: 3, "`model.name` is 3: Input should be a valid string"),
        (
            "model.max_position_embeddings",
            lambda _: -4,
            "`model.max_position_embeddings` is -4: Input",
        ),
        ("model.head_dim", lambda _: 8, "`model.head_dim` is 8; the mask gives 16"),
        ("flush_size", lambda _: 0, "flush_size"),
        ("sink_size", lambda _: -1, "sink_size"),
        ("recent_size", lambda _: 2**24 + 1, "recent_size"),
        ("widths", swap, "`widths.0.0` is 7; the mask gives 0"),
        ("widths", lambda rows: rows[:1], "`widths` is [[0, 7]]; the mask gives [[0, 7], [4, 4]]"),
        ("buckets.0.1.heads", lambda _: [0, 2], "`buckets.0.1.heads.0` is 0; the mask gives 1"),
        ("channel_order.1", lambda orders: orders[:1], "`channel_order.1` is"),
        ("channel_order.1", swap, "`channel_order.1.0.0` is"),
        ("head_permutation", lambda rows: swap(rows, 1), "`head_permutation.1.0` is 1; the mask gives 0"),
        ("head_permutation", lambda _: None, "`head_permutation` is None; the mask gives [[1, 0], [0, 1]]"),
        # Tensor 6 of the inputs is the pruned key of the bucket of width 7.
        ("inputs.6.dtype", lambda _: "float16", "`inputs.6.dtype` is 'float16'; the mask gives 'float32'"),
        ("inputs.6.width", lambda _: 8, "`inputs.6.width` is 8; the mask gives 7"),
        ("inputs.6.shape.3", lambda _: 8, "`inputs.6.shape.3` is 8; the mask gives 7"),
        ("inputs.2.shape", None, "`inputs.2.shape` is None; the mask gives ['batch']"),
        ("outputs.3.name", lambda _: "present.9.key", "`outputs.3.name` is 'present.9.key'; the mask"),
        # A host may take what has a region for the cache.
        ("outputs.3.region", lambda _: "window", "`outputs.3.region` is 'window'; the mask gives None"),
        ("outputs", lambda tensors: tensors[:-1], "`outputs` is [{"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_description_that_contradicts_the_mask_is_found(place, edit, message, folder):
    if place.startswith("quantization."):
        folder.describe("quantization", lambda _: dict(INT4))
    folder.describe(place, edit)
    details = folder.failed()
    assert details.keys() == {"mask file"}
    assert message in details["mask file"]
    # Files are looked at all the same; the graph is not run.
    assert folder.made() == ["description", "digests", "mask file", "external data"]


def test_a_mask_file_of_another_model_or_of_other_channels_is_found(folder):
    path = folder.path / MASK_FILE_NAME
    own = load_mask(path)
    for mask, message in (
        (ChannelMask(torch.ones(3, 2, 16, dtype=torch.bool)), "`widths` is [[0, 7], [4, 4]]; the mask gives"),
        (replace(own, channel_mask=own.channel_mask.flip(-1)), "`channel_order.0.1."),
    ):
        save_mask(mask, path)
        folder.bless()
        assert message in folder.failed()["mask file"]


def test_changed_and_missing_files_are_found_and_an_edited_readme_is_none(folder):
    (folder.path / "README.md").write_text("mine")
    (folder.path / "leank_onnx_cache.py").write_text("import os\n")
    (folder.path / "tokenizer.json").unlink()
    (folder.path.parent / "secret").touch()
    folder.describe("files", lambda files: {**files, "../secret": "0"})
    details = folder.failed()
    names = ("leank_onnx_cache.py", "tokenizer.json", "../secret")
    assert details.keys() == {f"digest of {name}" for name in names}
    assert "was changed: its SHA-256" in details["digest of leank_onnx_cache.py"]
    assert "is missing" in details["digest of tokenizer.json"]
    assert "is missing" in details["digest of ../secret"]  # digests cannot point outside


@pytest.mark.parametrize(
    ("name", "keep", "message"),
    [
        (WEIGHTS, 0.5, "is truncated: it has "),
        (WEIGHTS, None, f"{WEIGHTS}` is missing: `"),
        ("model.onnx", 0.5, "is truncated or no ONNX graph"),
        ("model.onnx", None, "No such file"),
    ],
)
def test_a_graph_or_weights_that_are_cut_short_or_missing_are_told(name, keep, message, folder):
    content = (folder.path / name).read_bytes()
    (folder.path / name).unlink()
    if keep is not None:
        (folder.path / name).write_bytes(content[: int(len(content) * keep)])
    details = folder.failed()
    assert details.keys() == {f"digest of {name}", "external data"}
    assert message in details["external data"]


def test_weights_that_are_not_listed_are_found(folder):
    folder.describe("files", lambda files: {key: files[key] for key in files.keys() - {WEIGHTS}})
    assert f"`files` does not name `{WEIGHTS}`" in folder.failed()["external data"]


def misplace(model):
    (tensor, *_) = (tensor for tensor in model.graph.initializer if tensor.external_data)
    next(item for item in tensor.external_data if item.key == "offset").value = "-1"


def rename(model):
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "tokens"


@pytest.mark.parametrize(
    ("edit", "check", "message"),
    [
        (misplace, "external data", "lies is nonsense: External data offset must be non-neg"),
        (lambda model: model.graph.node.pop(0), "graph", "`model.onnx` breaks the rules of ONNX"),
        (rename, "graph", "`inputs.0.shape.1` is 'new_tokens'; `model.onnx` has 'tokens'"),
    ],
)
def test_a_graph_that_is_not_as_described_is_found(edit, check, message, folder):
    folder.rewrite(edit)
    details = folder.failed()
    assert details.keys() == {check}
    assert message in details[check]


INT4 = {"operator": "MatMulNBits", "bits": 4, "block_size": 32, "difference": None}


@pytest.mark.parametrize(
    ("exporter", "changes", "message"),
    [
        ("retriever_onnx", {"opset": 22}, "`opset` is 22; `model.onnx` has 23"),
        (
            "retriever_onnx",
            {"weights": "int4", "quantization": INT4},
            "(bits, block size) in `model.onnx` ar",
        ),
        ("retriever_onnx", {"weights": "float16"}, "`weights` is 'float16'"),
        ("retriever_int8", {"weights": "float16"}, "`weights` is 'float16', `quantization` {"),
        ("retriever_int8", {"weights": "float16", "quantization": None}, "in `model.onnx` are [(8, 128)]"),
        ("retriever_int8", {"quantization": {**INT4, "bits": 8}}, "in `model.onnx` are [(8, 128)]"),
    ],
)
def test_opset_or_quantization_that_are_not_the_graphs_are_found(
    exporter, changes, message, folder, request, edit_json
):
    shutil.rmtree(folder.path)
    shutil.copytree(request.getfixturevalue(exporter), folder.path)
    edit_json(folder.path / "leank_onnx.json", **changes)
    details = folder.failed()
    assert details.keys() == {"graph"}
    assert message in details["graph"]


def test_weights_that_are_no_numbers_are_found(folder):
    graph = onnx.load(folder.path / "model.onnx", load_external_data=False).graph
    place = ExternalDataInfo(next(tensor for tensor in graph.initializer if "embed" in tensor.name))
    with (folder.path / WEIGHTS).open("r+b") as file:
        file.seek(place.offset)
        file.write(np.full(place.length // 4, np.nan, np.float32).tobytes())
    folder.bless()
    details = folder.failed()
    assert details.keys() == {"onnxruntime"}
    assert "holds numbers that are not finite" in details["onnxruntime"]


@pytest.mark.parametrize(
    ("size", "what"), [(2, "slot 2 of the window region counts"), (4, "slot 3 of the win")]
)
def test_another_sink_than_the_graphs_is_found(size, what, folder):
    folder.describe("sink_size", lambda _: size)
    details = folder.failed()
    assert details.keys() == {"regions"}
    assert what in details["regions"]


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
def test_weights_that_are_not_the_sources_are_found(exporter, name, edit, checks, request, changed_source):
    report = verify_checkpoint(request.getfixturevalue(exporter), changed_source(name, edit))
    details = {check.name: check.detail for check in report.checks if not check.ok}
    assert details.keys() == checks
    if exporter == "retriever_int8":
        assert "other weights" in details["source: logits"]
        keys = details.get("source: keys and values", "layer 0: keys differ .* by 1.0e+00 of the norm")
        assert re.search(r"layer 0: keys differ .* by 1\.\de\+00 of the norm", keys)


def test_a_source_of_other_sizes_or_none_is_found(exported, source_model, tmp_path):
    source = source_model("qwen2")
    details = exported.failed(source)
    assert details == {"source: sizes": f"`model.model_type` is 'llama'; `{source}` has 'qwen2'"}
    with pytest.raises(LeanKError, match="does not exist"):
        verify_checkpoint(exported.path, tmp_path / "missing")


def test_a_checkpoint_that_also_has_a_graph_is_verified_as_a_checkpoint(retriever_half, tmp_path):
    checkpoint = shutil.copytree(retriever_half / "checkpoint", tmp_path / "checkpoint")
    (checkpoint / "model.onnx").touch()
    assert "header metadata" in [check.name for check in verify_checkpoint(checkpoint).checks]


def test_the_command_reports_line_by_line_and_its_exit_code_tells(folder, retriever_folder):
    result = CliRunner().invoke(
        main, ["verify", str(folder.path), "--source", str(retriever_folder), "--json"]
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True
    (folder.path / "leank_onnx.py").write_text("raise SystemExit\n")
    result = CliRunner().invoke(main, ["verify", str(folder.path)])
    assert result.exit_code == 1
    assert "FAIL  digest of leank_onnx.py" in result.stdout
    assert "ok    onnxruntime: a decode step behind 12 tokens" in result.stdout
