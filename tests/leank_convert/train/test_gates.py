"""Gates of heads: what is learned and kept, alone and with channels of the other heads, and their files."""

import json
import logging

import pytest
import torch

from leank_convert.mask import load_mask
from leank_convert.methods import calibration
from leank_convert.recipe import Recipe
from leank_convert.report import mask_report
from leank_convert.train import loop
from leank_convert.train.forecast import forecast
from leank_convert.train.gates import load_pattern
from leank_convert.train.packing import pack_sample
from leank_convert.train.passes import distil
from leank_convert.train.run import Run
from leank_convert.train.selection import select_channels
from leank_convert.train.split_attention import Student
from leank_convert.train.state import TrainingDirectory, load_state
from leank_convert.windows import Windows
from tests.checks import llama_facts, refusal, short_recipe
from tests.leank_convert.train.conftest import fail_at, logged_steps

HEADS = {"steps": 5, "learning_rate": 0.1, "l1_weight": 0.5}
BOTH = {"method": "duo-attention+leank", "pruning_ratio": 0.75, "heads": HEADS}


@pytest.fixture
def make(train_one, tmp_path):
    """Makes the only mask of a recipe in `tmp_path / out`."""

    def run(out="out", *, resume=False, **changes):
        recipe = short_recipe(**{"heads": HEADS, "method": "duo-attention", **changes})
        return train_one(recipe, tmp_path / out, resume=resume)

    return run


@pytest.fixture
def pattern(tmp_path):
    """The folder of a pattern of the model's two layers of two heads."""
    folder = tmp_path / "pattern"
    folder.mkdir()
    (folder / "full_attention_heads.tsv").write_text("0.2\t1.0\n0.9\t0.1")
    (folder / "config.json").write_text(json.dumps({"sink_size": 4, "recent_size": 16}))
    return str(folder)


def read_pattern(out):
    lines = (out / "leank" / "heads" / "full_attention_heads.tsv").read_text().splitlines()
    return torch.tensor([[float(gate) for gate in line.split("\t")] for line in lines])


def test_first_steps_follow_loss_and_penalty_of_the_gates(make, load, tmp_path):
    heads = {**HEADS, "steps": 3}  # too few for the rate to be ramped
    make(heads=heads)
    loaded, samples = load(method="duo-attention", heads=heads)
    mean = load_mask(tmp_path / "out" / "channel_mask.safetensors").key_mean.float()
    gates = torch.ones(2, 2, requires_grad=True)
    adam = torch.optim.Adam([gates])
    for step in range(3):
        adam.param_groups[0]["lr"] = 0.1
        adam.zero_grad()
        ones = torch.ones(2, 2, 16)
        student = Student(Windows(4, 16), ones, ones.any(-1), gates)
        loss = distil(loaded.model, pack_sample(samples.draw(step)), student, key_mean=mean)
        (loss + 0.5 * gates.mean()).backward()
        adam.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
    assert torch.equal(read_pattern(tmp_path / "out"), gates.detach())
    assert gates.unique().numel() > 1


@pytest.mark.parametrize(("ratio", "num_whole"), [(0.25, 3), (0.75, 1)])
def test_heads_with_the_highest_gates_keep_all_channels_and_the_others_none(make, tmp_path, ratio, num_whole):
    mask = make(pruning_ratio=ratio)
    gates = read_pattern(tmp_path / "out").flatten()
    highest = gates.argsort(descending=True, stable=True)[:num_whole].tolist()
    assert [width for layer in mask.widths for width in layer] == [
        16 if head in highest else 0 for head in range(4)
    ]
    assert mask.scaling_factors is None
    assert (mask.provenance.method, mask.provenance.width_multiple) == ("duo-attention", 16)


def test_log_report_and_forecast_speak_of_gates_and_not_of_stages_or_channels(
    make, retriever_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "write_report", mask_report.write_report)
    make()
    assert {row["stage"] for row in logged_steps(tmp_path / "out")} == {0}
    page = (tmp_path / "out" / "leank" / "report.html").read_text()
    assert "<dd>5 (gates of heads)</dd>" in page
    assert "What heads were chosen by" in page
    assert "Every channel" not in page and "mean scaling factor" not in page
    recipe = short_recipe(method="duo-attention", heads=HEADS)
    text = forecast(retriever_folder, recipe, device="cpu").render()
    assert "4 gates of heads; the weights" in text
    assert "5: 5 of gates" in text and "of stage" not in text
    both = forecast(retriever_folder, short_recipe(**BOTH), device="cpu")
    assert "4 gates of heads, 64 scaling factors; the weights" in both.render()
    assert (both.to_dict()["gates"], both.to_dict()["scaling_factors"]) == (4, 64)


def test_an_imported_pattern_gives_the_mask_of_its_gates_without_the_model(
    make, pattern, tmp_path, monkeypatch
):
    monkeypatch.setattr(calibration, "load_model", lambda *_: pytest.fail("the model was loaded"))
    mask = make(heads={"pattern": pattern}, pruning_ratio=0.5, held_out_samples=0, key_mean=False)
    assert mask.widths == ((0, 16), (16, 0))
    assert not TrainingDirectory(tmp_path / "out").state.exists()


