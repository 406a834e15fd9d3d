"""`benchmark onnx` at toy sizes: what it measures, counts and refuses to report."""

import json

import onnx
import pytest
import torch
from click.testing import CliRunner

from leank_convert.benchmark import onnx_decoding
from leank_convert.benchmark.accuracy import pruned_length
from leank_convert.benchmark.onnx_cache import FilledCache, slot_of
from leank_convert.benchmark.onnx_graphs import (
    build_stock,
    choose_layers,
    count_whole_mask,
    export_side,
    pruned_numbers,
    take_layers,
    weight_bytes,
)
from leank_convert.benchmark.subject import choose_subject
from leank_convert.cli import main
from leank_convert.errors import LeanKError

TOY = ["benchmark", "onnx", "--geometry", "tiny", "--layers", "0", "--rounds", "2", "--threads", "1"]
LENGTHS = ["--length", "3", "--length", "96"]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Graphs by side, each exported once: that takes seconds."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def run(graphs, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    def export(model, subject, side, folder, weights):
        kept = graphs / f"{side} {weights}"
        if not kept.exists():
            export_side(model, subject, side, kept, weights)
        return kept / "model.onnx"

    monkeypatch.setattr(onnx_decoding, "export_side", export)
    # One model in both places, as there is one pair of graphs.
    monkeypatch.setattr(
        onnx_decoding, "build_stock", lambda shape, name, seed: build_stock(shape, "step", seed)
    )
    return lambda *arguments: CliRunner().invoke(main, [*TOY, *arguments])


@pytest.fixture
def subject():
    return take_layers(choose_subject(None, None, "tiny"), [0, 1])


def test_attention_and_step_are_measured_beside_the_dense_graph(run):
    result = run(*LENGTHS)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    document = json.loads(result.stdout)
    assert (document["benchmark"], document["layers"], document["ok"]) == ("onnx", [0], True)
    assert document["environment"]["threads"] == 1
    assert document["environment"]["load_after"] >= 0
    assert document["read_bandwidth"]["gigabytes_per_second"] == max(
        document["read_bandwidth"]["ways"].values()
    )
    short, long = document["cases"]
    # Nothing is pruned yet, and all slots of the window are there.
    assert (short["pruned"], short["tokens"]) == (0, 3)
    assert long["pruned"] == 76
    for case in (short, long):
        for name in ("attention", "step"):
            figures = case[name]
            for side in ("dense", "leank"):
                assert figures["checks"][side]["ok"]
                assert figures[side]["bytes"] == case["cache_bytes"][side] + document["weight_bytes"][name]
            assert figures["ratio"] == pytest.approx(
                figures["dense"]["milliseconds"] / figures["leank"]["milliseconds"]
            )
            assert figures["byte_ratio"] == figures["dense"]["bytes"] / figures["leank"]["bytes"]
    # A check that pruning does not move would prove nothing.
    assert short["step"]["checks"]["leank"]["pruning_effect"] == 0
    assert long["step"]["checks"]["leank"]["pruning_effect"] > 1e3 * long["step"]["checks"]["leank"]["error"]
    assert max(map(len, result.stderr.splitlines())) <= 100
    assert "whole step, one row" in result.stderr
    assert "load of the machine" in result.stderr
    assert "say nothing of speed" not in result.stderr


def test_both_sides_weights_are_quantized_and_held_to_what_they_were_rounded_to(run):
    result = run("--length", "96", "--weights", "int4")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["weights"], document["dtype"]) == ("int4", "float32")
    figures = document["cases"][0]["step"]
    for side in ("dense", "leank"):
        check = figures["checks"][side]
        # Of rounded activations alone; 4 bits of weights are further off.
        assert 1e-4 < check["error"] < check["tolerance"]
    assert figures["checks"]["leank"]["pruning_effect"] > 3 * figures["checks"]["leank"]["tolerance"]


def test_quantized_weights_count_as_they_are_stored(run, graphs, subject):
    model = build_stock(take_layers(subject, [0]).geometry, "step", seed=0)
    run("--length", "3", "--weights", "int4")
    stored = onnx.load(graphs / "dense int4" / "model.onnx").graph.initializer
    total = sum(len(tensor.raw_data) for tensor in stored if tensor.name.endswith(("_quantized", "_scales")))
    norms = sum(weight.numel() for name, weight in model.named_parameters() if "norm" in name)
    assert weight_bytes(model, "int4") == total + 4 * norms


def test_a_wrong_cache_gets_no_figures(run, monkeypatch):
    fill = FilledCache.leank_buffers

    def forget(cache):
        return {
            name: torch.zeros_like(held) if "pruned" in name else held for name, held in fill(cache).items()
        }

    monkeypatch.setattr(FilledCache, "leank_buffers", forget)
    result = run("--length", "96")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    (case,) = document["cases"]
    assert not document["ok"]
    assert not case["ok"]
    for name in ("attention", "step"):
        assert case[name]["checks"]["dense"]["ok"]
        assert not case[name]["checks"]["leank"]["ok"]
        assert "ratio" not in case[name]
    assert "the leank graph's logits are WRONG" in result.stderr


