"""The `analyze` command with a model beside the mask."""

import json
import re

import numpy
import pytest
import torch

from tests.checks import done, rejected

SHORT = [
    part
    for setting in ("data.min_length=160", "data.max_length=170", "data.tasks=[retrieval, multi_value]")
    for part in ("--set", setting)
]


@pytest.fixture(scope="module")
def mask_file(tmp_path_factory):
    mask = torch.rand(4, 4, 64, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[0, :2] = False
    path = tmp_path_factory.mktemp("mask") / "mask.npy"
    numpy.save(path, mask.numpy())
    return path


def test_numbers_and_figures_of_the_model_are_told_and_written_beside_the_masks(mask_file, tmp_path):
    out = tmp_path / "out"
    options = ["--model", "testbed", "-n", 1, "--device", "cpu", *SHORT]
    shown = done("analyze", mask_file, *options, "-o", out)
    assert "retrieval, multi_value at 160, 163, 167, 170 tokens, 1 of each" in shown
    for row in ("between tasks", "between lengths", "high frequencies"):
        assert re.search(rf"^{row} +\S", shown, re.MULTILINE)
    measured = json.loads((out / "analysis.json").read_text())["measured"]
    assert numpy.shape(measured["correlation_between_tasks"]) == (2, 2)
    assert numpy.shape(measured["correlation_between_lengths"]) == (4, 4)
    assert numpy.shape(measured["high_frequency_ratio"]) == (4, 4)
    assert measured["num_samples"] == 1
    page = (out / "analysis.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 6
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "data.max_length=9"], "--set goes with --model"),
        (["--device", "cpu"], "--device goes with --model"),
        (["--model", "someone/some-model"], "no packaged recipe for `someone/some-model`"),
        (["--model", "testbed", "--device", "toaster"], "toaster"),
        (
            ["--model", "testbed", "--set", "data.min_length=90", "--set", "data.max_length=90"],
            "no sample of 90 tokens",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_refused(mask_file, tmp_path, arguments, message):
    assert message in rejected("analyze", mask_file, *arguments, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mask_of_another_shape_is_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    numpy.save(tmp_path / "mask.npy", numpy.ones((4, 2, 64), dtype=bool))
    monkeypatch.setattr("leank_convert.train.model._load_weights", lambda *_: pytest.fail("loading began"))
    told = rejected("analyze", tmp_path / "mask.npy", "--model", "testbed")
    assert "has shape [4, 2, 64]; model `testbed` needs [4, 4, 64]" in told and "hint: " in told
