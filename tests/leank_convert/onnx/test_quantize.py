"""Weights of 8 and 4 bits: what is quantized, how exactly, and what an exported folder says of it."""

import dataclasses
import json
import random
import shutil
import sys
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from bin.benchmarks.onnx import round_weights
from leank_convert.onnx import load_pruned
from leank_convert.onnx.check import check_graph, make_trials
from leank_convert.onnx.leank_onnx import LeanKOnnx
from leank_convert.onnx.quantize import SCHEMES, check_quantizer, quantize_weights
from leank_convert.testbed.tasks import TASKS, build_sample
from tests.checks import refusal, rejected
from tests.leank_convert.onnx.conftest import bless

# No multiple of a block.
IN, OUT, VOCAB = 200, 24, 40
GRAPH = f"""
<ir_version: 10, opset_import: ["": 23]>
graph (float[rows, {IN}] x, float[{OUT}, slots] cache, int64[n] ids)
  => (float[rows, {OUT}] y, float[rows, slots] scores, float[n, {VOCAB}] logits)
{{
  y = MatMul(x, weight)
  [cached] scores = MatMul(y, cache)
  embedded = Gather(embedding, ids)
  head = Transpose <perm = [1, 0]> (embedding)
  logits = MatMul(embedded, head)
}}
"""


def operators(path):
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(IN, OUT, bias=False)


@pytest.fixture
def graph(linear, tmp_path):
    """`x @ linear` beside a product of two inputs, and an embedding that is the output's weight, too."""
    embedding = torch.randn(VOCAB, OUT, generator=torch.Generator().manual_seed(1))
    model = onnx.parser.parse_model(GRAPH)
    for name, weight in (("weight", linear.weight.detach().T.contiguous()), ("embedding", embedding)):
        model.graph.initializer.append(numpy_helper.from_array(weight.numpy(), name))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    return path


@pytest.fixture(scope="session", params=SCHEMES)
def quantized(request, once_per_run, shipped_onnx):
    """The shipped model's folder with quantized weights, and which."""

    def make(folder):
        shutil.copytree(shipped_onnx, folder)
        quantize_weights(folder / "model.onnx", request.param)
        bless(folder)

    return once_per_run(f"shipped_{request.param}", make), request.param


def test_products_with_a_constant_are_quantized_and_no_others(graph):
    data = graph.with_name("model.onnx.data")
    before = data.stat().st_size
    quantize_weights(graph, "int8")
    assert operators(graph) == {"MatMulNBits": 2, "MatMul": 1, "Gather": 1}
    stored = {tensor.name: tensor for tensor in onnx.load(graph).graph.initializer}
    assert stored["embedding"].data_type == TensorProto.FLOAT
    assert "weight" not in stored
    (product,) = (node for node in onnx.load(graph).graph.node if node.op_type == "MatMul")
    assert product.name == "cached"
    quantized = [node for node in onnx.load(graph).graph.node if node.op_type == "MatMulNBits"]
    for key, value in (("bits", 8), ("accuracy_level", 4)):
        assert [helper.get_node_attr_value(node, key) for node in quantized] == [value, value]
    # One file of weights is left, which others may read as they may the graph.
    assert sorted(path.name for path in graph.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert data.stat().st_size < 0.7 * before
    assert data.stat().st_mode == graph.stat().st_mode


@pytest.mark.parametrize("weights", SCHEMES)
def test_rounded_weights_are_those_that_onnxruntime_multiplies_with(graph, linear, weights):
    quantize_weights(graph, weights)
    # Of a single 1 nothing is lost when activations are rounded.
    inputs = {"x": np.eye(IN, dtype=np.float32), "cache": np.ones((OUT, 1), np.float32), "ids": np.arange(3)}
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    (result,) = session.run(["y"], inputs)
    exact = linear.weight.detach().T.clone()
    round_weights(linear, weights)
    rounded = linear.weight.detach().T
    assert torch.allclose(torch.from_numpy(result), rounded, atol=1e-5 * float(exact.abs().max()))
    # Half a step of a block's largest weight.
    largest = exact.abs().max() / 2 ** (SCHEMES[weights].bits - 1)
    assert 0.2 * largest < (rounded - exact).abs().max() <= 1.001 * largest


def test_shipped_model_answers_right_with_quantized_weights(quantized, shipped_onnx):
    folder, _ = quantized
    # Four layers of seven, and the output: attention's own products, with the cache, are as they were.
    before, after = operators(shipped_onnx / "model.onnx"), operators(folder / "model.onnx")
    assert after["MatMulNBits"] == 29
    assert after["MatMul"] == before["MatMul"] - 29
    model = LeanKOnnx(folder, threads=1)
    rng = random.Random(0)
    samples = [build_sample(task, rng, 200) for task in TASKS]
    prompts = [model.encode_chat([{"role": "user", "content": sample.prompt}]) for sample in samples]
    answers = model.generate(prompts, max_new_tokens=24)
    assert [model.decode(answer).strip() for answer in answers] == [sample.answer for sample in samples]


def test_exported_folder_runs_and_says_how_its_weights_are_quantized(retriever_int8):
    described = json.loads((retriever_int8 / "leank_onnx.json").read_text())
    assert (described["weights"], described["dtype"]) == ("int8", "float16")
    quantization = described["quantization"]
    difference = quantization.pop("difference")
    assert quantization == {"operator": "MatMulNBits", "bits": 8, "block_size": 128}
    assert 0.001 < difference < 0.3
    readme = (retriever_int8 / "README.md").read_text()
    assert "Weights are int8 (MatMulNBits, blocks of 128), the embedding and the cache float16" in readme
    assert f"logits are {difference:.1%} of their norm away" in readme
    model = LeanKOnnx(retriever_int8, threads=1)
    for name in model.description.files:
        model.description.check_file(name)
    (answer,) = model.generate([[1, 5, 9]], max_new_tokens=2)
    assert len(answer) >= 1


def test_weights_that_do_not_bear_their_bits_are_warned_of(quantized, shipped_checkpoint, caplog):
    folder, weights = quantized
    trials = make_trials(load_pruned(shipped_checkpoint))
    assert check_graph(trials, folder / "model.onnx", weights) < 0.25
    assert caplog.text == ""
    # As of a deep model, in which little differences grow.
    far = [dataclasses.replace(trial, logits=-trial.logits) for trial in trials]
    assert check_graph(far, folder / "model.onnx", weights) == pytest.approx(2, abs=0.25)
    assert f"with {weights} weights logits differ by" in caplog.text


def test_weights_that_cannot_be_quantized_are_told_before_anything_is_read(tmp_path, monkeypatch):
    with refusal("weights `int2` are not supported", "use one of int8, int4"):
        check_quantizer("int2")
    monkeypatch.delattr("onnxruntime.quantization.matmul_nbits_quantizer", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization.matmul_nbits_quantizer", None)
    arguments = ["export-onnx", "testbed", "--all-channels", "--weights", "int8", "-o", str(tmp_path)]
    told = rejected(*arguments)
    assert "weights `int8`: this onnxruntime's quantizer cannot be imported" in told
    assert "hint: pip install --upgrade 'leank-convert[onnx]'" in told
    assert list(tmp_path.iterdir()) == []
