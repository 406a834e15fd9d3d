"""`benchmark onnx` at toy sizes: what it measures, counts and refuses to report."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner

from leank_convert.benchmark import onnx_step
from leank_convert.benchmark.attention import pruned_length
from leank_convert.benchmark.models import choose_subject
from leank_convert.benchmark.onnx_graphs import (
    FilledCache,
    build_stock,
    choose_layers,
    export_side,
    take_layers,
    weight_bytes,
    window_slot,
)
from leank_convert.cli import main
from leank_convert.errors import LeanKError
from leank_convert.onnx.quantize import quantize_weights

TOY = ["benchmark", "onnx", "--geometry", "tiny", "--layers", "0", "--rounds", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Graphs by side and weights, each exported once: that takes seconds."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def run(graphs, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    def export(model, subject, side, folder, weights):
        kept = graphs / f"{side} {weights}"
        if weights is None and not kept.exists():
            export_side(model, subject, side, kept, None)
        elif not kept.exists():
            shutil.copytree(export(model, subject, side, folder, None).parent, kept)
            quantize_weights(kept / "model.onnx", weights)
        return kept / "model.onnx"

    monkeypatch.setattr(onnx_step, "export_side", export)
    # One model in both places, as there is one pair of graphs.
    monkeypatch.setattr(onnx_step, "build_stock", lambda shape, name: build_stock(shape, "step"))
    return lambda *arguments: CliRunner().invoke(main, [*TOY, *arguments])


@pytest.fixture
def subject():
    return take_layers(choose_subject(None, None, "tiny"), [0, 1])


def test_attention_and_step_are_measured_beside_the_dense_graph(run):
    result = run("--length", "3", "--length", "96")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    document = json.loads(result.stdout)
    assert (document["benchmark"], document["layers"], document["ok"]) == ("onnx", [0], True)
    assert document["environment"]["threads"] == 1
    bandwidth = document["read_bandwidth"]
    assert bandwidth["gigabytes_per_second"] == max(bandwidth["ways"].values())
    short, long = document["cases"]
    # Nothing is pruned yet, and all slots of the window are there.
    assert (short["tokens"], short["pruned"], long["pruned"]) == (3, 0, 76)
    for case in (short, long):
        for name in ("attention", "step"):
            figures = case[name]
            for side in ("dense", "leank"):
                assert figures["checks"][side]["ok"]
                assert figures[side]["bytes"] == case["cache_bytes"][side] + document["weight_bytes"][name]
            times = [figures[side]["milliseconds"] for side in ("dense", "leank")]
            assert figures["ratio"] == pytest.approx(times[0] / times[1])
            assert figures["byte_ratio"] == figures["dense"]["bytes"] / figures["leank"]["bytes"]
    # A check that pruning does not move would prove nothing.
    checks = long["step"]["checks"]["leank"]
    assert short["step"]["checks"]["leank"]["pruning_effect"] == 0
    assert checks["pruning_effect"] > 1e3 * checks["error"]
    assert "whole step, one row" in result.stderr
    assert "say nothing of speed" not in result.stderr


def test_quantized_weights_count_as_stored_and_are_held_to_what_they_were_rounded_to(run, graphs, subject):
    import onnx

    result = run("--length", "96", "--weights", "int4")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["weights"], document["dtype"]) == ("int4", "float32")
    for check in document["cases"][0]["step"]["checks"].values():
        # Of rounded activations alone; 4 bits of weights are further off.
        assert 1e-4 < check["error"] < check["tolerance"]
    assert check["pruning_effect"] > 3 * check["tolerance"]
    stored = onnx.load(graphs / "dense int4" / "model.onnx").graph.initializer
    total = sum(len(tensor.raw_data) for tensor in stored if tensor.name.endswith(("_quantized", "_scales")))
    model = build_stock(take_layers(subject, [0]).geometry, "step")
    norms = sum(weight.numel() for name, weight in model.named_parameters() if "norm" in name)
    assert weight_bytes(model, "int4") == total + 4 * norms


def test_a_wrong_cache_gets_no_figures(run, monkeypatch):
    fill = FilledCache.buffers

    def forget(cache, side):
        held = fill(cache, side)
        return {name: torch.zeros_like(part) if "pruned" in name else part for name, part in held.items()}

    monkeypatch.setattr(FilledCache, "buffers", forget)
    result = run("--length", "96")
    document = json.loads(result.stdout)
    (case,) = document["cases"]
    assert (result.exit_code, document["ok"], case["ok"]) == (1, False, False)
    for name in ("attention", "step"):
        assert case[name]["checks"]["dense"]["ok"]
        assert not case[name]["checks"]["leank"]["ok"]
        assert "ratio" not in case[name]
    assert "the leank graph's logits are WRONG" in result.stderr


@pytest.mark.parametrize("num_tokens", [3, 96])
def test_the_cache_holds_each_token_once_and_no_channel_that_is_pruned(subject, num_tokens):
    windows = subject.windows
    cache = FilledCache(subject, num_tokens)
    buffers = cache.buffers("leank")
    stop = windows.sink_size + cache.num_pruned
    assert cache.num_pruned == pruned_length(num_tokens + 1, windows)
    whole = [token for token in range(num_tokens) if not windows.sink_size <= token < stop]
    slots = [window_slot(token, windows) for token in whole]
    assert len({*slots, cache.slot("leank")}) == len(slots) + 1
    for layer, mask in enumerate(subject.channel_masks):
        prefix = f"past_key_values.{layer}"
        for head, kept in enumerate(mask):
            lanes = torch.cat([kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]])
            keys, values = cache.keys[layer][0, head], cache.values[layer][0, head]
            assert buffers[f"{prefix}.window.key"][0, head, slots].equal(keys[whole][:, lanes])
            assert buffers[f"{prefix}.window.value"][0, head][:, slots].T.equal(values[whole])
            width = int(kept.sum())
            if width and cache.num_pruned:
                place = head - int((mask.sum(-1) < width).sum())
                part = slice(windows.sink_size, stop)
                assert buffers[f"{prefix}.pruned.{width}.key"][0, place].equal(keys[part][:, kept])
                assert buffers[f"{prefix}.pruned.{width}.value"][0, place].T.equal(values[part])


def test_layers_that_stand_for_all_come_from_all_depths():
    subject = choose_subject(None, None, "llama-3.1-8b")
    chosen = choose_layers(subject, None)
    assert [layer // 8 for layer in chosen] == [0, 1, 2, 3]
    taken = [sum(width + 128 * (width > 0) for width in widths) for widths in subject.mask.widths]
    assert sum(taken[layer] for layer in chosen) / 4 == pytest.approx(sum(taken) / len(taken), rel=0.01)
    assert choose_layers(subject, [3, 1]) == [3, 1]
    with pytest.raises(LeanKError, match="there is no layer 32"):
        choose_layers(subject, [0, 32])


def test_next_to_nothing_but_attention_is_in_the_model_that_attention_is_timed_in():
    subject = take_layers(choose_subject(None, None, "llama-3.1-8b"), [0])
    attention, step = (weight_bytes(build_stock(subject.geometry, name)) for name in ("attention", "step"))
    assert attention < 0.03 * step
    facts = subject.geometry.facts
    assert attention < 0.05 * 4096 * facts.num_key_value_heads * facts.head_dim * 2 * 4


def test_weights_that_a_step_reads_leave_the_embedding_out(subject):
    model = build_stock(subject.geometry, "step")
    total = sum(weight.numel() for weight in model.parameters())
    assert weight_bytes(model) == 4 * (total - 128 * 64)
    # Unless it is the output's, too.
    model.set_output_embeddings(model.get_input_embeddings())
    assert weight_bytes(model) == 4 * (total - 128 * 64)


def test_all_layers_are_refused():
    result = CliRunner().invoke(main, ["benchmark", "onnx", "--layers", "all"])
    assert result.exit_code == 2
    assert "name some" in result.output
