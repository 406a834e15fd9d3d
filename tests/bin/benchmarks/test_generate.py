"""`benchmark generate`: its peers, what a step has to read, and how sides are compared."""

import json

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend

from bin.benchmarks import decode_step, generate
from bin.benchmarks.__main__ import benchmark
from bin.benchmarks.decode_step import UNMASKED_SDPA, GraphedDense, count_step_bytes
from bin.benchmarks.generate import compare
from bin.benchmarks.random_models import (
    build_all_channels,
    build_dense,
    build_model,
    choose_setup,
    forced_logits,
    random_prompt,
)

SIDES = ["leank", "all-channels", "dense-graph-cudnn", "dense-graph-flash", "dense-dynamic"]
# Of the tiny shape in bfloat16: q, k, v, o, gate, up, down and two norms of each layer, last norm and head.
LAYER = (64 * 512 + 2 * 64 * 256 + 512 * 64 + 3 * 64 * 96 + 2 * 64) * 2
WEIGHTS = 2 * LAYER + (64 + 64 * 128) * 2
DENSE_TOKEN = 2 * 2 * 4 * 64 * 2


def run(*arguments):
    result = CliRunner().invoke(benchmark, ["generate", "--device", "cpu", "--rounds", "2", *arguments])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    return document, result.stderr


@pytest.fixture(scope="module")
def tiny():
    setup = choose_setup(None, None, "tiny", dtype="float32")
    torch.manual_seed(0)
    model = build_model(setup)
    with torch.no_grad():
        yield setup, model, build_dense(model, setup.geometry)


def test_all_peers_are_measured_on_the_same_weights_beside_their_byte_limits():
    document, table = run("--case", "2x40x6")
    assert document["check"]["error"] < document["check"]["pruning_effect"] / 4
    bandwidth = document["read_bandwidth"]["gigabytes_per_second"]
    (case,) = document["cases"]
    assert (case["batch"], case["prompt"], case["new"]) == (2, 40, 6)
    sides = case["sides"]
    assert list(sides) == SIDES
    for name, side in sides.items():
        assert side["check"]["ok"]
        limit = side["step_bytes"] / bandwidth / 1e6
        assert side["byte_limit_milliseconds"] == pytest.approx(limit)
        step = side["step_milliseconds" if name == "dense-dynamic" else "replay_milliseconds"]
        assert side["bandwidth_share"] == pytest.approx(limit / step)
        assert side["bytes_by_kind"]["weights"] == WEIGHTS
        if "graph" not in name:
            assert side["tokens_per_second"] == pytest.approx(2 * 6 / side["generate_seconds"])
            assert side["decode_seconds"] < side["generate_seconds"]
            assert 0 < side["prefill_share"] < 1
            assert side["rounds"] == 2
    assert sides["all-channels"]["step_bytes"] == WEIGHTS + 2 * 41 * DENSE_TOKEN
    assert "generate_seconds" not in sides["dense-graph-cudnn"]
    assert "replay" not in sides["dense-dynamic"]
    assert case["ratios"] == {name: compare(sides["leank"], sides[name]) for name in SIDES[1:]}
    assert "leank (plain torch)" in table
    assert "dense-graph-flash: not captured, wall clock" in table


def test_a_step_that_verifies_drafts_is_timed_beside_that_of_one_token():
    document, table = run("--case", "2x40x6", "--peers", "all-channels,dense-dynamic", "--drafts", "3")
    (case,) = document["cases"]
    assert document["drafts"] == 3
    assert case["sides"]["leank"]["draft_milliseconds"] > 0
    assert case["sides"]["all-channels"]["draft"]["calls"] == 1
    assert "draft" not in case["sides"]["dense-dynamic"]
    assert "drafts: ms/step with so many drafted tokens to verify" in table


def test_ratios_are_those_of_figures_that_both_have():
    ours = {"step_bytes": 6, "replay_milliseconds": 2.0, "step_milliseconds": 4.0, "decode_seconds": 1.0}
    ours["generate_seconds"] = 5.0
    graphed = {"step_bytes": 9, "replay_milliseconds": 3.0}
    nothing = dict.fromkeys(("bytes", "replay", "step", "decode", "generate"))
    assert compare(ours, graphed) == {**nothing, "bytes": 1.5, "replay": 1.5}
    called = {"step_bytes": 9, "step_milliseconds": 5.0, "decode_seconds": 2.5, "generate_seconds": 6.0}
    expected = {"bytes": 1.5, "replay": None, "step": 1.25, "decode": 2.5, "generate": 1.2}
    assert compare(ours, called) == expected
    assert compare(ours, {"why": "it failed"}) == nothing


