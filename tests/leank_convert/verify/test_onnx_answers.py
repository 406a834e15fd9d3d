"""`verify` runs the graph of an ONNX folder, and compares its answers with those of its source."""

import json
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
from leank_convert.onnx import export_onnx, libraries
from leank_convert.verify import verify_checkpoint

WEIGHTS = "model.onnx.data"


def test_an_export_verifies_against_its_source(exported, retriever_folder):
    report = verify_checkpoint(exported.path, retriever_folder)
    assert exported.failed(retriever_folder) == {}
    names = [check.name for check in report.checks]
    own = ["description", "digests", "heads", "mask file", "external data", "graph"]
    own += ["tensors", "onnxruntime", "regions"]
    source = ["source: sizes", "source: prompt", "source: keys and values", "source: logits"]
    assert names == own + source
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


def test_a_folder_with_the_four_files_of_the_former_host_verifies(folder):
    for name in ("leank_onnx_cache.py", "leank_onnx_session.py", "leank_onnx_description.py"):
        (folder.path / name).write_text("")
        folder.describe(lambda content, name=name: content["files"].update({name: ""}))
    folder.bless()
    assert folder.failed() == {}


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("model.layers.0.self_attn.k_proj.weight", {"source: keys and values", "source: logits"}),
        ("model.layers.1.mlp.up_proj.weight", {"source: logits"}),
    ],
)
def test_quantized_weights_that_are_not_the_sources_are_found(name, checks, retriever_int8, changed_source):
    report = verify_checkpoint(retriever_int8, changed_source(name, lambda tensor: tensor.flip(0)))
    details = {check.name: check.detail for check in report.checks if not check.ok}
    assert details.keys() == checks
    assert "other weights" in details["source: logits"]
    if "source: keys and values" in checks:
        detail = details["source: keys and values"]
        assert re.search(r"layer 0: keys differ .* by 1\.\de\+00 of the norm", detail)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "float32"}, "`weights` is `float32`, `quantization` {'operator'"),
        ({"weights": "float32", "quantization": None}, "`MatMulNBits` in `model.onnx` has [(8, 128)]"),
        ({"block_size": 64}, "(bits, block size) [(8, 64)]; `MatMulNBits` in `model.onnx` has [(8, 128)]"),
    ],
    ids=["weights", "float weights", "block size"],
)
def test_weights_quantized_otherwise_than_described_are_found(changes, message, retriever_int8, folder):
    shutil.rmtree(folder.path)
    shutil.copytree(retriever_int8, folder.path)
    own = {key: value for key, value in changes.items() if key in ("weights", "quantization")}
    inner = {key: value for key, value in changes.items() if key not in own}
    folder.describe(lambda content: content["quantization"].update(inner))
    folder.describe(lambda content: content.update(own))
    details = folder.failed()
    assert details.keys() == {"graph"}
    assert message in details["graph"]


def test_weights_that_are_called_quantized_and_are_not_are_found(folder):
    scheme = {"operator": "MatMulNBits", "bits": 4, "block_size": 32, "difference": None}
    folder.describe(lambda content: content.update(weights="int4", quantization=scheme))
    assert "`MatMulNBits` in `model.onnx` has []" in folder.failed()["graph"]


def test_weights_that_are_no_numbers_are_found(folder):
    graph = onnx.load(folder.path / "model.onnx", load_external_data=False).graph
    place = ExternalDataInfo(next(tensor for tensor in graph.initializer if "embed" in tensor.name))
    with (folder.path / WEIGHTS).open("r+b") as file:
        file.seek(place.offset)
        file.write(np.full(place.length // 4, np.nan, np.float32).tobytes())
    folder.bless()
    details = folder.failed()
    assert details.keys() == {"onnxruntime"}
    assert "`logits` holds numbers that are not finite" in details["onnxruntime"]


@pytest.mark.parametrize(
    ("size", "what"), [(2, "slot 2 of the window region counts"), (4, "slot 3 of the win")]
)
def test_another_sink_than_the_graphs_is_found(size, what, folder):
    folder.describe(lambda content: content.update(sink_size=size))
    details = folder.failed()
    assert details.keys() == {"regions"}
    assert what in details["regions"]


def test_a_graph_without_sink_recent_tokens_and_pruned_region_verifies(retriever_folder, tmp_path):
    mask = ChannelMask(torch.zeros(2, 2, 16, dtype=torch.bool))
    out = export_onnx(retriever_folder, mask, tmp_path / "out", sink_size=0, recent_size=0, flush_size=1)
    assert verify_checkpoint(out, retriever_folder).ok


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("model.layers.1.self_attn.k_proj.weight", {"source: keys and values", "source: logits"}),
        ("lm_head.weight", {"source: logits"}),
    ],
)
def test_weights_that_are_not_the_sources_are_found(name, checks, exported, changed_source):
    assert exported.failed(changed_source(name, lambda tensor: tensor * 1.01)).keys() == checks


def test_a_source_of_other_sizes_is_found(exported, source_model):
    source = source_model("qwen2")
    details = exported.failed(source)
    assert details == {"source: sizes": f"`model.model_type` is 'llama'; `{source}` has 'qwen2'"}


def test_a_source_that_is_none_is_an_error(exported, tmp_path):
    with pytest.raises(LeanKError, match="does not exist"):
        verify_checkpoint(exported.path, tmp_path / "missing")


def test_missing_packages_are_named_with_the_extra_to_install(exported, monkeypatch):
    monkeypatch.setattr(libraries, "_LIBRARIES", ("onnx", "onnxruntime_that_is_not_here"))
    result = CliRunner().invoke(main, ["verify", str(exported.path)])
    assert result.exit_code == 2
    assert "`onnxruntime_that_is_not_here`, which cannot be imported" in result.stderr
    assert "hint: pip install 'leank-convert[onnx]'" in result.stderr
