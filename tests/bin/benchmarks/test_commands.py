"""`bin/benchmark` as a user calls it, each command at toy sizes on the CPU; what is wrong gets no figure."""

import functools
import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner

from bin.benchmarks import geometries, kernel, random_models
from bin.benchmarks.__main__ import benchmark
from bin.benchmarks.decode_attention import FilledLayer
from bin.benchmarks.random_models import choose_setup
from leank_convert.mask import save_mask
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.train.graphs import Gradients

CPU = ("--device", "cpu")
KERNEL = ("kernel", *CPU, "--case", "2x64", "--case", "1x90x40", "--rounds", "2")
ONE_ROUND = ("kernel", *CPU, "--rounds", "1")
GENERATE = ("generate", *CPU, "--case", "2x40x6", "--drafts", "3", "--rounds", "2")
MEMORY = ("memory", *CPU, "--largest", "48x8", "--limit", "0.0015")
TRAIN = ("train", *CPU)
ONNX = ("onnx", "--geometry", "tiny", "--threads", "1", "--length", "96")
# Of the tiny shape in bfloat16: K and V of a token; q, k, v, o, gate, up, down and two norms of each layer;
# last norm and head.
DENSE_TOKEN = 2 * 2 * 4 * 64 * 2
LAYER = (64 * 512 + 2 * 64 * 256 + 512 * 64 + 3 * 64 * 96 + 2 * 64) * 2
WEIGHTS = 2 * LAYER + (64 + 64 * 128) * 2