def test_a_step_reads_weights_without_the_embedding_kept_channels_and_whole_windows(tiny):
    setup, model, _ = tiny
    # Windows: sink 4, recent 16. Of 41 tokens of a row, the last of them new, 20 are pruned.
    kept = sum(width for layer in setup.layout.widths for width in layer)
    seeing = sum(width > 0 for layer in setup.layout.widths for width in layer)
    pruned, whole = 20 * 4 * (kept + seeing * 64), 21 * 4 * (8 * 64 * 2)
    read = count_step_bytes(model, setup, 3, 41)
    assert read == {"weights": 2 * WEIGHTS, "cache": 3 * (pruned + whole)}
    assert count_step_bytes(model, setup.keeping_all(), 3, 41)["cache"] == 3 * 41 * 2 * DENSE_TOKEN
    model.lm_head.weight, own = model.get_input_embeddings().weight, model.lm_head.weight
    try:
        assert count_step_bytes(model, setup, 3, 41)["weights"] == 2 * WEIGHTS, "a tied table is read once"
    finally:
        model.lm_head.weight = own


def test_all_channels_and_the_graphed_step_are_the_dense_model_on_its_very_parameters(tiny):
    setup, model, dense = tiny
    whole = build_all_channels(model, setup)
    ours = dict(model.named_parameters())
    for other in (whole, dense):
        assert all(weight is ours[name] for name, weight in other.named_parameters())
    tokens = random_prompt(model, 2, 60)
    expected = forced_logits(dense, tokens)
    assert not torch.allclose(forced_logits(model, tokens), expected, atol=1e-3)
    for peer in (whole, GraphedDense(dense, SDPBackend.CUDNN_ATTENTION)):
        torch.testing.assert_close(forced_logits(peer, tokens), expected, atol=1e-5, rtol=1e-5)


def test_a_graphed_step_has_no_mask_and_does_not_repeat_keys(tiny, monkeypatch):
    setup, model, _ = tiny
    # As transformers' releases decide while a graph is captured, which none is here.
    monkeypatch.setattr("transformers.masking_utils._ignore_causal_mask_sdpa", lambda *_, **__: False)
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def noted(query, key, value, attn_mask=None, **options):
        seen.append((key.shape[1], attn_mask))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    dense = build_dense(model, setup.geometry, UNMASKED_SDPA)
    forced_logits(GraphedDense(dense, SDPBackend.FLASH_ATTENTION), random_prompt(model, 2, 30))
    assert set(seen) == {(setup.geometry.facts.num_key_value_heads, None)}


def test_a_step_may_be_repeated(tiny):
    *_, dense = tiny
    tokens = random_prompt(dense, 2, 30)
    cache = GraphedDense(dense, SDPBackend.CUDNN_ATTENTION)(tokens[:, :-1]).past_key_values
    step = decode_step.GraphedStep(dense, tokens[:, -1:], cache, SDPBackend.CUDNN_ATTENTION)
    first = step.run()
    step.time()
    assert torch.equal(step.run(), first)
    assert cache.get_seq_length() == 30


def test_a_peer_that_fails_or_is_wrong_has_a_reason_and_no_figures(monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("no room for a graph\nmore of it")

    right = decode_step.PreallocatedLayer.update

    def wrong(layer, keys, values, *rest):
        return right(layer, keys, 2 * values, *rest)

    monkeypatch.setattr(decode_step.PreallocatedLayer, "update", wrong)
    monkeypatch.setattr(generate, "build_all_channels", fail)
    document, table = run("--case", "2x40x4", "--case", "1x30x4")
    for case in document["cases"]:
        assert case["sides"]["all-channels"] == {"why": "no room for a graph"}
        graphed = case["sides"]["dense-graph-cudnn"]
        assert graphed["why"] == "its result is wrong"
        assert not graphed["check"]["ok"]
        assert "replay_milliseconds" not in graphed
        assert set(case["ratios"]["dense-graph-cudnn"].values()) == {None}
        assert case["sides"]["dense-dynamic"]["step_milliseconds"] > 0
    assert "all-channels (plain torch): no figures: no room for a graph\n" in table


def test_a_peer_that_fails_in_one_case_is_measured_in_the_next(monkeypatch):
    right = GraphedDense.time_step

    def too_long(self, prompt):
        if prompt.shape[1] > 35:
            raise RuntimeError("No available kernel")
        return right(self, prompt)

    monkeypatch.setattr(GraphedDense, "time_step", too_long)
    document, _ = run("--case", "2x40x4", "--case", "1x30x4", "--peers", "dense-graph-cudnn")
    long, short = (case["sides"]["dense-graph-cudnn"] for case in document["cases"])
    assert long == {"why": "No available kernel"}
    assert short["replay_milliseconds"] > 0
