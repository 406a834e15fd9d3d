"""The check of held-out samples: where its result stands, and what it warns of."""

import dataclasses
import json
import math
import re
import shutil
import signal
import weakref

import pytest
import torch

from leank_convert.data import SampleSource
from leank_convert.held_out import TokenShares
from leank_convert.inspection import inspect_artifact, render_inspection
from leank_convert.mask import ChannelMask, load_mask
from leank_convert.methods import make
from leank_convert.report.mask_report import write_report
from leank_convert.safetensors_file import read_header
from leank_convert.train import held_out, run
from leank_convert.train.graphs import Gradients
from leank_convert.train.held_out import Compared, check_held_out
from leank_convert.train.log import read_log as read_steps
from leank_convert.train.ranks import Ranks
from tests.checks import edit_tensors, refusal, short_recipe
from tests.leank_convert.report.records import record


def step(stage, distillation, asked=0.7):
    return record(1, stage, distillation=distillation, pruning_ratio_asked=None if stage == 1 else asked)


@pytest.fixture
def check(load, monkeypatch):
    """Checks contexts of one answer, by who gets each of its tokens right.

    A letter is a token: D the dense model does, P the pruned one, B both, - none.
    """

    def run(contexts="B" * 16, *, loss=0.01, magnitude=1.0, kept=False, steps=(), progress=False, **changes):
        answers = iter(contexts)

        def compare(model, sample, students, *, key_mean, offload, longest):
            letters = next(answers)
            dense, pruned = (torch.tensor([letter in known for letter in letters]) for known in ("DB", "PB"))
            return Compared(torch.zeros(len(letters), dtype=torch.long), dense, (pruned,), (loss,), magnitude)

        monkeypatch.setattr(held_out, "compare_answers", compare)
        recipe = short_recipe(held_out_samples=len(contexts), **changes)
        mask = ChannelMask(torch.full((2, 2, 16), kept))
        cpu = Ranks(torch.device("cpu"))
        return check_held_out(load()[0], recipe, {0.7: mask}, cpu, steps, progress=progress)[0.7]

    return run


def test_answers_are_counted(check):
    found = check(["BB", "BDP", "D-", "B"])
    assert (found.num_contexts, found.num_answers, found.dense, found.pruned) == (4, 4, 2 / 4, 2 / 4)
    assert found.tokens == TokenShares(8, 6 / 8, 5 / 8)
    assert (found.distillation, found.seed, found.warnings) == (0.01, 1_000_000, ())
    assert found.shares == (
        "dense 75.0%, pruned 62.5% of 8 tokens in held-out answers; "
        "dense 50.0%, pruned 50.0% of 4 answers in full"
    )


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            {"contexts": ["BBBB"] * 12 + ["DBBB"] * 4},
            "predicts 100.0% of 64 tokens .* and the pruned one 93.8%: lower `pruning_ratio`, "
            "or have the best of stage 2's masks chosen",
        ),
        ({"method": "magnitude-alpha", "contexts": "D" * 16}, "or give `stage1` more steps"),
        ({"contexts": ["BB---"] * 16}, "the dense model itself predicts 40.0% of 80 .* take shorter con"),
        ({"loss": 1e-12}, r"changes nothing .* \(distillation 1e-12\)"),
        ({"steps": [step(1, 0.01), step(2, 1.1)]}, r"ended with a loss of 1.1e\+00, .* 1.0e-02"),
        ({"method": "random", "contexts": "D" * 16}, "lower `pruning_ratio`, or take a method that trains"),
        # What is not far off.
        ({}, None),
        ({"contexts": ["BBB-"] * 16}, None),  # no answer in full
        ({"contexts": "B" * 13 + "DDD"}, None),
        ({"contexts": ["B" * 60] * 12 + ["D" + "B" * 59] * 4}, None),
        ({"loss": 0.0, "kept": True}, None),
        ({"steps": [step(1, 0.01), step(2, 0.9)]}, None),
        ({"steps": [step(1, 0.01), step(2, 9.0, 0.5)]}, None),
    ],
)
def test_what_is_far_off_alone_is_told_with_what_to_change(check, case, told):
    warnings = check(**case).warnings
    assert len(warnings) == (told is not None)
    assert all(re.search(told, warning) and len(warning) < 400 for warning in warnings)


def test_values_that_are_not_finite_are_an_error(check):
    with refusal("not finite", exit_code=1):
        check(loss=math.nan)


@pytest.mark.parametrize("num_contexts", [1, 16])
def test_an_interruption_ends_it_with_the_exit_code_of_one(check, monkeypatch, num_contexts):
    drawn = []

    def draw(source, index):
        drawn.append(index)
        signal.raise_signal(signal.SIGINT)
        return SampleSource.draw(source, index)

    monkeypatch.setattr(held_out, "SampleSource", type("Interrupted", (SampleSource,), {"draw": draw}))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs jobs aside
    try:
        with refusal("Ctrl-C ended the check of held-out samples", "--resume", exit_code=130):
            check("B" * num_contexts)
    finally:
        signal.signal(signal.SIGINT, before)
    assert drawn == [0]


def test_the_result_stands_in_log_mask_report_and_inspection(finished, tmp_path):
    log = finished / "leank" / "log.jsonl"
    *steps, last = map(json.loads, log.read_text().splitlines())
    assert (last.pop("kind"), last.pop("pruning_ratio_asked")) == ("held_out", 0.7)
    assert len(read_steps(log)) == len(steps) == 13
    mask = load_mask(finished / "channel_mask.safetensors")
    found = mask.provenance.held_out
    assert json.loads(json.dumps(dataclasses.asdict(found))) == last
    assert found.warnings and found.num_contexts == 2
    write_report(mask, read_steps(log), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    facts = inspect_artifact(finished)
    assert json.loads(json.dumps(facts))["provenance"]["held_out"] == last
    for text in (page.replace("&#x27;", "'"), " ".join(render_inspection(facts).split())):
        assert found.render() in text
        assert found.warnings[0] in text


def test_samples_have_the_memory_that_training_had(train_one, tmp_path, monkeypatch):
    made = []

    def make_gradients(*given, **options):
        gradients = Gradients(*given, **options)
        made.append(weakref.ref(gradients))
        return gradients

    monkeypatch.setattr(run, "Gradients", make_gradients)
    monkeypatch.setattr(make, "check_held_out", lambda *_, **__: made.append([ref() for ref in made]) or {})
    train_one(short_recipe(), tmp_path / "out")
    assert made[1:] == [[None]]


def test_without_samples_there_is_no_check(train_one, tmp_path, finished_mask):
    mask = train_one(short_recipe(held_out_samples=0), tmp_path)
    assert mask.provenance.held_out is None
    assert torch.equal(mask.channel_mask, finished_mask.channel_mask)
    assert "held_out" not in read_header(tmp_path / "channel_mask.safetensors").metadata


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda good: good | {"tokens": None}, "`held_out.tokens` is None: Input should be an object"),
        (lambda good: [good], r"`held_out` is \[\{.*: Input should be an object"),
        (lambda good: good | {"warnings": ["a" * 10**6]}, "`held_out.warnings.0` is 'aaa.{,120}: Strin"),
    ],
)
def test_a_result_that_makes_no_sense_is_refused(finished, tmp_path, change, told):
    path = tmp_path / "mask.safetensors"
    shutil.copy(finished / "channel_mask.safetensors", path)
    held_out = json.loads(read_header(path).metadata["held_out"])
    edit_tensors(path, {"held_out": json.dumps(change(held_out))})
    with refusal(told):
        load_mask(path)
