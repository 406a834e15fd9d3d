"""The `analyze` command on a mask, alone and with a model beside it: text, page and numbers."""

import json
import re

import numpy
import pytest
import torch

from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.kv_scales import describe_cache
from leank_convert.mask import ChannelMask
from leank_convert.report.distribution import analyze_mask
from tests.checks import done, edit_json, rejected, run

SHORT = ["--set", "data.min_length=160", "--set", "data.max_length=170"]
SHORT += ["--set", "data.tasks=[retrieval, multi_value]"]


@pytest.fixture
def outlying():
    """Pair 5 of 16 is kept in every head, of others a quarter; the last layer has two empty heads."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 4, 32, generator=generator) < 0.25
    mask[..., [5, 21]] = True
    mask[3, 1:3] = False
    return mask


@pytest.fixture
def save(tmp_path):
    def write(mask):
        numpy.save(tmp_path / "mask.npy", mask.numpy())
        return tmp_path / "mask.npy"

    return write


def test_text_names_outliers_empty_heads_and_savings(save, outlying, tmp_path):
    shown = done("analyze", save(outlying))
    parts = ("4 layers, 4 KV heads, head_dim 32", "2 of 16 (12.5%)", "pair 5, 87.5% kept", "87.5*", "V 12.5%")
    assert all(part in shown for part in parts)
    widths = outlying.sum(-1)[2].tolist()
    (row,) = re.findall(r"^ +2 +[\d.]+ +0 +(.*)$", shown, re.MULTILINE)[-1:]
    assert [int(width) for width in row.split()] == widths
    assert [path.name for path in tmp_path.iterdir()] == ["mask.npy"]


def test_files_are_a_page_and_the_numbers(save, outlying, tmp_path):
    out = tmp_path / "new" / "out"
    result = run("analyze", save(outlying), "-o", out, "--json")
    assert result.exit_code == 0, result.stderr
    numbers = {**analyze_mask(ChannelMask(outlying)).to_dict(), "measured": None}
    assert json.loads((out / "analysis.json").read_text()) == json.loads(result.stdout) == numbers
    assert {path.name for path in out.iterdir()} == {"analysis.html", "analysis.json"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert str(out / "analysis.html") in result.stderr
    page = (out / "analysis.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 4
    assert "pair 5: 88%" in page
    assert "<h1>Analysis of mask.npy</h1>" in page


def test_many_widths_are_told_by_their_number(save):
    many = torch.arange(32) < torch.arange(32)[None, :, None]
    assert "32 widths from 0 to 31" in done("analyze", save(many))


def test_an_export_is_told_in_the_models_head_order_and_its_bytes(source_model, shipped_onnx, tmp_path):
    mask = torch.zeros(3, 4, 12, dtype=torch.bool)
    mask[0, 0] = True
    mask[2, 1, :5] = True
    out = export_checkpoint(source_model(), ChannelMask(mask), tmp_path / "ckpt")
    found = json.loads(done("analyze", out, "--json"))
    assert found["widths"] == [[12, 0, 0, 0], [0, 0, 0, 0], [0, 5, 0, 0]]
    assert found["element_bytes"] == 4
    assert found["model"] == "llama-model"
    leank = read_json(out / "config.json")["leank"]
    edit_json(out / "config.json", leank={**leank, **describe_cache("int4", None)})
    told = json.loads(done("analyze", out, "--json"))["bytes_per_token"]
    shown = json.loads(done("inspect", out, "--json"))["bytes_per_token"]
    assert told == shown and told["key_pruned"] < found["bytes_per_token"]["key_pruned"]
    edit_json(out / "config.json", leank={**leank, "kv_dtype": "fp4"})
    assert "`leank.kv_dtype` is 'fp4'" in rejected("analyze", out)
    told, shown = (json.loads(done(name, shipped_onnx, "--json")) for name in ("analyze", "inspect"))
    assert told["bytes_per_token"] == shown["bytes_per_token"] and told["element_bytes"] == 4


def test_numbers_and_figures_of_the_model_are_told_and_written_beside_the_masks(save, tmp_path):
    mask = torch.rand(4, 4, 64, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[0, :2] = False
    out = tmp_path / "out"
    options = ["--model", "testbed", "-n", 1, "--device", "cpu", *SHORT]
    shown = done("analyze", save(mask), *options, "-o", out)
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
    ("artifact", "arguments", "message"),
    [
        ("nope.npy", "", "does not exist"),
        ("notes.txt", "", "unknown file type '.txt'"),
        ("llama-model", "", "holds no `channel_mask.safetensors`"),
        ("mask.npy", "--set data.max_length=9", "--set goes with --model"),
        ("mask.npy", "--device cpu", "--device goes with --model"),
        ("mask.npy", "--seed 0", "--seed goes with --model"),
        ("mask.npy", "--model someone/some-model", "no packaged recipe for `someone/some-model`"),
        ("mask.npy", "--model testbed --device toaster", "toaster"),
        (
            "mask.npy",
            "--model testbed --set data.min_length=90 --set data.max_length=90",
            "no sample of 90",
        ),
        ("other.npy", "--model testbed", "has shape [4, 2, 64]; model `testbed` needs [4, 4, 64]"),
    ],
)
def test_what_cannot_be_analyzed_is_refused_and_nothing_is_written(
    artifact, arguments, message, source_model, tmp_path, monkeypatch
):
    for name, heads in (("mask", 4), ("other", 2)):
        numpy.save(tmp_path / f"{name}.npy", numpy.ones((4, heads, 64), dtype=bool))
    source_model()
    (tmp_path / "notes.txt").write_text("no mask")
    if artifact == "other.npy":  # which is known before weights are loaded
        monkeypatch.setattr("leank_convert.train.model._load_weights", lambda *_: pytest.fail("loaded"))
    told = rejected("analyze", tmp_path / artifact, *arguments.split(), "-o", tmp_path / "out")
    assert message in told and not (tmp_path / "out").exists()
