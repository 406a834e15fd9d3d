"""What a run's log, trackers and progress bar hold, row by row."""

import json
import re
import sys
from unittest.mock import Mock, call

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.recipe import Recipe
from leank_convert.train.log import TrainingLog, name_heads, read_log
from tests.checks import refusal
from tests.leank_convert.report.records import record


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my-run" / "leank"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def write(folder):
    """Writes records in one go; keyword arguments are the recipe's."""

    def run(*records, start=0, progress=False, trackers=(), **settings):
        recipe = Recipe(trackers=trackers, **settings)
        with TrainingLog(folder, recipe, num_steps=4, start=start, progress=progress) as journal:
            for each in records:
                journal.write(each)

    return run


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the module, which notes what it is told. Its run ids count up from `run-1`."""
    module = Mock(runs=[])

    def init(**options):
        module.runs.append(Mock(options=options, id=options["id"] or f"run-{len(module.runs) + 1}"))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def read_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: {each.step: each.value for each in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_log_gives_back_what_was_written(write, folder):
    records = [record(1), record(2, gpu_bytes=12_345), record(3, stage=2, task="retrieval+passkey")]
    write(*records)
    assert read_log(folder / "log.jsonl") == records
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["gpu_bytes"] for row in rows] == [None, 12345, None]
    assert [row["pruning_ratio_asked"] for row in rows] == [None, None, 0.7]


def test_heads_are_named_by_the_models_layers():
    assert name_heads(torch.tensor([[False, True], [True, False]]), (3, 7)) == "3.1 7.0"


@pytest.mark.parametrize("torn", [b'{"step": 3, "sta', b'{"step": 3}\n', b"\0\0\xff", b"[" * 100_000])
def test_a_torn_line_is_left_out(torn, write, folder):
    write(record(1), record(2))
    with (folder / "log.jsonl").open("ab") as file:
        file.write(torn)
    assert read_log(folder / "log.jsonl") == [record(1), record(2)]


def test_steps_beyond_the_one_that_is_resumed_are_dropped_everywhere(write, folder):
    write(record(1), record(2), record(3), trackers=("tensorboard",))
    write(record(2, distillation=0.5), record(3, distillation=0.25), start=1, trackers=("tensorboard",))
    assert [each.distillation for each in read_log(folder / "log.jsonl")] == [0.01, 0.5, 0.25]
    assert read_scalars(folder)["stage1/distillation"] == pytest.approx({1: 0.01, 2: 0.5, 3: 0.25})


def test_a_run_without_tensorboard_says_so_and_has_its_log(write, folder, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level("INFO"):
        write(record(1), trackers=("tensorboard",))
    assert "TensorBoard is not installed" in caplog.text and not (folder / "tensorboard").exists()
    assert read_log(folder / "log.jsonl") == [record(1)]


def test_tensorboard_has_every_figure_of_a_step_and_tags_for_every_ratio(write, folder):
    write(
        record(1),
        record(2, stage=2, pruning_ratio_asked=0.5, gpu_bytes=5),
        record(3, stage=2, pruning_ratio_asked=0.8),
        pruning_ratio=(0.5, 0.8),
        trackers=("tensorboard",),
    )
    always = {"distillation", "learning_rate", "mean_factor", "num_tokens", "seconds"}
    expected = {"stage1": (1, always)}
    expected["stage2-0.5"] = 2, always | {"pruning_ratio", "empty_heads", "gpu_bytes"}
    expected["stage2-0.8"] = 3, always | {"pruning_ratio", "empty_heads"}
    scalars = read_scalars(folder)
    assert {tag: list(values) for tag, values in scalars.items()} == {
        f"{stage}/{name}": [step] for stage, (step, names) in expected.items() for name in names
    }
    assert scalars["stage2-0.5/pruning_ratio"] == {2: 0.703125}


def test_wandb_is_given_the_values_the_settings_and_the_end(write, wandb):
    write(record(1), record(2, stage=2), trackers=("wandb",), width_multiple=16)
    (run,) = wandb.runs
    assert (run.options["project"], run.options["name"]) == ("leank", "my-run")
    assert run.options["config"]["width_multiple"] == 16
    assert run.options["config"]["stage1"]["steps"] == 2000
    one, two, end = run.mock_calls
    assert (one.kwargs, two.kwargs, end) == ({"step": 1}, {"step": 2}, call.finish(exit_code=0))
    assert one.args[0]["stage1/distillation"] == 0.01 and "stage1/pruning_ratio" not in one.args[0]
    assert two.args[0]["stage2/pruning_ratio"] == 0.703125


def test_a_wandb_run_that_failed_is_told_so_and_goes_on_when_it_is_resumed(folder, write, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with (
        pytest.raises(LeanKError, match="the loss is nan"),
        TrainingLog(folder, Recipe(trackers=("wandb",)), num_steps=4, start=0, progress=False) as journal,
    ):
        journal.write(record(1))
        raise LeanKError("the loss is nan")
    assert read_log(folder / "log.jsonl") == [record(1)]
    write(record(2), start=1, trackers=("wandb",))
    first, second = wandb.runs
    assert first.mock_calls[-1] == call.finish(exit_code=1) and first.options["id"] is None
    assert (second.options["id"], second.options["resume"]) == (first.id, "allow")
    assert second.options["project"] == "mine"


def test_wandb_that_does_not_start_is_told_with_the_ways_out_and_ends_what_has_begun(write, folder, wandb):
    wandb.init = Mock(side_effect=RuntimeError("api_key not configured (no-tty)\nmore"))
    ways_out = "`wandb login`", "`WANDB_MODE=offline`", "drop `wandb`"
    with refusal(r"W&B cannot be started: api_key not .*no-tty\)", *ways_out):
        write(record(1), trackers=("tensorboard", "wandb"))
    assert read_scalars(folder) == {}


def test_progress_tells_stage_loss_speed_ratio_and_memory_within_eighty_columns(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    write(record(1), record(2, stage=2, num_tokens=3000, gpu_bytes=79_100_000_000), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", captured.err)
    bar, figures = drawn.rstrip("\n").splitlines()[-2:]
    assert bar.startswith("stage 2 ") and "2/4" in bar and "left" in bar
    assert figures.split("  ") == ["distillation 2.00e-02", "pruned 70.3%", "4,000 tokens/s", "GPU 79.1 GB"]
