"""The plans of experiments: complete, and without two things of one name."""

import pytest
import torch

from bin.reproduction.experiment import Experiment
from bin.reproduction.paper_plan import UNALIGNED
from bin.reproduction.plan import DENSE, MAIN, MAIN_RATIO
from bin.reproduction.plans import make_plan
from leank_convert.errors import LeanKError
from leank_convert.mask import load_mask
from leank_convert.masks import FOLDER
from leank_convert.methods import METHODS
from leank_convert.recipe_file import load_recipe

NAMES = ("testbed", "smollm2", "qwen2.5-coder")
KINDS = {
    "gpu": {"quick": False, "on_gpu": True},
    "cpu": {"quick": False, "on_gpu": False},
    "quick": {"quick": True, "on_gpu": True},
    "packaged": {"quick": False, "on_gpu": True, "packaged": True},
}


VALUES = {name: {**KINDS[name], "values": True} for name in ("gpu", "quick")}


@pytest.fixture(
    params=[
        *((name, options) for name in NAMES for options in KINDS.values()),
        *((name, options) for name in NAMES[1:] for options in VALUES.values()),
    ],
    ids=str,
)
def plan(request):
    name, options = request.param
    return make_plan(name, **options)


def entries(plan):
    """All that answer or are fed, and those whose bytes are counted."""
    rows = [row for part in plan.parts for each in part.rounds for row in each.rows]
    if plan.text is not None:
        rows += [*plan.text.rows, *plan.text.answering]
    return {entry for row in rows for entry in row} | set(plan.weighed)


def test_every_mask_that_answers_is_made_and_nothing_is_made_twice(plan):
    made = {(name, ratio) for name, run in plan.runs.items() for ratio in run.ratios}
    asked = {(entry.run, entry.ratio or MAIN_RATIO) for entry in entries(plan) if entry.run is not None}
    assert asked <= made
    assert len(set(plan.runs.values())) == len(plan.runs)


def test_every_run_is_a_valid_recipe(plan):
    for run in plan.runs.values():
        ratios = f"pruning_ratio={list(run.ratios)}"
        recipe = load_recipe(plan.recipe, [*plan.overrides, *run.overrides, ratios])
        assert recipe.pruning_ratios == run.ratios


def test_entries_of_one_name_are_one_entry_and_a_part_has_one_seed(plan):
    assert len({entry.name for entry in entries(plan)}) == len(entries(plan))
    assert len({part.seed for part in plan.parts}) == len({part.name for part in plan.parts})


def test_what_a_table_shows_is_asked_beside_the_dense_model(plan):
    asked = {part.name: set() for part in plan.parts}
    for part in plan.parts:
        for _, rows in part.rounds:
            asked[part.name] |= set(rows)
    for table in plan.tables:
        assert {row for _, row in table.rows} | {(DENSE,)} <= asked[table.part]


@pytest.mark.parametrize("name", ["testbed", "smollm2"])
def test_every_method_of_a_recipe_is_compared_at_all_ratios_and_in_all_its_settings(name):
    papers = make_plan(name, quick=False, on_gpu=True)
    table = next(table for table in papers.tables if table.title == "Pruning ratio against accuracy")
    ratios, settings = {}, {}
    for label, row in table.rows:
        ratios.setdefault(label, set()).add(row[0].ratio)
        settings.setdefault(label, set()).update(entry.setting for entry in row)
    assert set(ratios) == {*METHODS, "think", "per-head-budget-dynamic", UNALIGNED}
    for method, compared in ratios.items():
        # Half of the heads are gone before the combined method looks at channels.
        least = 0.5 if method == "duo-attention+leank" else 0
        assert compared == {ratio for ratio in papers.runs[MAIN].ratios if ratio >= least}
    for method in ("static-norm", "double-sparsity", "random"):
        assert settings[method] == {"uniform budget", "global budget"}
    for method in ("think", "per-head-budget-dynamic"):
        assert settings[method] == {"the recipe's windows", "ThinK's windows"}


@pytest.mark.parametrize(
    ("name", "stem"), [("smollm2", "smollm2-135m-instruct"), ("qwen2.5-coder", "qwen2.5-coder-1.5b-instruct")]
)
def test_packaged_masks_stand_in_for_those_of_leank_at_every_ratio(tmp_path, name, stem):
    plan = make_plan(name, quick=False, on_gpu=True, packaged=True)
    experiment = Experiment(tmp_path, plan, "model", device="cpu")
    done = {unit.name for unit in experiment.list_units() if unit.is_done()}
    taken = {}
    for run in plan.packaged:
        assert f"masks/{run}" in done
        taken |= experiment.bench.masks[run]
    assert set(taken) == {0.5, 0.6, 0.7, 0.8, 0.9}
    for ratio, mask in taken.items():
        expected = load_mask(FOLDER / f"{stem}-{100 * ratio:g}.safetensors").channel_mask
        assert torch.equal(mask.channel_mask, expected)
    assert f"main setting: packaged masks {stem}-50" in experiment.describe()[2]


def test_trained_and_packaged_masks_and_pruned_v_answer_in_folders_of_their_own(tmp_path):
    flags = {"by trained masks": "on_gpu", "by packaged masks": "packaged", "with V pruned": "values"}
    plans = {
        found: make_plan("smollm2", **{"quick": False, "on_gpu": True, flag: True})
        for found, flag in flags.items()
    }
    for found, plan in plans.items():
        out = tmp_path / found
        Experiment(out, plan, "testbed", device="cpu", minutes=0).run()
        Experiment(out, plan, "testbed", device="cpu", minutes=0)
        for other in plans.keys() - {found}:
            with pytest.raises(LeanKError, match=f"holds answers {found}"):
                Experiment(out, plans[other], "testbed", device="cpu")
