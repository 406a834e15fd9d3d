"""What is said of the figures follows from them, and from nothing else."""

import dataclasses
import itertools
from collections import defaultdict

import pytest
import torch

from bin.reproduction.answers import Scores
from bin.reproduction.findings import choose_entries, collect_findings, describe_difference, describe_seeds
from bin.reproduction.plan import QUICK, Entry, Plan, Table, make_plan
from leank_convert.evaluate.comparison import compare
from leank_convert.mask import ChannelMask
from leank_convert.recipe_file import load_recipe

NUM_PROMPTS = 200
CELLS = list(itertools.product(["retrieval", "multi_value", "variable_tracking"], QUICK.lengths))
RECIPE = load_recipe(QUICK.recipe, QUICK.overrides)
PLAN = make_plan(QUICK, RECIPE)


class _Bench:
    """Scores as they are given: the first so many prompts right, by method."""

    def __init__(self, shares, default=1.0):
        self._shares = defaultdict(lambda: default, shares)

    def scores(self, entry):
        share = self._shares["dense" if entry is None else entry.method]
        right = round(share * NUM_PROMPTS)
        values = tuple(float(place < right) for place in range(NUM_PROMPTS))
        return Scores(tuple(itertools.islice(itertools.cycle(CELLS), NUM_PROMPTS)), values)


class _ByTask:
    """Everything right but one task of some methods."""

    def __init__(self, wrong):
        self._wrong = wrong

    def scores(self, entry):
        wrong = self._wrong.get(entry.method if entry else "dense", ())
        cells = tuple(itertools.islice(itertools.cycle(CELLS), NUM_PROMPTS))
        return Scores(cells, tuple(float(task not in wrong) for task, _ in cells))


_HALF = torch.zeros(2, 2, 8, dtype=torch.bool)
_HALF[0] = True


def _masks(plan):
    return {name: dict.fromkeys(run.ratios, ChannelMask(_HALF)) for name, run in plan.runs.items()}


def _collect(plan=PLAN, **shares):
    bench = _Bench({name.replace("_", "-"): share for name, share in shares.items()})
    return collect_findings(plan, choose_entries(plan, bench), bench, _masks(plan), {})


def _answer(findings, claim):
    return next(verdict.answer for verdict in findings.verdicts if verdict.claim == claim)


@pytest.mark.parametrize(
    ("leank", "static", "answer"),
    [(0.99, 0.8, "yes"), (0.8, 0.99, "no"), (0.9, 0.9, "not told apart"), (0.905, 0.9, "not told apart")],
)
def test_a_method_is_called_better_only_where_the_interval_says_so(leank, static, answer):
    findings = _collect(leank=leank, static_norm=static)
    assert _answer(findings, "leank is better than static-norm at 70%") == answer


@pytest.mark.parametrize(
    ("static", "think", "answer"),
    [(0.8, 0.5, "yes"), (0.8, 0.95, "no"), (0.8, 0.8, "not told apart"), (1.0, 0.5, "not told apart")],
)
def test_an_order_of_three_holds_where_both_of_its_steps_do(static, think, answer):
    findings = _collect(static_norm=static, think=think)
    assert _answer(findings, "learned > static > dynamic channels at 70%") == answer


@pytest.mark.parametrize(("leank", "answer"), [(1.0, "yes"), (0.99, "yes"), (0.985, "no")])
def test_near_lossless_is_one_point(leank, answer):
    assert _answer(_collect(leank=leank), "LeanK at 70% is within 1 point of dense") == answer


def test_a_sweep_is_judged_by_its_worst_and_its_best():
    assert _answer(_collect(seed_1=0.98), "the seed of training matters little at 70%") == "no"
    assert _answer(_collect(seed_1=0.995), "the seed of training matters little at 70%") == "yes"


def test_a_lambda_outside_the_papers_range_is_no_part_of_its_claim():
    plan = make_plan(dataclasses.replace(QUICK, l1_weights=(0.06, 0.1, 1.0)), RECIPE)
    claim = "any lambda from 0.04 to 0.1 does at 70%"
    assert _answer(_collect(plan, lambda_1=0.5), claim) == "yes"
    assert _answer(_collect(plan, **{"lambda_0.1": 0.5}), claim) == "no"


def test_a_single_lambda_of_the_papers_range_proves_nothing_of_the_range():
    assert [weight for weight in QUICK.l1_weights if 0.04 <= weight <= 0.1] == [0.06]
    assert not any("lambda" in verdict.claim for verdict in _collect().verdicts)


def test_shares_of_k_and_v_are_those_of_the_pruned_region():
    point = _collect().tables["comparison"]["leank", 0.7]
    assert (point.removed, point.value_removed) == (0.5, 0.5)
    think = _collect().tables["comparison"]["think", 0.7]
    assert (think.removed, think.value_removed) == (0.625, 0.0)  # 5 of 8 channels: it rounds down


def test_the_setting_that_is_best_on_validation_prompts_is_shown():
    first, second = Entry("a", 0.7, "one"), Entry("b", 0.7, "two")
    row = (first, second)
    plan = Plan(QUICK, {}, {"either": Table("Either", {("either", 0.7): row})})
    assert choose_entries(plan, _Bench({"b": 0.9, "a": 0.8}))[row] == (second, {"one": 0.8, "two": 0.9})
    assert choose_entries(plan, _Bench({}))[row][0] == first


def test_what_was_never_trained_on_is_judged_by_its_prompts_alone():
    both = "training on retrieval and multi_value suffices at 70%"
    unseen = f"{both} for variable_tracking, never trained on"
    bench = _ByTask({"tasks-retrieval-multi_value": ["variable_tracking"]})
    findings = collect_findings(PLAN, choose_entries(PLAN, bench), bench, _masks(PLAN), {})
    details = {verdict.claim: verdict for verdict in findings.verdicts}
    assert details[unseen].answer == details[both].answer == "no"
    assert "retrieval and multi_value: 0.0%" in details[unseen].detail
    assert "retrieval and multi_value: 67.0%" in details[both].detail


def test_scores_of_some_prompts():
    scores = Scores((("a", 1), ("a", 2), ("b", 1)), (1.0, 0.0, 0.5))
    assert scores.mean == 0.5
    assert scores.where(tasks=["a"]).values == (1.0, 0.0)
    assert scores.where(lengths=[1]).mean == 0.75
    assert scores.where(tasks=["a"], lengths=[2]).cells == (("a", 2),)


def test_unequal_shares_of_k_are_told_beside_the_scores():
    details = {verdict.claim: verdict.detail for verdict in _collect().verdicts}
    assert (
        "leank: 100.0% without 50.0% of K and 50.0% of V, think: 100.0% without 62.5% of K; "
        in details["leank is better than think at 70%"]
    )
    assert details["leank is better than random at 70%"].startswith("leank: 100.0%, random: 100.0%; ")


def test_what_the_training_seed_changes_is_told_for_both_ratios():
    seeds = "from 80.0% to 100.0%"
    assert describe_seeds(_collect(seed_1=0.8)) == (
        f"2 runs that differ by it alone score {seeds} at 70% and {seeds} at 90%"
    )


def test_a_difference_that_rounds_to_nothing_has_no_minus():
    assert describe_difference(compare([-0.0001, 0.0])).startswith("+0.0 ")
