"""A run that dies anywhere and is resumed ends as if nothing had happened."""

import logging
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.folders import LOCK_NAME
from leank_convert.mask import ChannelMask, load_mask, save_mask
from leank_convert.methods.make import train_masks
from leank_convert.recipe import Recipe
from leank_convert.train import graphs, run
from leank_convert.train.choice import choose_recipe
from leank_convert.train.state import TrainingDirectory, load_state
from tests.checks import refusal, short_recipe
from tests.leank_convert.train.conftest import DEATHS, SIGNALS, fail_at, logged_steps

RECIPE = short_recipe()


@pytest.fixture
def uninterrupted(finished, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "uninterrupted")


@pytest.fixture
def resume(retriever_folder):
    """Goes on with the run in a folder."""

    def run(out, recipe=RECIPE, model=retriever_folder, *, resume=True):
        return train_masks(model, out, recipe=recipe, resume=resume, progress=False)

    return run


@pytest.mark.parametrize("death", [f"{event}-{at}" for event, at in DEATHS])
def test_killed_and_resumed_run_ends_with_the_same_bits(death, ended, resume, finished):
    out, [(code, printed)] = ended[death]
    assert code == -signal.SIGKILL, printed
    assert not TrainingDirectory(out).mask.exists()
    resume(out)
    assert TrainingDirectory(out).mask.read_bytes() == TrainingDirectory(finished).mask.read_bytes()
    assert logged_steps(out) == logged_steps(finished)
    assert not list(out.rglob("*.partial"))


def test_a_run_of_several_ratios_goes_on_within_stage_two_of_the_second(resume, finished_mask, tmp_path):
    several = RECIPE.model_copy(update={"pruning_ratio": (0.5, 0.7)})
    failure = fail_at(graphs, "distil", 16, torch.OutOfMemoryError("CUDA out of memory."))
    with failure, refusal("memory does not suffice for step 16", exit_code=1):
        resume(tmp_path, several, resume=False)
    masks = resume(tmp_path, several)
    expected = finished_mask.scaling_factors
    assert torch.equal(masks[tmp_path / "ratio-0.7"].scaling_factors, expected)
    assert not torch.equal(masks[tmp_path / "ratio-0.5"].scaling_factors, expected)


def test_existing_run_is_not_overwritten_without_resume(resume, uninterrupted):
    before = TrainingDirectory(uninterrupted).mask.read_bytes()
    with refusal("already holds a training run", "--resume"):
        resume(uninterrupted, resume=False)
    assert TrainingDirectory(uninterrupted).mask.read_bytes() == before


def test_a_mask_in_the_place_of_a_finished_runs_own_is_not_overwritten(resume, uninterrupted):
    place = TrainingDirectory(uninterrupted).mask
    save_mask(ChannelMask(~load_mask(place).channel_mask), place)
    before = place.read_bytes()
    with refusal(f"`{place}` exists and is not of a run in", "move the mask away"):
        resume(uninterrupted)
    assert place.read_bytes() == before


@pytest.mark.parametrize(("reason", "exit_code", "at"), [case[1:] for case in SIGNALS])
def test_signalled_run_saves_its_state_and_resumes_with_the_same_bits(
    reason, exit_code, at, ended, resume, finished
):
    out, [(code, printed)] = ended[f"{reason}-{at}"]
    assert code == exit_code, printed
    message, hint = printed.splitlines()
    assert message.startswith(f"told: {reason} ended the run; its state is saved in `")
    assert f"/{out.name}/leank` at step" in message
    assert message.endswith(f" at step {at + 1} of 13")
    assert "--resume" in hint
    assert load_state(TrainingDirectory(out).state).step == at + 1
    assert len(logged_steps(out)) == at + 1
    resume(out)
    assert TrainingDirectory(out).mask.read_bytes() == TrainingDirectory(finished).mask.read_bytes()
    assert logged_steps(out) == logged_steps(finished)


