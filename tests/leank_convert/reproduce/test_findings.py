"""What is said of the figures follows from them, and from nothing else."""

from collections import defaultdict

import pytest
import torch

from leank_convert.mask import ChannelMask
from leank_convert.recipe_file import load_recipe
from leank_convert.reproduce.findings import choose_entries, collect_findings
from leank_convert.reproduce.measure import Scores
from leank_convert.reproduce.plan import QUICK, Entry, Row, make_plan

NUM_PROMPTS = 200
PLAN = make_plan(QUICK, load_recipe(QUICK.recipe, QUICK.overrides))


class _Bench:
    """Scores as they are given: the first so many prompts right, by method."""

    def __init__(self, shares, default=1.0):
        self._shares = defaultdict(lambda: default, shares)

    def scores(self, entry):
        share = self._shares["dense" if entry is None else entry.method]
        right = round(share * NUM_PROMPTS)
        values = tuple(float(place < right) for place in range(NUM_PROMPTS))
        return Scores((("retrieval", 256),) * NUM_PROMPTS, values)


class _Masks(dict):
    """A mask of half of all heads for every run."""

    def __missing__(self, run):
        mask = torch.zeros(2, 2, 8, dtype=torch.bool)
        mask[0] = True
        return defaultdict(lambda: ChannelMask(mask))


def _collect(**shares):
    bench = _Bench({name.replace("_", "-"): share for name, share in shares.items()})
    masks = _Masks(leank={0.7: _Masks()["leank"][0.7]} | {0.9: _Masks()["leank"][0.9]})
    return collect_findings(PLAN, choose_entries(PLAN.rows(), bench), bench, masks, {})


def _answer(findings, claim):
    return next(verdict.answer for verdict in findings.verdicts if verdict.claim == claim)


@pytest.mark.parametrize(
    ("leank", "static", "answer"),
    [(0.99, 0.8, "yes"), (0.8, 0.99, "no"), (0.9, 0.9, "not told apart"), (0.905, 0.9, "not told apart")],
)
def test_a_method_is_called_better_only_where_the_interval_says_so(leank, static, answer):
    findings = _collect(leank=leank, static_norm=static)
    assert _answer(findings, "leank is better than static-norm at 70%") == answer


@pytest.mark.parametrize(("leank", "answer"), [(1.0, "yes"), (0.99, "yes"), (0.985, "no")])
def test_near_lossless_is_one_point(leank, answer):
    assert _answer(_collect(leank=leank), "LeanK at 70% is within 1 point of dense") == answer


def test_a_sweep_is_judged_by_its_worst_and_its_best():
    assert _answer(_collect(seed_1=0.98), "the seed of training matters little at 70%") == "no"
    assert _answer(_collect(seed_1=0.995), "the seed of training matters little at 70%") == "yes"


def test_a_lambda_outside_the_papers_range_is_no_part_of_its_claim():
    findings = _collect(**{"lambda_0.3": 0.5})
    assert _answer(findings, "any lambda from 0.04 to 0.1 does at 70%") == "yes"


def test_shares_of_k_and_v_are_those_of_the_pruned_region():
    point = _collect().curves["leank"][0.7]
    assert (point.removed, point.value_removed) == (0.5, 0.5)
    think = _collect().curves["think"][0.7]
    assert (think.removed, think.value_removed) == (0.625, 0.0)  # 5 of 8 channels: it rounds down


def test_the_setting_that_is_best_on_validation_prompts_is_shown():
    first, second = Entry("a", 0.7, "one"), Entry("b", 0.7, "two")
    row = Row("either", (first, second))
    assert choose_entries([row], _Bench({"b": 0.9, "a": 0.8}))[row] == (second, {"one": 0.8, "two": 0.9})
    assert choose_entries([row], _Bench({}))[row][0] == first
