"""Prompts of an evaluation that names no recipe: those of the run that made the checkpoint or the mask."""

import json
import shutil
from pathlib import Path

import pytest

from leank_convert import load_recipe
from leank_convert.evaluate.request import EvaluationRequest, resolve_evaluation
from leank_convert.mask import MASK_FILE_NAME, resolve_mask
from tests.checks import refusal


@pytest.fixture
def run(tmp_path, shipped_checkpoint):
    """The folder of a run of one ratio, which is a checkpoint, with that of another ratio in it."""
    folder = tmp_path / "run"
    shutil.copytree(shipped_checkpoint, folder)
    shutil.copytree(shipped_checkpoint, folder / "ratio-0.5")
    shutil.copyfile(resolve_mask("testbed-70"), folder / "ratio-0.5" / MASK_FILE_NAME)
    (folder / "leank").mkdir()
    recipe = load_recipe("quickstart", ["data.max_length=300"]).model_dump(mode="json", exclude_unset=True)
    (folder / "leank" / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


@pytest.mark.parametrize(
    ("checkpoint", "mask"),
    [
        ("", None),
        ("ratio-0.5", None),
        (Path("testbed"), "ratio-0.5"),
        (Path("testbed"), f"ratio-0.5/{MASK_FILE_NAME}"),
    ],
)
def test_prompts_are_those_of_the_run(run, checkpoint, mask):
    checkpoint = run / checkpoint if isinstance(checkpoint, str) else checkpoint
    request = EvaluationRequest(checkpoint, mask=None if mask is None else run / mask)
    assert resolve_evaluation(request).section.max_length == 300


def test_a_run_of_one_ratio_may_have_such_a_name_and_a_link_is_followed(run, tmp_path):
    shutil.copytree(run, tmp_path / "runs" / "ratio-0.5")
    shutil.copytree(run / "leank", tmp_path / "runs" / "leank")
    another = tmp_path / "runs" / "leank" / "recipe.yaml"
    another.write_text(another.read_text().replace("300", "301"))
    (tmp_path / "latest").symlink_to(run / "ratio-0.5")
    for folder in (tmp_path / "runs" / "ratio-0.5", tmp_path / "latest"):
        assert resolve_evaluation(EvaluationRequest(folder)).section.max_length == 300


def test_a_folder_above_that_is_no_run_does_not_count(run):
    other = (run / "ratio-0.5").rename(run / "another")
    assert resolve_evaluation(EvaluationRequest(other)).section.max_length != 300


@pytest.mark.parametrize("seed", [0, 500_000])
def test_the_seeds_of_training_and_validation_are_refused(run, seed):
    assert resolve_evaluation(EvaluationRequest(run, seed=1)).seed == 1
    with refusal(f"`seed` {seed} would draw the samples that the recipe's training or validation draws"):
        resolve_evaluation(EvaluationRequest(run, seed=seed))


def test_a_recipe_that_has_been_read_is_not_changed(run):
    recipe = load_recipe("quickstart")
    with refusal("a recipe that has been read is not changed by `overrides`"):
        resolve_evaluation(EvaluationRequest(run, recipe=recipe, overrides=["data.max_length=400"]))
