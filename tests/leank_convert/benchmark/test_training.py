"""`benchmark train` as a user calls it, at toy sizes on the CPU."""

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from leank_convert.benchmark import training_check
from leank_convert.benchmark.geometries import GEOMETRIES
from leank_convert.benchmark.training import benchmark_training
from leank_convert.benchmark.training_peer import FullSequence
from leank_convert.benchmark.training_sizes import PARTS, choose_sizes
from leank_convert.cli import main
from leank_convert.errors import LeanKError
from leank_convert.train.step import distil

TRAIN = ["benchmark", "train", "--device", "cpu"]


def run(*arguments):
    return CliRunner().invoke(main, [*TRAIN, *arguments])


def measured(*arguments):
    """The JSON of a run that must succeed, the only line of stdout, and its tables."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout), result.stderr


def skipping_all_but(*parts):
    return [option for part in PARTS if part not in parts for option in ("--skip", part)]


def test_all_parts_are_measured_checked_and_printed():
    document, table = measured("--questions", "2", "--question-size", "3x5", "--rounds", "2")
    assert document["ok"]
    assert (document["benchmark"], document["dtype"]) == ("train", "bfloat16")
    assert (document["question_tokens"], document["answer_tokens"]) == (3, 5)
    assert document["subject"]["geometry"] == "tiny"
    assert [(case["questions"], case["stage"]) for case in document["check"]["cases"]] == [
        (1, 1),
        (2, 1),
        (2, 2),
    ]
    for case in document["check"]["cases"]:
        assert case["loss"]["ok"]
        # What is checked tells one token more or less in the window.
        assert case["gradient"]["error"] < case["window_effect"] / 4
    step = document["step"]
    assert (step["length"], step["context"]) == (96, 88)
    assert step["best_stock_prefill"] == "sdpa"
    assert [case["questions"] for case in step["steps"]] == [1, 2]
    for case in step["steps"]:
        assert case["ratio_to_own_prefill"] == pytest.approx(case["seconds"] / step["prefill"]["seconds"])
        stock = step["stock_prefills"]["sdpa"]["seconds"]
        assert case["ratio_to_stock_prefill"] == pytest.approx(case["seconds"] / stock)
        assert case["rounds"] == 2
    assert [case["length"] for case in document["peer"]] == [48, 96]
    for case in document["peer"]:
        theirs = case["full_sequence"]["sdpa"]
        assert case["ratio"] == pytest.approx(theirs["seconds"] / case["ours"]["seconds"])
        assert theirs["gradient_distance"] < 0.1
    memory = document["memory"]
    assert memory["cache_bytes"] == 2 * 2 * 4 * 64 * 2 * 128
    assert [case["peak_bytes"] for case in memory["steps"]] == [None, None]
    one, several = document["schedule"]
    assert (len(one["seconds"]), len(several["seconds"])) == (4, 2)
    assert (one["schedule_steps"], several["schedule_steps"]) == (2200, 1100)
    for case in (one, several):
        assert case["mean_seconds"] == pytest.approx(sum(case["seconds"]) / len(case["seconds"]))
        assert case["schedule_seconds"] == pytest.approx(case["schedule_steps"] * case["mean_seconds"])
        assert all(48 <= length <= 128 for length in case["lengths"])
    assert max(map(len, table.splitlines())) <= 100
    for title in ("one step on 96 tokens", "full sequence", "peak memory", "extrapolated", "left out: start"):
        assert title in table


@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_without_the_others(part):
    document, _ = measured(*skipping_all_but(part), "--schedule-steps", "1", "--peer-length", "48")
    assert set(PARTS) & set(document) == {part}


def wrong_gradient(model, sample, student, **options):
    factors = student.scaling_factors
    # Right value, wrong gradient.
    loss = distil(model, sample, student, **options)
    return loss + 0.3 * loss.detach() * (factors - factors.detach()).sum()


def wrong_loss(model, sample, student, **options):
    loss = distil(model, sample, student, **options)
    return loss + 0.3 * loss.detach()


@pytest.mark.parametrize("wrong", [wrong_gradient, wrong_loss])
def test_a_wrong_step_has_no_figures_and_exits_1(monkeypatch, wrong):
    monkeypatch.setattr(training_check, "distil", wrong)
    result = run()
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert not document["ok"]
    assert not set(PARTS) & set(document)
    assert "WRONG: nothing is measured" in result.stderr


def test_a_wrong_window_is_caught(monkeypatch):
    def narrower(model, sample, student, **options):
        windows = type(student.windows)(student.windows.sink_size, student.windows.recent_size - 1)
        return distil(model, sample, type(student)(windows, student.scaling_factors, student.sees_middle))

    monkeypatch.setattr(training_check, "distil", narrower)
    result = run("--dtype", "float32")
    assert result.exit_code == 1
    assert not any(case["gradient"]["ok"] for case in json.loads(result.stdout)["check"]["cases"])


def limit_full_sequences(monkeypatch, longest):
    """Full sequences of more tokens run out of memory, but for the checked ones, which come first."""
    right = FullSequence.distil
    begun = []

    def limited(self, sample, student):
        if begun and sample.num_tokens > longest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore of it")
        return right(self, sample, student)

    monkeypatch.setattr(FullSequence, "distil", limited)
    original = training_check.StepChecks.to_dict
    monkeypatch.setattr(
        "leank_convert.benchmark.training.print_check", lambda report, checks: begun.append(original(checks))
    )


def test_full_sequences_that_do_not_fit_are_halved_until_they_do(monkeypatch):
    limit_full_sequences(monkeypatch, 50)
    document, table = measured(*skipping_all_but("peer"), "--peer-length", "160", "--peer-length", "32")
    assert [case["length"] for case in document["peer"]] == [32, 40, 80, 160]
    fitting = [case["ratio"] is not None for case in document["peer"]]
    assert fitting == [True, True, False, False]
    assert document["peer"][3]["full_sequence"]["sdpa"] == {
        "why": "CUDA out of memory. Tried to allocate 20 GiB."
    }
    assert all(case["ours"]["seconds"] > 0 for case in document["peer"])
    assert "160 tokens, sdpa: no figure, CUDA out of memory." in table


def test_full_sequences_that_fail_otherwise_are_not_tried_again(monkeypatch):
    right = FullSequence.distil

    def failing(self, sample, student):
        if sample.num_tokens == 50:
            raise RuntimeError("no such kernel")
        return right(self, sample, student)

    monkeypatch.setattr(FullSequence, "distil", failing)
    document, _ = measured(*skipping_all_but("peer"), "--peer-length", "50")
    (case,) = document["peer"]
    assert case["full_sequence"] == {"sdpa": {"why": "no such kernel"}}
    assert case["ratio"] is None


def test_without_a_stock_prefill_the_step_is_held_against_our_own(monkeypatch):
    def fail(model, input_ids):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("leank_convert.benchmark.training.prefill", fail)
    document, table = measured(*skipping_all_but("step"))
    assert document["step"]["best_stock_prefill"] is None
    assert [case["ratio_to_stock_prefill"] for case in document["step"]["steps"]] == [None, None]
    assert "stock prefill, sdpa, has no figure: no such kernel" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "long"], "`long` is not tokens, such as 64"),
        (["--question-size", "24"], "`24` is not question x answer, such as 64x32k"),
        (["--schedule-range", "128x48"], "the schedule's range ends at 48, before its start 128"),
        (["--length", "9"], "`--length` 9 leaves nothing to prune between sink 4 and recent window 16"),
        (["--device", "cpu:0x"], "cannot be used"),
    ],
    ids=str,
)
def test_mistakes_exit_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_processes_share_the_work_and_the_first_one_reports(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29571"]
    done = subprocess.run(
        [*command, "-m", "leank_convert", *TRAIN, "--length", "48", "--rounds", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    document = json.loads(line)
    assert document["ok"]
    assert not set(PARTS) & set(document)
    scale = document["scale"]
    assert (scale["ranks"], scale["rounds"], scale["tokens"]) == (2, 2, 48)
    assert scale["ratio"] == pytest.approx(scale["samples_per_second"] / scale["samples_per_second_alone"])
    assert done.stderr.count("2 processes") == 1


def test_a_device_that_was_not_asked_for_is_not_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LeanKError, match="no CUDA device to measure on"):
        benchmark_training(
            GEOMETRIES["tiny"], choose_sizes({}, (), toy=True), device=None, dtype=torch.bfloat16
        )
