"""The commands as a user calls them, at toy sizes on the CPU, each run once; what they refuse."""

import functools
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from bin.benchmarks import kernel, random_models
from bin.benchmarks.__main__ import benchmark
from bin.benchmarks.decode_attention import PEERS, FilledLayer
from leank_convert.train import graphs

KERNEL = ("kernel", "--device", "cpu", "--case", "2x64", "--case", "1x3", "--rounds", "2")
ONE_LAYER = ("kernel", "--device", "cpu", "--layers", "1", "--rounds", "1")
GENERATE = ("generate", "--device", "cpu", "--case", "2x40x6")
MEMORY = ("memory", "--device", "cpu", "--allocated", "180x12", "--largest", "48x8", "--limit", "0.0015")
TRAIN = ("train", "--device", "cpu", "--questions", "2", "--question-size", "3x5", "--rounds", "2")


def run(*arguments):
    return CliRunner().invoke(benchmark, [str(argument) for argument in arguments])


def parse(result):
    """The JSON of a run that must succeed, the only line of stdout, and its tables."""
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout), result.stderr


@pytest.fixture(scope="module")
def measured():
    return functools.cache(lambda *arguments: parse(run(*arguments)))


@pytest.mark.parametrize("command", [KERNEL, GENERATE, MEMORY, TRAIN], ids=lambda command: command[0])
def test_a_document_says_what_ran_where_and_a_table_that_a_cpu_tests(command, measured):
    document, table = measured(*command)
    assert (document["benchmark"], document["ok"], document["dtype"]) == (command[0], True, "bfloat16")
    assert document["environment"]["versions"]["torch"] == torch.__version__
    assert document["environment"]["device_type"] == "cpu"
    assert document["subject"]["geometry"] == "tiny"
    assert document["subject"]["recent_size"] == 16
    assert "a test of this command" in table
    assert document.get("kernel", "plain torch").startswith("plain torch")


def test_kernel_reports_layers_peers_and_bytes(measured):
    document, table = measured(*KERNEL)
    assert document["read_bandwidth"]["gigabytes_per_second"] > 0
    case, short = document["cases"]
    assert (case["batch"], case["tokens"], short["batch"], short["tokens"]) == (2, 64, 1, 3)
    assert case["dense_bytes"] == 2 * 2 * 64 * 4 * 64 * 2
    assert sorted(case["peers"]) == ["leank-all-channels", "sdpa"]
    for entry in (*case["layers"], *case["peers"].values()):
        assert entry["check"]["ok"]
        assert entry["method"] == "wall clock"
        achieved = entry["bytes"] / entry["milliseconds"] / 1e6
        assert entry["gigabytes_per_second"] == pytest.approx(achieved)
    assert [layer["layer"] for layer in case["layers"]] == [0, 1]
    assert case["mean_bytes"] == sum(layer["bytes"] for layer in case["layers"]) / 2 < case["dense_bytes"]
    # Nothing is pruned yet: every byte is read.
    assert short["mean_bytes"] == short["dense_bytes"]
    for name, peer in case["peers"].items():
        assert case["ratios"][name] == pytest.approx(peer["milliseconds"] / case["mean_milliseconds"])
    assert case["ratio_to_best"] == min(case["ratios"].values())
    assert "mean of 2 layers" in table
    assert f"ceiling by bytes: {case['byte_ratio']:.2f}x\n" in table
    assert "wall clock, medians" in table


def test_fp8_caches_read_half_and_are_held_to_what_they_store(measured):
    cases = ("--case", "1x90x8", "--case", "1x90x40")
    plain, fp8 = (measured(*KERNEL, *cases, *more)[0] for more in ((), ("--kv-dtype", "fp8")))
    assert "kv_dtype" not in plain["subject"] and fp8["subject"]["kv_dtype"] == "fp8"
    assert fp8["ok"] and len(fp8["cases"]) == 4
    for ours, other in zip(fp8["cases"], plain["cases"], strict=True):
        assert ours["dense_bytes"] == other["dense_bytes"] and 2 * ours["mean_bytes"] == other["mean_bytes"]
        dense, stock = ours["peers"]["leank-all-channels"], ours["peers"]["sdpa"]
        assert dense["check"]["ok"] and 2 * dense["bytes"] == stock["bytes"]
        pruned = ours["peers"]["leank-own-dtype"]
        assert pruned["bytes"] == other["mean_bytes"] and pruned["milliseconds"] > 0
        assert [layer["layer"] for layer in pruned["layers"]] == [0, 1]
    (plain,), (fp8,) = (
        measured(*GENERATE, *more)[0]["cases"] for more in ((), ("--kv-dtype", "fp8"))
    )  # fmt: skip
    assert list(fp8["sides"]) == ["leank", "own-dtype", *list(plain["sides"])[1:]]
    for name, side in fp8["sides"].items():
        assert side["check"]["ok"], name
        of_cache, times = side["bytes_by_kind"]["cache"], 2 if name in ("leank", "all-channels") else 1
        assert (
            times * of_cache == plain["sides"][name.replace("own-dtype", "leank")]["bytes_by_kind"]["cache"]
        )
    document, _ = measured(
        "memory", "--device", "cpu", "--skip", "prefill", "--skip", "largest", "--kv-dtype", "fp8"
    )
    held = document["allocated"]
    assert held["regions"]["kept_values"]["used"] <= held["tokens"] * 2 * 4 * 64
    assert held["ideal_share_beyond_window"] < 0.3
    refused = run(*KERNEL, "--dtype", "float32", "--kv-dtype", "fp8")
    assert refused.exit_code == 2 and "--kv-dtype goes with --dtype bfloat16" in refused.stderr