def test_streaming_heads_keep_nothing_and_only_the_other_heads_channels_are_learned(make, tmp_path):
    mask = make(**BOTH)
    gates = read_pattern(tmp_path / "out")[..., None]
    streaming = ~select_channels(gates, pruning_ratio=0.5, width_multiple=1)[..., 0]
    assert streaming.sum() == 2
    assert not mask.channel_mask[streaming].any() and (mask.scaling_factors[streaming] == 0).all()
    assert mask.channel_mask[~streaming].any() and (mask.scaling_factors[~streaming] != 1).any(-1).all()
    assert 0.5 < mask.pruning_ratio < 1
    rows = logged_steps(tmp_path / "out")
    assert [row["stage"] for row in rows] == [0] * 5 + [1] * 7 + [2] * 6
    # Of two heads that are shut from the beginning, their factors are 0.
    assert rows[5]["mean_factor"] == 0.5


def test_resume_refuses_a_pattern_that_was_changed(make, pattern, tmp_path):
    make(**{**BOTH, "heads": {"pattern": pattern}})
    (tmp_path / "pattern" / "full_attention_heads.tsv").write_text("1.0\t0.2\n0.9\t0.1\n")
    with refusal(r"`heads.pattern` .* holds other gates than"):
        make(**{**BOTH, "heads": {"pattern": pattern}}, resume=True)


@pytest.mark.parametrize("rounding", ["nearest", "budget"])
def test_a_ratio_that_the_streaming_heads_reach_already_keeps_the_others_whole(make, pattern, rounding):
    mask = make(**{**BOTH, "heads": {"pattern": pattern}, "pruning_ratio": 0.5, "rounding": rounding})
    assert mask.widths == ((0, 16), (16, 0))


@pytest.mark.parametrize("at", [4, 8], ids=["in", "behind"])
def test_a_run_killed_in_or_behind_the_gates_ends_with_the_same_bits(at, make, tmp_path):
    make("whole", **BOTH)
    with fail_at(Run, "advance", at, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        make("killed", **BOTH)
    make("killed", resume=True, **BOTH)
    whole, killed = (TrainingDirectory(tmp_path / name) for name in ("whole", "killed"))
    assert killed.mask.read_bytes() == whole.mask.read_bytes()
    assert torch.equal(read_pattern(tmp_path / "killed"), read_pattern(tmp_path / "whole"))
    assert logged_steps(tmp_path / "killed") == logged_steps(tmp_path / "whole")
    assert torch.equal(load_state(killed.state).gates, load_state(whole.state).gates)


# As numpy writes it: two layers of three heads, one number below 0 and one above 1.
GATES = (
    "-9.584426879882812500e-05\t5.585937500000000000e-01\t1.000000000000000000e+00\n"
    "1.015625000000000000e+00\t0.000000000000000000e+00\t7.343750000000000000e-01\n"
)
CONFIG = {"model_name": "models/M", "lr": 0.02, "sink_size": 128, "recent_size": 256}


@pytest.fixture
def load_gates(tmp_path, monkeypatch):
    """Reads gates that lie in `tmp_path`, a folder at home, for a model of so many layers and KV heads."""
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    (tmp_path / "full_attention_heads.tsv").write_text(GATES)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(layers=2, heads=3, **changes):
        recipe = Recipe(method="duo-attention", heads={"pattern": f"~/{tmp_path.name}"}, **changes)
        return load_pattern(recipe, llama_facts(layers, heads))

    return run


def test_gates_are_read_by_layer_and_head_and_clamped_and_another_models_are_refused(load_gates, tmp_path):
    gates = load_gates()
    assert gates.dtype == torch.float32
    assert gates[..., 0].tolist() == [[0.0, 0.55859375, 1.0], [1.0, 0.0, 0.734375]]
    with refusal(r"full_attention_heads.tsv` has gates of shape \[2, 3\].*\[3, 2\]"):
        load_gates(3, 2)
    for text, shape in (("0.5\t1.0\n", (1, 2)), ("0.5\n1.0\n", (2, 1))):  # a single layer or head
        (tmp_path / "full_attention_heads.tsv").write_text(text)
        assert load_gates(*shape).shape == (*shape, 1)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("full_attention_heads.tsv", None, "No such file"),
        ("full_attention_heads.tsv", " \n", "it is empty"),
        ("full_attention_heads.tsv", "0.5\t1\t1\n0.5\n", "columns"),
        ("full_attention_heads.tsv", "0.5\tnan\t1\n0\t0\t0\n", "a gate is not finite"),
        ("config.json", None, "No such file"),
        ("config.json", '{"sink_size": 4}', "has no `recent_size`"),
        ("config.json", '{"sink_size": -4, "recent_size": 1}', "`sink_size` is -4"),
    ],
)
def test_files_of_another_form_are_refused_by_name(load_gates, tmp_path, name, text, reason):
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    with refusal(rf"{name}` of `heads.pattern` cannot be read: .*{reason}", "attn_patterns"):
        load_gates()


@pytest.mark.parametrize(("learned", "recent_size", "warns"), [(256, 256, 0), (256, 255, 1), (10**9, 99, 1)])
def test_smaller_windows_than_a_pattern_was_learned_with_are_told(
    load_gates, tmp_path, caplog, learned, recent_size, warns
):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "recent_size": learned}))
    with caplog.at_level(logging.WARNING, logger="leank_convert"):
        load_gates(windows={"sink_size": 128, "recent_size": recent_size})
    assert len(caplog.records) == warns
    assert not warns or f"`windows.recent_size` is {recent_size}" in caplog.text
    assert not warns or f"with `recent_size` {learned}" in caplog.text
