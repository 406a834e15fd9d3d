"""`benchmark onnx` at toy sizes: what it measures, counts and refuses to report."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from bin.benchmarks import onnx_step
from bin.benchmarks.__main__ import benchmark
from bin.benchmarks.onnx_step import (
    HostStep,
    build_stock,
    choose_layers,
    count_weight_bytes,
    export_side,
    take_layers,
)
from bin.benchmarks.random_models import choose_setup
from leank_convert.errors import LeanKError
from leank_convert.onnx.leank_onnx import Cache
from leank_convert.onnx.quantize import quantize_weights

TOY = ["onnx", "--geometry", "tiny", "--layers", "0", "--rounds", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Graphs by side and weights, each exported once: that takes seconds."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def run(graphs, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    def export(pruned, folder, weights):
        kept = graphs / f"{folder.name} {weights}"
        if weights is None and not kept.exists():
            export_side(pruned, kept, None)
        elif not kept.exists():
            shutil.copytree(export(pruned, folder, None), kept)
            quantize_weights(kept / "model.onnx", weights)
        return kept

    monkeypatch.setattr(onnx_step, "export_side", export)
    return lambda *arguments: CliRunner().invoke(benchmark, [*TOY, *arguments])


@pytest.fixture
def setup():
    return take_layers(choose_setup(None, None, "tiny"), [0])


def test_a_step_is_measured_beside_the_dense_graph(run):
    result = run("--length", "3", "--length", "96")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    document = json.loads(result.stdout)
    assert (document["benchmark"], document["layers"], document["ok"]) == ("onnx", [0], True)
    assert document["threads"] == 1
    short, long = document["cases"]
    # Nothing is pruned yet, and all slots of the window are there.
    assert (short["tokens"], short["pruned"], long["pruned"]) == (3, 0, 76)
    for case in (short, long):
        figures = case["step"]
        for side in ("dense", "leank"):
            assert figures["checks"][side]["ok"]
            assert figures[side]["bytes"] == case["cache_bytes"][side] + document["weight_bytes"]
        times = [figures[side]["milliseconds"] for side in ("dense", "leank")]
        assert figures["ratio"] == pytest.approx(times[0] / times[1])
        assert figures["byte_ratio"] == figures["dense"]["bytes"] / figures["leank"]["bytes"]
    # 4 heads of 64 channels and as many values; of 96 tokens the dense side has room for one more.
    assert long["cache_bytes"]["dense"] == 97 * 4 * 2 * 64 * 4
    window, widths = 24 * 4 * 2 * 64 * 4, document["widths"][0]
    assert long["cache_bytes"]["leank"] == window + 76 * sum(width + 64 for width in widths if width) * 4
    assert "whole step, one row" in result.stderr
    assert "say nothing of speed" not in result.stderr


def test_quantized_weights_count_as_stored_and_are_held_to_what_they_were_rounded_to(run, graphs, setup):
    result = run("--length", "96", "--weights", "int4")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["weights"], document["dtype"]) == ("int4", "float32")
    for check in document["cases"][0]["step"]["checks"].values():
        # Of rounded activations alone; 4 bits of weights are further off.
        assert 1e-4 < check["error"] < check["tolerance"]
    model = build_stock(setup.geometry)
    read = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
    # But for a few small tensors; 4 bits, and a scale of 32 bits for 32 weights.
    assert count_weight_bytes(model, graphs / "dense None") == pytest.approx(read, rel=0.02)
    assert document["weight_bytes"] == pytest.approx(read * 5 / 32, rel=0.1)


def test_a_wrong_step_gets_no_figures(run, monkeypatch):
    right = HostStep.run

    def double(step):
        right(step)
        step._outputs["logits"][...] *= 2 if step._side == "leank" else 1

    monkeypatch.setattr(HostStep, "run", double)
    result = run("--length", "96")
    document = json.loads(result.stdout)
    (case,) = document["cases"]
    assert (result.exit_code, document["ok"], case["ok"]) == (1, False, False)
    assert case["step"]["checks"]["dense"]["ok"]
    assert not case["step"]["checks"]["leank"]["ok"]
    assert "ratio" not in case["step"]
    assert "the leank graph's logits are WRONG" in result.stderr


def test_a_cache_that_the_host_fills_wrongly_gets_no_figures(run, monkeypatch):
    right = Cache.split

    def shift(cache):
        right(cache)
        for keys, _ in cache._pruned.values():
            held = keys[:, :, : cache.pruned_lengths[0]]
            held[...] = np.roll(held, 1, axis=2)

    monkeypatch.setattr(Cache, "split", shift)
    result = run("--length", "96")
    (case,) = json.loads(result.stdout)["cases"]
    assert (result.exit_code, case["ok"]) == (1, False)
    assert case["step"]["checks"]["dense"]["ok"]
    assert not case["step"]["checks"]["leank"]["ok"]


def test_layers_that_stand_for_all_come_from_all_depths():
    setup = choose_setup(None, None, "llama-3.1-8b")
    chosen = choose_layers(setup, None)
    assert [layer // 8 for layer in chosen] == [0, 1, 2, 3]
    taken = [sum(width + 128 * (width > 0) for width in widths) for widths in setup.mask.widths]
    assert sum(taken[layer] for layer in chosen) / 4 == pytest.approx(sum(taken) / len(taken), rel=0.01)
    assert choose_layers(setup, [3, 1]) == [3, 1]
    with pytest.raises(LeanKError, match="there is no layer 32"):
        choose_layers(setup, [0, 32])


def test_all_layers_are_refused():
    result = CliRunner().invoke(benchmark, ["onnx", "--layers", "all"])
    assert result.exit_code == 2
    assert "name some" in result.output


def test_running_out_of_memory_is_one_sentence_and_exits_1(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("bin.benchmarks.onnx_step.benchmark_onnx", fail)
    result = CliRunner().invoke(benchmark, ["onnx", "--geometry", "tiny"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: memory does not suffice for this benchmark")