def run(*arguments):
    return CliRunner().invoke(benchmark, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def measured():
    """The JSON of a run that must succeed, the only line of stdout, and its tables."""

    def parse(*arguments):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\n") == 1
        return json.loads(result.stdout), result.stderr

    return functools.cache(parse)


@pytest.mark.parametrize("command", [KERNEL, GENERATE, MEMORY, TRAIN], ids=lambda command: command[0])
def test_a_document_says_what_ran_where_and_a_table_that_a_cpu_tests(command, measured):
    document, table = measured(*command)
    assert (document["benchmark"], document["ok"], document["dtype"]) == (command[0], True, "bfloat16")
    assert document["environment"]["versions"]["torch"] == torch.__version__
    assert document["environment"]["device_type"] == "cpu"
    assert document["subject"]["geometry"] == "tiny"
    assert "a test of this command" in table
    assert document.get("kernel", "plain torch").startswith("plain torch")


def test_kernel_reports_layers_peers_and_bytes(measured):
    document, table = measured(*KERNEL)
    case, several = document["cases"]
    assert (case["batch"], case["tokens"], several["new"]) == (2, 64, 40)
    assert sorted(case["peers"]) == ["leank-all-channels", "sdpa"]
    for entry in (*case["layers"], *case["peers"].values(), *several["peers"].values()):
        assert entry["check"]["ok"]
        assert entry["gigabytes_per_second"] == pytest.approx(entry["bytes"] / entry["milliseconds"] / 1e6)
    assert case["bytes"] == sum(layer["bytes"] for layer in case["layers"]) / 2 < case["dense_bytes"]
    assert case["ratio_to_best"] == min(case["ratios"].values())
    assert "mean of 2 layers" in table and f"ceiling by bytes: {case['byte_ratio']:.2f}x\n" in table
    assert "decode attention, batch 1, 90 tokens, 40 of them new" in table
    assert (
        "not by a graph's replay but by wall clock: leank-all-channels, sdpa, leank, mean of 2 layers\n"
        in table
    )


def test_fp8_caches_read_half_and_are_held_to_what_they_store(measured):
    (plain, _), (fp8, _) = measured(*KERNEL), measured(*KERNEL, "--kv-dtype", "fp8")
    for ours, other in zip(fp8["cases"], plain["cases"], strict=True):
        assert 2 * ours["bytes"] == other["bytes"]
        peers = ours["peers"]
        assert 2 * peers["leank-all-channels"]["bytes"] == peers["sdpa"]["bytes"]
        assert peers["leank-own-dtype"]["bytes"] == other["bytes"]
        assert all(peer["check"]["ok"] for peer in peers.values())
    (case,) = measured(*GENERATE, "--kv-dtype", "fp8")[0]["cases"]
    assert list(case["sides"])[:3] == ["leank", "own-dtype", "all-channels"]
    assert all(side["check"]["ok"] for side in case["sides"].values())
    read = {name: side["bytes_by_kind"]["cache"] for name, side in case["sides"].items()}
    assert 2 * read["leank"] == read["own-dtype"] and 2 * read["all-channels"] == read["dense-dynamic"]


def test_pruned_values_are_not_read_and_results_are_held_to_it(measured):
    (plain, _), (pruned, _) = measured(*KERNEL), measured(*KERNEL, "--values", "0.5")
    for ours, other in zip(pruned["cases"], plain["cases"], strict=True):
        for layer, whole in zip(ours["layers"], other["layers"], strict=True):
            assert layer["check"]["ok"]
            regions, before = layer["bytes_by_region"], whole["bytes_by_region"]
            assert 2 * regions["kept_values"] == before["kept_values"]
            assert regions["window_values"] > before["window_values"]
            assert regions["kept_keys"] == before["kept_keys"]
    (case,) = measured(*GENERATE, "--values", "0.75")[0]["cases"]
    assert case["sides"]["leank"]["check"]["ok"]
    widths = choose_setup(None, "llama-3.1-8b", values=0.75).value_widths
    assert {width for layer in widths for width in layer} == {0, 64, 128}


def test_a_masks_own_values_are_what_is_measured(measured, tmp_path):
    setup, path = choose_setup(None, "tiny", values=0.5), tmp_path / "mask.safetensors"
    known = MaskProvenance.for_model("a", setup.geometry.facts, method="b", **setup.windows.sizes)
    save_mask(replace(setup.mask, provenance=replace(known, value_weights="0" * 64)), path)
    own, asked = (measured(*KERNEL, *given)[0] for given in (("--mask", path), ("--values", "0.5")))
    assert own["ok"] and [case["bytes"] for case in own["cases"]] == [
        case["bytes"] for case in asked["cases"]
    ]
    # Of K 10 quarters of heads are kept, of V half of 7 heads; there are 8.
    shares = measured(*MEMORY, "--mask", path)[0]["allocated"]
    assert shares["ideal_share_beyond_window"] == (10 / 4 + 7 / 2) / 16
    result = run(*KERNEL, "--mask", path, "--values", "0.5")
    assert result.exit_code == 2 and "prunes V already: leave out `--values`" in result.stderr


def test_generate_measures_all_peers_on_the_same_weights_beside_their_byte_limits(measured):
    document, table = measured(*GENERATE)
    assert document["check"]["error"] < document["check"]["pruning_effect"] / 4
    (case,) = document["cases"]
    sides = case["sides"]
    assert list(sides) == ["leank", "all-channels", "dense-graph-cudnn", "dense-graph-flash", "dense-dynamic"]
    for name, side in sides.items():
        assert side["check"]["ok"]
        limit = side["step_bytes"] / document["read_bandwidth"] / 1e6
        assert side["byte_limit_milliseconds"] == pytest.approx(limit)
        assert side["bytes_by_kind"]["weights"] == WEIGHTS
        assert ("generate_seconds" in side) == ("graph-" not in name)
        assert ("draft_milliseconds" in side) == (name in ("leank", "all-channels"))
    # Windows: sink 4, recent 16. Of 41 tokens of a row, the last of them new, 20 are pruned.
    widths = [width for layer in choose_setup(None, "tiny").layout.widths for width in layer]
    pruned = 20 * 2 * sum(width + 64 * (width > 0) for width in widths)
    assert sides["leank"]["bytes_by_kind"]["cache"] == 2 * (pruned + 21 * DENSE_TOKEN)
    assert sides["all-channels"]["step_bytes"] == WEIGHTS + 2 * 41 * DENSE_TOKEN
    assert "not by a graph's replay but by wall clock: leank (plain torch), all-channels" in table
    assert "drafts: ms/step" in table


def test_memory_counts_a_cache_and_finds_batches(measured):
    document, table = measured(*MEMORY)
    allocated = document["allocated"]
    # The last token that is generated is not fed; 192 are asked for, which are three times 64.
    assert allocated["tokens"] == 191
    assert allocated["dense_bytes_per_token"] == DENSE_TOKEN
    ideal = allocated["ideal_share_beyond_window"]
    assert allocated["share_of_dense_beyond_window"] == pytest.approx(ideal * 192 / 191)
    assert document["prefill"]["leank"]["peak_bytes"] is None, "the CPU counts nothing"
    (case,) = document["largest_batch"]
    for side in (case["leank"], case["dense"]):
        assert side["tried"][str(side["batch"])] and not side["tried"][str(side["batch"] + 1)]
    assert case["dense"]["row_bytes"] == 56 * DENSE_TOKEN
    assert case["ratio"] == case["leank"]["batch"] / case["dense"]["batch"]
    assert "largest batch" in table


def test_a_training_step_is_checked_and_timed_beside_its_prefill(measured):
    document, table = measured(*TRAIN)
    cases = document["check"]["cases"]
    assert [(case["questions"], case["ok"]) for case in cases] == [(1, True), (2, True)]
    step = document["step"]
    # Two questions of 3 + 5 tokens share the first 96 - 8.
    assert (step["length"], step["context"], step["cache_bytes"]) == (96, 88, DENSE_TOKEN * 96)
    assert [case["questions"] for case in step["steps"]] == [1, 2]
    for case in step["steps"]:
        assert case["ratio_to_own_prefill"] == pytest.approx(case["seconds"] / step["prefill"]["seconds"])
    assert "not by a graph's replay but by wall clock: our prefill" in table


def test_a_wrong_training_step_is_not_timed(monkeypatch):
    right = Gradients.add
    made = []

    def wrong(self, sample, student, weight):
        made.append(self)
        return right(self, sample, student, 1.1 if made[0] is self else 1.0)

    monkeypatch.setattr(Gradients, "add", wrong)
    result = run(*TRAIN)
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"], "step" in document) == (1, False, False)
    assert "WRONG, nothing is measured" in result.stderr


def test_an_onnx_step_is_measured_beside_the_dense_graph(measured, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    # Of one layer: two graphs are traced, which takes seconds a layer.
    toy = geometries.GEOMETRIES["tiny"]
    toy = replace(toy, config={**toy.config, "num_hidden_layers": 1})
    monkeypatch.setattr(geometries, "GEOMETRIES", {"tiny": toy})
    document, table = measured(*ONNX)
    assert (document["layers"], document["ok"], document["threads"]) == ([0], True, 1)
    (case,) = document["cases"]
    figures = case["step"]
    assert case["pruned"] == 76 and all(check["ok"] for check in figures["checks"].values())
    for side in ("dense", "leank"):
        assert figures[side]["bytes"] == case["cache_bytes"][side] + document["weight_bytes"]
    # 4 heads of 64 channels and as many values; of 96 tokens the dense side has room for one more.
    assert case["cache_bytes"]["dense"] == 97 * 4 * 2 * 64 * 4
    window = 24 * 4 * 2 * 64 * 4
    pruned = sum(width + 64 for layer in document["widths"] for width in layer if width)
    assert case["cache_bytes"]["leank"] == window + 76 * pruned * 4
    assert "whole step, one row" in table and "say nothing of speed" not in table


def test_a_peer_that_fails_or_lies_has_no_figures(monkeypatch):
    fail = Mock(side_effect=RuntimeError("no available kernel\nand why"))
    peers = {"sdpa": fail, "sdpa-flash": lambda query, keys, values: lambda: torch.zeros_like(query)}
    monkeypatch.setattr(kernel, "PEERS", {**kernel.PEERS, **peers})
    result = run(*ONE_ROUND, "--peers", "sdpa,sdpa-flash")
    (case,) = json.loads(result.stdout)["cases"]
    assert case["peers"]["sdpa"] == {"milliseconds": None, "why": "no available kernel", "check": None}
    lied = case["peers"]["sdpa-flash"]
    assert lied["milliseconds"] is None and not lied["check"]["ok"]
    assert (result.exit_code, case["ratios"], case["ratio_to_best"]) == (0, {}, None)
    assert "sdpa has no figures: no available kernel\n" in result.stderr


def test_wrong_attention_has_no_figure_and_exits_1(monkeypatch):
    right = FilledLayer.attend
    monkeypatch.setattr(FilledLayer, "attend", lambda self: right(self) * 1.1)
    result = run(*ONE_ROUND)
    document = json.loads(result.stdout)
    (case,) = document["cases"]
    assert (result.exit_code, document["ok"]) == (1, False)
    assert case["milliseconds"] is case["layers"][0]["milliseconds"] is None
    # Ours with all channels is wrong too; torch's is not.
    assert case["peers"]["leank-all-channels"]["milliseconds"] is None
    assert case["peers"]["sdpa"]["milliseconds"] > 0
    assert "WRONG: 0, 1" in result.stderr


@pytest.mark.parametrize("command", [GENERATE, MEMORY], ids=lambda command: command[0])
def test_wrong_decoding_is_not_timed_and_exits_1(command, monkeypatch):
    right = random_models.forced_logits

    def wrong(model, tokens, cache=None):
        logits = right(model, tokens, cache)
        return logits * 1.2 if hasattr(model, "build_cache") and model.dtype == torch.bfloat16 else logits

    monkeypatch.setattr(random_models, "forced_logits", wrong)
    result = run(*command)
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"], document["check"]["ok"]) == (1, False, False)
    assert document.get("cases", []) == [] and "allocated" not in document
    assert "WRONG" in result.stderr


@pytest.mark.parametrize("command", ["kernel", "generate", "memory", "train"])
def test_the_cpu_has_to_be_asked_for(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no CUDA device" in result.stderr and "--device cpu" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernel", "--case", "64"], "`64` is not batch x tokens, such as 64x32k"),
        (["kernel", "--case", "2x8x8"], "of 8 tokens 8 are new, which leaves none in the cache"),
        (["kernel", "--case", "1" + "0" * 5000], "error: invalid value for `--case`"),
        (["kernel", "--dtype", "float32", "--kv-dtype", "fp8"], "--kv-dtype goes with --dtype bfloat16"),
        (["kernel", "--peers", "fast"], "there is no peer `fast`"),
        (["kernel", "--geometry", "tiny", "--mask", "MASK"], "another model than"),
        (["generate", "--case", "2x40x1"], "without a decode step\nhint: ask for at least 2"),
        (["train", "--length", "9"], "`--length` 9 leaves nothing to prune between sink 4 and recent window"),
        (["serve", "--peers", "slow"], "vLLM is not installed"),
        (["answers", "out", "--longest", "3"], "error: invalid value for `--longest`: 3 is not in the range"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_mistakes_exit_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    torch.save(torch.ones(32, 8, 128), tmp_path / "mask.pth")
    given = [str(tmp_path / "mask.pth") if part == "MASK" else part for part in arguments]
    result = run(given[0], *CPU, *given[1:])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
