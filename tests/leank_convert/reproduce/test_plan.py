"""The plan of experiments: complete, and without two things of one name."""

from typing import get_args

import pytest

from leank_convert.recipe import Method
from leank_convert.recipe_file import load_recipe
from leank_convert.reproduce.plan import ON_CPU, ON_GPU, QUICK, UNALIGNED, make_plan


@pytest.fixture(params=[ON_CPU, ON_GPU, QUICK], ids=["cpu", "gpu", "quick"])
def plan(request):
    return make_plan(request.param, load_recipe(request.param.recipe, request.param.overrides))


def test_every_method_of_a_recipe_has_a_curve_and_every_curve_all_ratios(plan):
    beside = {"think", "per-head-budget-dynamic", UNALIGNED}
    assert {curve.method for curve in plan.curves} == {*get_args(Method), *beside}
    for curve in plan.curves:
        # Half of the heads are gone before the combined method looks at channels.
        least = 0.5 if curve.method == "duo-attention+leank" else 0
        assert set(curve.points) == {ratio for ratio in plan.sizes.ratios if ratio >= least}


def test_every_mask_that_a_row_needs_is_made(plan):
    made = {(run.name, ratio) for run in plan.runs for ratio in run.ratios}
    needed = {
        (entry.run, entry.ratio) for row in plan.rows() for entry in row.candidates if entry.run is not None
    }
    assert needed <= made
    assert len({run.name for run in plan.runs}) == len(plan.runs)


def test_every_run_is_a_valid_recipe(plan):
    sizes = plan.sizes
    for run in plan.runs:
        recipe = load_recipe(
            sizes.recipe, [*sizes.overrides, *run.overrides, f"pruning_ratio={list(run.ratios)}"]
        )
        assert recipe.pruning_ratios == run.ratios


def test_entries_of_one_name_are_one_entry(plan):
    entries = {entry for row in plan.rows() for entry in row.candidates}
    assert len({entry.name for entry in entries}) == len(entries)


def test_every_ablation_shows_the_main_setting_at_both_ratios(plan):
    ablations = [table for table in plan.tables if table.name != "heads"]
    for table in ablations:
        shown = {entry.ratio for row in table.rows for entry in row.candidates if entry.method == "leank"}
        assert shown == {plan.sizes.main_ratio, plan.sizes.hard_ratio}, table.name


def test_no_baseline_is_left_without_its_other_settings(plan):
    settings = {
        curve.method: {entry.setting for row in curve.points.values() for entry in row.candidates}
        for curve in plan.curves
    }
    for method in ("static-norm", "double-sparsity", "random"):
        assert settings[method] == {"uniform budget", "global budget"}
    for method in ("think", "per-head-budget-dynamic"):
        assert settings[method] == {"the recipe's windows", "ThinK's windows"}


def test_stage_2_is_weighed_against_as_many_steps_of_stage_1(plan):
    sizes = plan.sizes
    main = load_recipe(sizes.recipe, sizes.overrides)
    run = next(run for run in plan.runs if run.name == "magnitude-alpha")
    alone = load_recipe(sizes.recipe, [*sizes.overrides, *run.overrides])
    assert alone.stage1.steps + alone.stage2.steps == main.stage1.steps + main.stage2.steps
