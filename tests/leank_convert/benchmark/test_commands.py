"""The commands as a user calls them, at toy sizes on the CPU."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from click.testing import CliRunner

from leank_convert.benchmark import accuracy, kernel, models
from leank_convert.benchmark import generate as generation
from leank_convert.benchmark.subject import Runtime, choose_subject
from leank_convert.cli import main
from leank_convert.errors import LeanKError

KERNEL = ["benchmark", "kernel", "--device", "cpu"]
GENERATE = ["benchmark", "generate", "--device", "cpu", "--case", "2x40x6"]
MEMORY = ["benchmark", "memory", "--device", "cpu"]


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def measured(run):
    """The JSON of a command that must succeed: the only line of stdout."""

    def call(*arguments):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\n") == 1
        return json.loads(result.stdout), result.stderr

    return call


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_kernel_reports_layers_peers_bytes_and_where_it_ran(measured):
    document, table = measured(*KERNEL, "--case", "2x64", "--case", "1x3", "--rounds", "2")
    assert document["benchmark"] == "kernel"
    assert document["ok"]
    assert document["environment"]["versions"]["torch"] == torch.__version__
    assert document["read_bandwidth"]["gigabytes_per_second"] > 0
    case, short = document["cases"]
    assert (case["batch"], case["tokens"]) == (2, 64)
    assert (short["batch"], short["tokens"]) == (1, 3)
    assert case["dense_bytes"] == 2 * 2 * 64 * 4 * 64 * 2
    assert sorted(case["peers"]) == ["leank-all-channels", "sdpa"]
    for entry in (*case["layers"], *case["peers"].values()):
        assert entry["check"]["ok"]
        assert entry["milliseconds"] > 0
        assert entry["method"] == "wall clock"
        achieved = entry["bytes"] / entry["milliseconds"] / 1e6
        assert entry["gigabytes_per_second"] == pytest.approx(achieved)
    assert [layer["layer"] for layer in case["layers"]] == [0, 1]
    assert case["mean_bytes"] == sum(layer["bytes"] for layer in case["layers"]) / 2
    assert case["mean_bytes"] < case["dense_bytes"]
    # Nothing is pruned yet: every byte is read.
    assert short["mean_bytes"] == short["dense_bytes"]
    ours = case["mean_milliseconds"]
    for name, peer in case["peers"].items():
        assert case["ratios"][name] == pytest.approx(peer["milliseconds"] / ours)
    assert case["ratio_to_best"] == min(case["ratios"].values())
    assert "mean of 2 layers" in table
    assert f"ceiling by bytes: {case['byte_ratio']:.2f}x\n" in table
    assert "wall clock, medians of 2 rounds" in table


def test_kernel_runs_the_layers_and_peers_asked_for(measured):
    document, _ = measured(*KERNEL, "--layers", "1", "--peers", "none", "--rounds", "1")
    (case,) = document["cases"]
    assert [layer["layer"] for layer in case["layers"]] == [1]
    assert case["peers"] == {}
    assert case["ratio_to_best"] is None


@pytest.mark.parametrize("command", [KERNEL, GENERATE, MEMORY], ids=lambda command: command[1])
def test_tables_are_100_columns_wide_and_say_that_a_cpu_tests(command, measured):
    document, table = measured(*command)
    assert max(map(len, table.splitlines())) <= 100
    assert "a test of this command" in table
    assert document["environment"]["device_type"] == "cpu"
    assert document["kernel"].startswith("plain torch")


@pytest.mark.parametrize("command", [GENERATE, MEMORY], ids=lambda command: command[1])
def test_rows_of_plain_torch_do_not_pass_for_the_kernels(command, measured, monkeypatch):
    assert "leank (plain torch)" in measured(*command)[1]
    monkeypatch.setattr(Runtime, "find_kernels", lambda self, device, dtype: [object()])
    document, table = measured(*command)
    assert document["kernel"] == "compiled kernel"
    assert "leank (" not in table


def test_dense_figures_of_our_own_are_the_kernels_or_none(monkeypatch):
    subject = choose_subject(None, None, "tiny")
    monkeypatch.setattr(Runtime, "find_kernels", lambda self, device, dtype: None)
    bench = kernel._Bench.__new__(kernel._Bench)
    bench.device, bench.dtype = torch.device("cuda", 0), torch.float32
    runtime = Runtime.__new__(Runtime)
    bench.own = bench.own_dense = (subject, runtime)
    inputs = torch.zeros(1, 8, 1, 64), torch.zeros(1, 4, 3, 64), torch.zeros(1, 4, 3, 64)
    found = bench._measure_peer("leank-all-channels", *inputs, None, 1)
    assert found["milliseconds"] is None
    assert "cannot be used here" in found["why"]
    with pytest.raises(LeanKError, match="nothing to measure") as error:
        bench.check_kernel()
    assert "--dtype bfloat16" in error.value.hint


def test_inputs_that_l2_holds_are_told(measured, monkeypatch):
    assert "too small" not in measured(*KERNEL)[1]
    monkeypatch.setattr(kernel, "outgrow_l2", lambda num_bytes, copies, device: False)
    document, table = measured(*KERNEL)
    assert not document["cases"][0]["beyond_l2"]
    assert "inputs are too small to be kept out of L2" in table


def test_what_a_failing_peer_prints_stays_off_the_table(measured, monkeypatch, capfd):
    def fail(query, keys, values):
        subprocess.run(["sh", "-c", "echo noise of a compiler >&2"], check=True)
        warnings.warn("noise of a library", stacklevel=1)
        raise RuntimeError(
            "CompilationError: at 194:23:\n    acc = (\nAssertionError('types differ')\n\nSet X"
        )

    monkeypatch.setattr("leank_convert.benchmark.kernel.PEERS", {"sdpa": fail})
    document, table = measured(*KERNEL, "--peers", "sdpa", "--rounds", "1")
    reason = "CompilationError: at 194:23: AssertionError('types differ')"
    assert document["cases"][0]["peers"]["sdpa"]["why"] == reason
    assert f"sdpa has no figures: {reason}\n" in table
    assert "noise" not in table + capfd.readouterr().err
    os.write(2, b"still there")
    assert capfd.readouterr().err == "still there"


def test_a_peer_that_fails_has_no_figures_and_says_why(measured, monkeypatch):
    from leank_convert.benchmark import peers

    def fail(query, keys, values):
        raise RuntimeError("no such kernel\nmore of it")

    def lie(query, keys, values):
        return lambda: torch.zeros_like(query)

    monkeypatch.setattr(peers, "PEERS", {"sdpa": fail, "flex": lie})
    monkeypatch.setattr("leank_convert.benchmark.kernel.PEERS", peers.PEERS)
    document, table = measured(*KERNEL, "--peers", "sdpa,flex", "--rounds", "1")
    (case,) = document["cases"]
    assert case["peers"]["sdpa"] == {"milliseconds": None, "why": "no such kernel", "check": None}
    assert case["peers"]["flex"]["milliseconds"] is None
    assert not case["peers"]["flex"]["check"]["ok"]
    assert case["ratios"] == {}
    assert "no such kernel" in table


def test_wrong_attention_has_no_figure_and_exits_1(run, monkeypatch):
    from leank_convert.benchmark.layers import FilledLayer

    right = FilledLayer.attend
    monkeypatch.setattr(FilledLayer, "attend", lambda self: right(self) * 1.1)
    result = run(*KERNEL, "--rounds", "1")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert not document["ok"]
    (case,) = document["cases"]
    assert case["mean_milliseconds"] is None
    assert all(layer["milliseconds"] is None for layer in case["layers"])
    # Ours with all channels is wrong too; torch's is not.
    assert case["peers"]["leank-all-channels"]["milliseconds"] is None
    assert case["peers"]["sdpa"]["milliseconds"] > 0
    assert "WRONG: 0, 1" in result.stderr


def test_generate_reports_both_sides_on_one_model(measured):
    document, table = measured(*GENERATE, "--peers", "dense-dynamic,dense-static")
    assert document["ok"]
    assert document["check"]["error"] < document["check"]["pruning_effect"] / 4
    (case,) = document["cases"]
    assert (case["batch"], case["prompt"], case["new"]) == (2, 40, 6)
    assert list(case["sides"]) == ["leank", "dense-dynamic", "dense-static"]
    for side in case["sides"].values():
        assert side["tokens_per_second"] == pytest.approx(2 * 6 / side["generate_seconds"])
        assert side["step_milliseconds"] > 0
    ours, dense = case["sides"]["leank"], case["sides"]["dense-dynamic"]
    assert case["ratios"]["dense-dynamic"]["loop_step"] == pytest.approx(
        dense["loop_step_milliseconds"] / ours["loop_step_milliseconds"]
    )
    assert ours["replay_milliseconds"] is None
    static = case["sides"]["dense-static"]
    assert static["warm_up_seconds"] > 0
    assert static["compiled_graphs"] == 0
    assert "dense-static: step not compiled; its mask" in table
    assert [side["rounds"] for side in case["sides"].values()] == [3, 3, 3]
    assert "dense-static" in table


def test_compiling_is_seen_where_it_happens(measured, monkeypatch):
    right = generation.generate

    def compiling(model, *arguments, **options):
        if options:  # a static cache
            torch.compile(lambda number: number + 1, backend="eager")(torch.ones(2))
        return right(model, *arguments, **options)

    monkeypatch.setattr(generation, "generate", compiling)
    document, table = measured(*GENERATE, "--peers", "dense-static", "--rounds", "1")
    assert document["cases"][0]["sides"]["dense-static"]["compiled_graphs"] > 0
    assert "dense-static: step compiled in" in table


def test_wrong_decoding_is_not_timed_and_exits_1(run, monkeypatch):
    right = models.forced_logits

    def wrong(model, tokens):
        logits = right(model, tokens)
        return logits * 1.2 if hasattr(model, "build_cache") and model.dtype == torch.bfloat16 else logits

    monkeypatch.setattr(models, "forced_logits", wrong)
    for command in (GENERATE, MEMORY):
        result = run(*command)
        assert result.exit_code == 1
        document = json.loads(result.stdout)
        assert not document["ok"]
        assert not document["check"]["ok"]
        assert document.get("cases", []) == []
        assert "allocated" not in document
        assert "WRONG" in result.stderr


def test_running_out_of_memory_is_one_sentence_and_exits_1(run, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("tried to allocate too much\nmore of it")

    monkeypatch.setattr(kernel, "attend_exactly", fail)
    result = run(*KERNEL, "--rounds", "1")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error: this does not fit on the device: tried to allocate too much\nhint: " in result.stderr


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("command", ["kernel", "generate", "memory", "train"])
def test_without_cuda_the_cpu_has_to_be_asked_for(run, command):
    result = run("benchmark", command)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "no CUDA device" in result.stderr
    assert "--device cpu" in result.stderr


def test_generate_without_a_decode_step_is_refused(run):
    result = run("benchmark", "generate", "--device", "cpu", "--case", "2x40x1")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "without a decode step\nhint: ask for at least 2" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "64"], "`64` is not batch x tokens, such as 64x32k"),
        (["--case", "0x64"], "`0x64` is not"),
        (["--layers", "first"], "`first` is neither"),
        (["--layers", "2"], "there is no layer 2"),
        (["--peers", "fast"], "there is no peer `fast`"),
        (["--geometry", "tiny", "--recipe", "llama-3.1-8b-instruct", "--mask", "MASK"], "another model than"),
        (["--recipe", "quickstart"], "no geometry has the shape"),
    ],
    ids=str,
)
def test_mistakes_exit_2_with_a_hint(run, tmp_path, arguments, message):
    torch.save(torch.ones(32, 8, 128), tmp_path / "mask.pth")
    result = run(*KERNEL, *(str(tmp_path / "mask.pth") if part == "MASK" else part for part in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


@pytest.mark.parametrize("command", ["kernel", "generate", "memory", "train"])
def test_help_imports_no_heavy_library(command):
    code = (
        "import sys; from leank_convert.cli import main\n"
        f"try: main(['benchmark', {command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'rich', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--geometry" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_tolerance_is_twice_torchs_own_error_and_nan_never_passes():
    assert accuracy.Check(2e-3, 1e-3).ok
    assert not accuracy.Check(2.1e-3, 1e-3).ok
    assert not accuracy.Check(float("nan"), 1e-3).ok
    assert accuracy.Check(float("nan"), 1e-3).to_dict()["error"] is None


def test_memory_counts_a_cache_and_finds_batches(measured):
    document, table = measured(*MEMORY, "--allocated", "180x12", "--largest", "48x8", "--limit", "0.0015")
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
    for side in ("leank", "dense"):
        batch = case[side]["batch"]
        assert case[side]["tried"][str(batch)]
        assert not case[side]["tried"][str(batch + 1)]
    assert case["ratio"] == case["leank"]["batch"] / case["dense"]["batch"]
    assert "largest batch" in table
    assert "kept_keys" in table
    assert "pending_keys" not in table, "nothing is pending"


def test_memory_leaves_out_what_is_skipped(measured):
    document, _ = measured(*MEMORY, "--skip", "allocated", "--skip", "largest", "--prefill", "1x30")
    assert "allocated" not in document
    assert document["prefill"]["batch"] == 1
    assert document["largest_batch"] == []