def test_kernel_measures_several_new_tokens_beside_peers_that_take_them():
    arguments = ("--case", "2x90x8", "--case", "1x90x40", "--peers", "leank-all-channels,sdpa,flex")
    document, table = parse(run("kernel", "--device", "cpu", "--rounds", "1", *arguments))
    assert document["ok"]
    assert [(case["tokens"], case["new"]) for case in document["cases"]] == [(90, 8), (90, 40)]
    for case in document["cases"]:
        assert all(layer["milliseconds"] > 0 for layer in case["layers"])
        assert case["peers"]["leank-all-channels"]["check"]["ok"] and case["peers"]["sdpa"]["check"]["ok"]
        assert case["peers"]["flex"]["why"] == "it is called for one new token alone"
    assert "decode attention, batch 1, 90 tokens, 40 of them new" in table


def test_a_peer_that_fails_or_lies_has_no_figures_and_its_noise_stays_off_the_table(monkeypatch, capfd):
    def fail(query, keys, values):
        subprocess.run(["sh", "-c", "echo noise of a compiler >&2"], check=True)
        warnings.warn("noise of a library", stacklevel=1)
        raise RuntimeError(
            "CompilationError: at 194:23:\n    acc = (\nAssertionError('types differ')\n\nSet X"
        )

    peers = {**PEERS, "sdpa": fail, "flex": lambda query, keys, values: lambda: torch.zeros_like(query)}
    monkeypatch.setattr(kernel, "PEERS", peers)
    document, table = parse(run(*ONE_LAYER, "--peers", "sdpa,flex"))
    (case,) = document["cases"]
    reason = "CompilationError: at 194:23: AssertionError('types differ')"
    assert case["peers"]["sdpa"] == {"milliseconds": None, "why": reason, "check": None}
    assert case["peers"]["flex"]["milliseconds"] is None
    assert not case["peers"]["flex"]["check"]["ok"]
    assert (case["ratios"], case["ratio_to_best"]) == ({}, None)
    assert [layer["layer"] for layer in case["layers"]] == [1]
    assert f"sdpa has no figures: {reason}\n" in table
    assert "noise" not in table + capfd.readouterr().err
    os.write(2, b"still there")
    assert capfd.readouterr().err == "still there"