@pytest.mark.parametrize("num_tokens", [3, 21, 96])
def test_the_cache_holds_each_token_once_and_no_channel_that_is_pruned(subject, num_tokens):
    windows = subject.windows
    cache = FilledCache(subject, num_tokens, seed=0)
    buffers = cache.leank_buffers()
    stop = windows.sink_size + cache.num_pruned
    assert cache.num_pruned == pruned_length(num_tokens + 1, windows)
    whole = [token for token in range(num_tokens) if not windows.sink_size <= token < stop]
    slots = [slot_of(token, windows) for token in whole]
    assert len(set(slots)) == len(slots)
    assert cache.slot("leank") not in slots
    for layer, mask in enumerate(subject.channel_masks):
        prefix = f"past_key_values.{layer}"
        for head, kept in enumerate(mask):
            lanes = torch.cat([kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]])
            keys = buffers[f"{prefix}.window.key"][0, head]
            assert keys[slots].equal(cache.keys[layer][0, head, whole][:, lanes])
            values = buffers[f"{prefix}.window.value"][0, head]
            assert values[:, slots].T.equal(cache.values[layer][0, head, whole])
            width = int(kept.sum())
            if width and cache.num_pruned:
                place = head - int((mask.sum(-1) < width).sum())
                part = slice(windows.sink_size, stop)
                keys = buffers[f"{prefix}.pruned.{width}.key"][0, place]
                assert keys.equal(cache.keys[layer][0, head, part][:, kept])
                values = buffers[f"{prefix}.pruned.{width}.value"][0, place]
                assert values.T.equal(cache.values[layer][0, head, part])


def test_bytes_are_those_of_window_slots_kept_channels_and_values(subject):
    facts, windows = subject.geometry.facts, subject.windows
    cache = FilledCache(subject, 96, seed=0)
    slots = windows.sink_size + windows.recent_size + windows.flush_size
    window = facts.num_hidden_layers * facts.num_key_value_heads * slots * 2 * facts.head_dim
    pruned = cache.num_pruned * pruned_numbers(subject.mask.channel_mask)
    assert sum(held.nbytes for held in cache.leank_buffers().values()) == 4 * (window + pruned)
    dense = facts.num_hidden_layers * facts.num_key_value_heads * 97 * 2 * facts.head_dim
    assert sum(held.nbytes for held in cache.dense_buffers().values()) == 4 * dense
    assert count_whole_mask(subject, [96])["cache_share"]["96"] == pytest.approx(
        (window + pruned) / (dense * 96 / 97)
    )


def test_the_length_from_which_a_share_is_reached_is_the_first_one(subject):
    counted = count_whole_mask(subject, [64])
    first = counted["reached_from_tokens"]
    shares = count_whole_mask(subject, [first - 1, first])["cache_share"]
    assert counted["limit"] < counted["next_percent"]
    assert shares[str(first)] <= counted["next_percent"] < shares[str(first - 1)]


def test_layers_that_stand_for_all_come_from_all_depths():
    subject = choose_subject(None, None, "llama-3.1-8b")
    chosen = choose_layers(subject, None)
    assert [layer // 8 for layer in chosen] == [0, 1, 2, 3]
    taken = [pruned_numbers(mask) for mask in subject.mask.channel_mask]
    mean = sum(taken) / len(taken)
    assert sum(taken[layer] for layer in chosen) / 4 == pytest.approx(mean, rel=0.01)
    assert choose_layers(subject, [3, 1]) == [3, 1]


def test_a_layer_that_the_mask_lacks_is_an_error():
    with pytest.raises(LeanKError, match="there is no layer 2: `tiny` has 2"):
        choose_layers(choose_subject(None, None, "tiny"), [0, 2])


def test_next_to_nothing_but_attention_is_in_the_model_that_attention_is_timed_in():
    subject = take_layers(choose_subject(None, None, "llama-3.1-8b"), [0])
    attention, step = (
        weight_bytes(build_stock(subject.geometry, name, seed=0)) for name in ("attention", "step")
    )
    assert attention < 0.03 * step
    facts = subject.geometry.facts
    cache_of_4k = 4096 * facts.num_key_value_heads * facts.head_dim * 2 * 4
    assert attention < 0.05 * cache_of_4k


def test_weights_that_a_step_reads_leave_the_embedding_out(subject):
    model = build_stock(subject.geometry, "step", seed=0)
    total = sum(weight.numel() for weight in model.parameters())
    assert weight_bytes(model) == 4 * (total - 128 * 64)
    # Unless it is the output's, too.
    model.set_output_embeddings(model.get_input_embeddings())
    assert weight_bytes(model) == 4 * (total - 128 * 64)


def test_all_layers_are_refused():
    result = CliRunner().invoke(main, ["benchmark", "onnx", "--layers", "all"])
    assert result.exit_code == 2
    assert "name some" in result.output
