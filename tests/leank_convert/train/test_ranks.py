"""Several processes of one run, on the CPU: they learn what one learns, and fail as one."""

import os

import pytest
import torch

from leank_convert.mask import load_mask
from leank_convert.methods.make import train_mask
from leank_convert.train.loop import check_run
from leank_convert.train.ranks import join_ranks
from leank_convert.train.schedule import Schedule
from leank_convert.train.state import TrainingDirectory, load_state
from tests.checks import refusal, run_python, short_recipe
from tests.leank_convert.train.conftest import EVENTS, RECIPE_OF_TWO, logged_steps

# What launchers are needed for: the rest forks its processes.
RUN = """
import pathlib, sys
from leank_convert.methods.make import train_masks
model, out, recipe = sys.argv[1:]
print("masks", len(train_masks(model, out, recipe=recipe, device="cpu", progress=False)), flush=True)
"""


@pytest.fixture(scope="module")
def alone(once_per_run, retriever_folder):
    return once_per_run(
        "alone", lambda out: train_mask(retriever_folder, out, recipe=RECIPE_OF_TWO, progress=False)
    )


def test_two_ranks_learn_what_one_learns_from_the_same_samples(alone, retriever_folder, tmp_path):
    out = tmp_path / "two"
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "recipe.yaml").write_text(RECIPE_OF_TWO.to_yaml())
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = tmp_path / "run.py", retriever_folder, out, tmp_path / "recipe.yaml"
    done = run_python(*launcher, *given, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    # Both have the mask, and the first writes all files.
    assert done.stdout.split("\n") == ["masks 1", "masks 1", ""]
    expected, found = (load_mask(TrainingDirectory(folder).mask) for folder in (alone, out))
    assert torch.equal(found.scaling_factors, expected.scaling_factors)
    assert torch.equal(found.channel_mask, expected.channel_mask)
    assert torch.equal(found.key_mean, expected.key_mean)
    ours, theirs = found.provenance.held_out, expected.provenance.held_out
    assert (ours.num_answers, ours.dense, ours.pruned) == (theirs.num_answers, theirs.dense, theirs.pruned)
    assert ours.tokens == theirs.tokens
    assert ours.distillation == pytest.approx(theirs.distillation, rel=1e-4)
    for ours, theirs in zip(logged_steps(out), logged_steps(alone), strict=True):
        assert ours["num_tokens"] == theirs["num_tokens"]
        assert ours["num_answer_tokens"] == theirs["num_answer_tokens"]
        assert ours["distillation"] == pytest.approx(theirs["distillation"], rel=1e-4)


@pytest.mark.parametrize("event", EVENTS)
def test_what_ends_one_rank_ends_all_with_the_state_saved(event, ended, alone, retriever_folder):
    out, [(first_code, first), (second_code, second)] = ended[event]
    assert first_code == second_code == EVENTS[event], (first, second)
    told = {
        "signal": "SIGTERM ended the run; its state is saved in `",
        "memory": "memory does not suffice for step 4",
    }
    assert first.startswith(f"told: rank 1: {told[event]}")
    assert "told:" not in second
    assert load_state(TrainingDirectory(out).state).step == (4 if event == "signal" else 3)
    # Another number of ranks may go on with it.
    found = train_mask(retriever_folder, out, recipe=RECIPE_OF_TWO, resume=True, progress=False)
    assert torch.equal(found.scaling_factors, load_mask(TrainingDirectory(alone).mask).scaling_factors)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mask", "recipe `made in Python`: `mask` is 'a.pth'"),  # only the first looks
        ("width", "`width_multiple` 32 exceeds"),  # all meet it
    ],
)
def test_what_is_refused_is_told_once(name, message, ended):
    out, [(first_code, first), (second_code, second)] = ended[name]
    assert (first_code, second_code) == (2, 2)
    assert first.startswith(f"told: {message}")
    assert "told:" not in second
    assert not out.exists()


def test_what_cannot_be_shared_is_refused(monkeypatch):
    for changes, message in (
        ({"method": "random"}, "nothing that 2 processes could share"),
        ({"batch_size": 3}, "`batch_size` 3 cannot be shared evenly by 2 processes"),
    ):
        with refusal(message):
            check_run(short_recipe(**changes), 2)
    for said in ("2", "x"):  # as some images and job scripts set it
        monkeypatch.setenv("WORLD_SIZE", said)
        with refusal(f"`WORLD_SIZE` is '{said}' in the environment, and no launcher"), join_ranks("cpu"):
            pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with refusal("`cuda:1` is one device, and 2 processes"), join_ranks("cuda:1"):
        pass
    with refusal("device `gpu` cannot be used"), join_ranks("gpu"):
        pass


def test_ranks_share_every_steps_samples_without_overlap():
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