def test_wrong_attention_has_no_figure_and_exits_1(monkeypatch):
    right = FilledLayer.attend
    monkeypatch.setattr(FilledLayer, "attend", lambda self: right(self) * 1.1)
    result = run(*ONE_LAYER)
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    (case,) = document["cases"]
    assert not document["ok"]
    assert case["mean_milliseconds"] is case["layers"][0]["milliseconds"] is None
    # Ours with all channels is wrong too; torch's is not.
    assert case["peers"]["leank-all-channels"]["milliseconds"] is None
    assert case["peers"]["sdpa"]["milliseconds"] > 0
    assert "WRONG: 1" in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate too much\nmore of it"),
        RuntimeError("tried to allocate too much\nDefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_one_sentence_and_exits_1(monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(kernel, "attend_exactly", fail)
    result = run(*ONE_LAYER)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "memory does not suffice for this benchmark: tried to allocate too much\nhint: " in result.stderr


def test_memory_counts_a_cache_and_finds_batches(measured):
    document, table = measured(*MEMORY)
    allocated = document["allocated"]
    # The last token that is generated is not fed.
    assert allocated["tokens"] == 191
    assert allocated["dense_bytes_per_token"] == 2 * 2 * 4 * 64 * 2
    regions = allocated["regions"]
    beyond = regions["kept_keys"]["allocated"] + regions["kept_values"]["allocated"]
    dense = allocated["dense_bytes_per_token"] * 191
    assert allocated["share_of_dense_beyond_window"] == pytest.approx(beyond / dense)
    # 192 tokens are asked for, which are three times 64: nothing is allocated for more.
    ideal = allocated["ideal_share_beyond_window"]
    assert allocated["share_of_dense_beyond_window"] == pytest.approx(ideal * 192 / 191)
    window = regions["window_keys"]["allocated"] + regions["window_values"]["allocated"]
    assert allocated["share_of_dense_with_window"] == pytest.approx((beyond + window) / dense)
    assert document["prefill"]["leank"]["peak_bytes"] is None
    (case,) = document["largest_batch"]
    assert (case["prompt"], case["new"]) == (48, 8)
    for side in (case["leank"], case["dense"]):
        assert side["tried"][str(side["batch"])]
        assert not side["tried"][str(side["batch"] + 1)]
    assert case["ratio"] == case["leank"]["batch"] / case["dense"]["batch"]
    assert "pending_keys" not in table, "nothing is pending"


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
    assert document.get("cases", []) == []
    assert "allocated" not in document
    assert "WRONG" in result.stderr


def test_a_training_step_is_held_to_full_sequences_and_timed_beside_its_prefill(measured):
    document, _ = measured(*TRAIN)
    cases = document["check"]["cases"]
    assert [(case["stage"], case["questions"], case["gradient"]["ok"]) for case in cases] == [
        (1, 1, True),
        (2, 2, True),
    ]
    step = document["step"]
    # Two questions of 3 + 5 tokens share the first 96 - 8.
    assert (step["length"], step["context"]) == (96, 88)
    assert step["cache_bytes"] == 2 * 2 * 4 * 64 * 2 * 96
    assert [case["questions"] for case in step["steps"]] == [1, 2]
    for case in step["steps"]:
        assert case["rounds"] == 2
        assert case["ratio_to_own_prefill"] == pytest.approx(case["seconds"] / step["prefill"]["seconds"])
        assert case["peak_bytes"] is None, "the CPU counts nothing"


def wrong_gradient(loss, factors):
    return loss + 0.3 * loss.detach() * (factors - factors.detach()).sum()


@pytest.mark.parametrize(
    "wrong", [wrong_gradient, lambda loss, factors: 1.3 * loss], ids=["gradient", "loss"]
)
def test_a_wrong_step_is_not_timed_and_exits_1(wrong, monkeypatch):
    right = graphs.distil
    monkeypatch.setattr(
        graphs,
        "distil",
        lambda *given, **options: wrong(right(*given, **options), given[-1].scaling_factors),
    )
    result = run(*TRAIN)
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"]) == (1, False)
    assert "step" not in document
    assert "WRONG, nothing is measured" in result.stderr


def test_a_window_of_one_token_less_is_a_wrong_step(monkeypatch):
    def narrower(model, sample, student, **options):
        windows = replace(student.windows, recent_size=student.windows.recent_size - 1)
        return right(model, sample, replace(student, windows=windows), **options)

    right = graphs.distil
    monkeypatch.setattr(graphs, "distil", narrower)
    check = json.loads(run(*TRAIN, "--dtype", "float32").stdout)["check"]
    assert [case["gradient"]["ok"] for case in check["cases"]] == [False, False]


@pytest.mark.parametrize("command", ["kernel", "generate", "memory", "train"])
def test_the_cpu_has_to_be_asked_for(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no CUDA device" in result.stderr
    assert "--device cpu" in result.stderr


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("kernel", ["--case", "64"], "`64` is not batch x tokens, such as 64x32k"),
        ("kernel", ["--case", "0x64"], "`0x64` is not"),
        ("kernel", ["--case", "2x64x4x4"], "`2x64x4x4` is not batch x tokens"),
        ("kernel", ["--case", "2x8x8"], "of 8 tokens 8 are new, which leaves none in the cache"),
        ("kernel", ["--layers", "first"], "`first` is neither"),
        ("kernel", ["--layers", "2"], "there is no layer 2: `tiny` has 2"),
        ("kernel", ["--peers", "fast"], "there is no peer `fast`"),
        ("kernel", ["--geometry", "tiny", "--mask", "MASK"], "another model than"),
        ("kernel", ["--recipe", "quickstart"], "no geometry has the shape"),
        ("kernel", ["--case", "8192x8192"], "`8192x8192` is no toy size"),
        ("memory", ["--prefill", "16777216x4"], "`16777216x4` is no toy size"),
        ("train", ["--length", "16777216"], "`16777216` is no toy size"),
        (
            "generate",
            ["--peers", "dense-static"],
            "there is no peer `dense-static`\nhint: known: `all-channels`",
        ),
        ("generate", ["--case", "2x40x1"], "without a decode step\nhint: ask for at least 2"),
        ("train", ["--length", "9"], "`--length` 9 leaves nothing to prune between sink 4 and recent window"),
        ("train", ["--device", "meta"], "cannot be used"),
    ],
    ids=str,
)
def test_mistakes_exit_2(tmp_path, command, arguments, message):
    torch.save(torch.ones(32, 8, 128), tmp_path / "mask.pth")
    given = [str(tmp_path / "mask.pth") if part == "MASK" else part for part in arguments]
    result = run(command, "--device", "cpu", *given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_help_imports_no_heavy_library():
    code = (
        "import sys; from bin.benchmarks.__main__ import benchmark\n"
        "try: benchmark(['kernel', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'rich', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--geometry" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
