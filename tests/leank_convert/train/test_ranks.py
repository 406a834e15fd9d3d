"""Several processes of one run, on the CPU: they learn what one learns, and fail as one."""

import csv
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.mask import load_mask
from leank_convert.train import TrainingDirectory, train_masks
from leank_convert.train.ranks import Ranks, join_ranks
from leank_convert.train.schedule import Schedule
from leank_convert.train.state import load_state

# Arguments: recipe as JSON, model, out, what happens on which rank at which step.
RUN = """
import json, os, pathlib, signal, sys
import torch
torch.set_num_threads(1)
import leank_convert.train.loop as loop
from leank_convert.errors import LeanKError
from leank_convert.recipe import Recipe
from leank_convert.train import run, train_masks

recipe, model, out, event, rank, at = sys.argv[1:]
advance = run.Run.advance

def eventful(self, samples):
    if event and (self.ranks.rank, self.step) == (int(rank), int(at)):
        if event == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif event == "memory":
            run.distil = exhaust
        else:
            samples = draw_nothing()
    return advance(self, samples)

def exhaust(*given, **options):
    raise torch.OutOfMemoryError("CUDA out of memory.")

def draw_nothing():
    raise LeanKError("no sample")
    yield

run.Run.advance = eventful
try:
    options = {"resume": True} if pathlib.Path(out).exists() else {}
    masks = train_masks(
        Recipe(**json.loads(recipe)), pathlib.Path(out), progress=False, device="cpu", model_override=model,
        **options,
    )
    print("masks", len(masks), flush=True)
except LeanKError as error:
    print("told:", error, flush=True)
    sys.exit(error.exit_code)
"""


def launch(recipe, model, out, *, ranks=2, event="", rank=0, at=0):
    script = out.parent / "run.py"
    script.write_text(RUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
        script,
    ]
    arguments = [json.dumps(recipe.model_dump(mode="json")), model, out, event, rank, at]
    return subprocess.run(
        [str(part) for part in (*command, *arguments)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def recipe(short_recipe):
    return short_recipe(batch_size=2, stage1={"steps": 4, "learning_rate": 0.1}, stage2={"steps": 3})


@pytest.fixture
def alone(recipe, retriever_folder, tmp_path):
    out = tmp_path / "alone"
    train_masks(recipe, out, progress=False, model_override=str(retriever_folder))
    return out


def read_log(out):
    with (out / "leank" / "log.csv").open() as file:
        return list(csv.DictReader(file))


def test_two_ranks_learn_what_one_learns_from_the_same_samples(recipe, alone, retriever_folder, tmp_path):
    out = tmp_path / "two"
    done = launch(recipe, retriever_folder, out)
    assert done.returncode == 0, done.stderr
    # The first rank has the mask and writes all files; the other returns nothing.
    assert sorted(done.stdout.split("\n")) == ["", "masks 0", "masks 1"]
    expected, found = (load_mask(TrainingDirectory(folder).mask) for folder in (alone, out))
    torch.testing.assert_close(found.scaling_factors, expected.scaling_factors, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.channel_mask, expected.channel_mask)
    for ours, theirs in zip(read_log(out), read_log(alone), strict=True):
        assert (ours["num_tokens"], ours["num_answer_tokens"]) == (
            theirs["num_tokens"],
            theirs["num_answer_tokens"],
        )
        assert float(ours["distillation"]) == pytest.approx(float(theirs["distillation"]), rel=1e-4)


@pytest.mark.parametrize(("event", "rank", "code"), [("signal", 1, 143), ("memory", 1, 1), ("sample", 1, 2)])
def test_what_ends_one_rank_ends_all_with_the_state_saved(
    event, rank, code, recipe, alone, retriever_folder, tmp_path
):
    out = tmp_path / "two"
    ended = launch(recipe, retriever_folder, out, event=event, rank=rank, at=3)
    assert ended.returncode != 0
    told = re.findall("told: (.*)", ended.stdout)
    steps = 4 if event == "signal" else 3
    if event == "signal":
        assert told == [
            f"rank 1: SIGTERM ended the run; its state is saved in `{out / 'leank'}` at step 4 of 7"
        ]
    else:
        assert len(told) == 1
        message = "no sample" if event == "sample" else "step 4: memory does not suffice"
        assert told[0].startswith(f"rank 1: {message}")
    assert re.search(rf"exitcode\s*: {code}", ended.stderr)
    assert load_state(TrainingDirectory(out).state).step == steps
    # Another number of ranks may go on with it.
    train_masks(recipe, out, resume=True, progress=False, model_override=str(retriever_folder))
    expected, found = (load_mask(TrainingDirectory(folder).mask) for folder in (alone, out))
    torch.testing.assert_close(found.scaling_factors, expected.scaling_factors, rtol=1e-5, atol=1e-6)


def test_an_error_of_the_first_rank_is_told_once(recipe, retriever_folder, tmp_path):
    ended = launch(recipe.model_copy(update={"mask": "a.pth"}), retriever_folder, tmp_path / "out")
    assert ended.returncode != 0
    assert len(re.findall("told: the recipe has `mask: a.pth`", ended.stdout)) == 1


def test_an_error_that_all_ranks_meet_is_told_once(recipe, retriever_folder, tmp_path):
    wide = recipe.model_copy(update={"width_multiple": 32})
    ended = launch(wide, retriever_folder, tmp_path / "out")
    assert ended.returncode != 0
    assert re.findall("told: (.*)", ended.stdout)[0].startswith("`width_multiple` 32 exceeds")
    assert ended.stdout.count("told:") == 1
    assert not (tmp_path / "out").exists()


def test_a_batch_that_cannot_be_shared_is_refused(recipe, retriever_folder, tmp_path):
    uneven = recipe.model_copy(update={"batch_size": 3})
    ended = launch(uneven, retriever_folder, tmp_path / "out")
    assert "`batch_size` 3 cannot be shared evenly by 2 processes" in ended.stdout
    assert not (tmp_path / "out").exists()


def test_one_device_for_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LeanKError, match="`cuda:1` is one device, and 2 processes"), join_ranks("cuda:1"):
        pass


def test_ranks_share_every_steps_samples_without_overlap(short_recipe):
    recipe = short_recipe(batch_size=4, pruning_ratio=[0.5, 0.7], stage1={"steps": 2}, stage2={"steps": 3})
    schedule = Schedule(recipe)
    assert schedule.num_steps == 8
    whole = list(schedule.sample_indices(0))
    # The second ratio's stage 2 takes the first's samples again.
    assert whole == [*range(8), *range(8, 20), *range(8, 20)]
    shares = [list(schedule.sample_indices(0, rank, 2)) for rank in range(2)]
    for step in range(8):
        together = shares[0][2 * step : 2 * step + 2] + shares[1][2 * step : 2 * step + 2]
        assert sorted(together) == whole[4 * step : 4 * step + 4]
    assert list(schedule.sample_indices(5)) == whole[20:]


def test_one_process_is_its_own_first_rank():
    ranks = Ranks(torch.device("cpu"))
    assert ranks.is_first
    assert ranks.on_first(lambda: 3) == 3
    assert ranks.totals([1.5, 2]) == [1.5, 2]
    ranks.check(None)
    with pytest.raises(LeanKError, match=r"^told$"):
        ranks.check(LeanKError("told"))