def test_a_second_signal_ends_the_run_at_once(ended):
    out, [(_, printed)] = ended["twice"]
    assert "KeyboardInterrupt" in printed
    assert load_state(TrainingDirectory(out).state).step == 3


def test_the_recipe_of_a_run_at_home_is_found(uninterrupted, retriever_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(uninterrupted.parent))
    found = choose_recipe(None, retriever_folder, run="~/uninterrupted", training=True)
    assert found.stage1 == RECIPE.stage1


def test_resume_without_a_run_begins_one_with_a_warning_and_behind_its_end_checks_again(
    resume, tmp_path, finished, caplog
):
    def warnings():
        ours = [record for record in caplog.records if record.name == "leank_convert"]
        return [record.getMessage() for record in ours if record.levelno == logging.WARNING]

    resume(tmp_path)
    told = warnings()
    assert told[0] == f"no run in `{tmp_path}`; starting one"
    caplog.clear()
    logged = (tmp_path / "leank" / "log.jsonl").read_text()
    resume(tmp_path)
    # The check of held-out samples is made again, and logged once.
    assert warnings() == told[1:]
    assert (tmp_path / "leank" / "log.jsonl").read_text() == logged
    assert TrainingDirectory(tmp_path).mask.read_bytes() == TrainingDirectory(finished).mask.read_bytes()


def test_resume_refuses_another_recipe_another_model_and_a_damaged_state(
    resume, retriever_folder, uninterrupted, tmp_path
):
    other = Recipe(**{**RECIPE.model_dump(), "stage1": {"steps": 8, "learning_rate": 0.1}})
    with pytest.raises(LeanKError, match=r"recipe: stage1\.steps was `7`, is `8`"):
        resume(uninterrupted, other)
    bos = b"{{ bos_token }}"
    for name, old, new, difference in (
        ("model.safetensors", None, None, "model: weights was"),
        ("config.json", b"1e-06", b"1e-05", r"config.json: rms_norm_eps was `1e-06`, is `1e-05`"),
        ("chat_template.jinja", bos, bos + bos, "data: first sample and haystack was"),
    ):
        model = shutil.copytree(retriever_folder, tmp_path / name)
        content = bytearray((model / name).read_bytes())
        if old is None:
            content[-3] ^= 1
        (model / name).write_bytes(content if old is None else content.replace(old, new))
        with pytest.raises(LeanKError, match=difference):
            resume(uninterrupted, model=model)
    TrainingDirectory(uninterrupted).state.write_bytes(b"nonsense")
    with refusal(r"training_state.pt` is damaged"):
        resume(uninterrupted)


def test_moved_model_and_another_save_interval_may_resume(resume, retriever_folder, uninterrupted, tmp_path):
    moved = shutil.copytree(retriever_folder, tmp_path / "moved")
    other = RECIPE.model_copy(update={"save_every": 2})
    mask = resume(uninterrupted, other, moved)[uninterrupted]
    assert torch.equal(mask.channel_mask, load_mask(TrainingDirectory(uninterrupted).mask).channel_mask)


def test_two_runs_never_write_to_one_folder_and_one_works_outside_the_main_thread(resume, out, monkeypatch):
    """While a run is between two steps, a second one is refused, whether it begins or resumes."""
    training, go_on, advance = Event(), Event(), run.Run.advance

    def waiting(self, samples):
        training.set()
        assert go_on.wait(60)
        return advance(self, samples)

    monkeypatch.setattr(run.Run, "advance", waiting)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(resume, out, resume=False)
        assert training.wait(60)
        try:
            for resumes in (False, True):
                with refusal(f"another process is training into `{out}`"):
                    resume(out, resume=resumes)
        finally:
            go_on.set()
        first.result()
    assert TrainingDirectory(out).mask.exists()
    assert not [*out.parent.rglob(LOCK_NAME)]
