"""The plan of experiments: complete, and without two things of one name."""

import pytest
import torch

from bin.baselines import COMPARED, make_variants
from bin.reproduction.plan import (
    ON_CPU,
    ON_GPU,
    QUICK,
    QUICK_SMOLLM2,
    SMOLLM2,
    UNALIGNED,
    make_plan,
)
from leank_convert.methods import METHODS
from leank_convert.recipe_file import load_recipe


@pytest.fixture(
    params=[ON_CPU, ON_GPU, QUICK, SMOLLM2, QUICK_SMOLLM2],
    ids=["cpu", "gpu", "quick", "smollm2", "quick-smollm2"],
)
def plan(request):
    return make_plan(request.param, load_recipe(request.param.recipe, request.param.overrides))


def candidates(plan):
    return [entry for table in plan.tables.values() for row in table.rows.values() for entry in row]


def test_every_method_of_a_recipe_is_compared_at_all_ratios(plan):
    ratios = {}
    for label, ratio in plan.tables["comparison"].rows:
        ratios.setdefault(label, set()).add(ratio)
    assert set(ratios) == {*METHODS, "think", "per-head-budget-dynamic", UNALIGNED}
    for method, compared in ratios.items():
        # Half of the heads are gone before the combined method looks at channels.
        least = 0.5 if method == "duo-attention+leank" else 0
        assert compared == {ratio for ratio in plan.sizes.ratios if ratio >= least}


def test_every_mask_that_a_row_needs_is_made(plan):
    made = {(name, ratio) for name, run in plan.runs.items() for ratio in run.ratios}
    assert {(entry.run, entry.ratio) for entry in candidates(plan) if entry.run is not None} <= made


def test_every_run_is_a_valid_recipe(plan):
    sizes = plan.sizes
    for run in plan.runs.values():
        ratios = f"pruning_ratio={list(run.ratios)}"
        recipe = load_recipe(sizes.recipe, [*sizes.overrides, *run.overrides, ratios])
        assert recipe.pruning_ratios == run.ratios


def test_entries_of_one_name_are_one_entry(plan):
    entries = set(candidates(plan))
    assert len({entry.name for entry in entries}) == len(entries)


def test_every_ablation_shows_the_main_setting_at_both_ratios(plan):
    for name, table in plan.tables.items():
        if name not in ("comparison", "heads"):
            main = {entry.ratio for row in table.rows.values() for entry in row if entry.method == "leank"}
            assert main == {plan.sizes.main_ratio, plan.sizes.hard_ratio}, name


def test_no_baseline_is_left_without_its_other_settings(plan):
    settings = {}
    for (label, _), row in plan.tables["comparison"].rows.items():
        settings.setdefault(label, set()).update(entry.setting for entry in row)
    for method in ("static-norm", "double-sparsity", "random"):
        assert settings[method] == {"uniform budget", "global budget"}
    for method in ("think", "per-head-budget-dynamic"):
        assert settings[method] == {"the recipe's windows", "ThinK's windows"}


def test_every_method_beside_leank_is_compared_alone_and_on_its_channels():
    every = torch.ones(1, 1, 4, dtype=torch.bool)
    sizes = SMOLLM2.real
    for names, alone in ((sizes.alone, True), (sizes.products, False)):
        known = {variant.name for method in COMPARED for variant in make_variants(method, every, alone=alone)}
        # SnapKV and LeanK are compared, not combined.
        assert set(names) == {name for name in known if alone or "snapkv" not in name}


def test_stage_2_is_weighed_against_as_many_steps_of_stage_1(plan):
    sizes = plan.sizes
    main = load_recipe(sizes.recipe, sizes.overrides)
    alone = load_recipe(sizes.recipe, [*sizes.overrides, *plan.runs["magnitude-alpha"].overrides])
    assert alone.stage1.steps + alone.stage2.steps == main.stage1.steps + main.stage2.steps


def test_no_run_is_made_twice(plan):
    assert len(set(plan.runs.values())) == len(plan.runs)
