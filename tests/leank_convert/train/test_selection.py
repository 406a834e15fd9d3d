import math

import pytest
import torch

from leank_convert.train.selection import select_channels
from tests.checks import refusal


def best_first(factors):
    """Places of one dimension, the first of equal ones first."""
    values = factors.tolist()
    return sorted(range(len(values)), key=lambda place: (-values[place], place))


def keep_best(factors, widths):
    mask = torch.zeros(factors.shape, dtype=torch.bool)
    for kept, values, width in zip(mask.flatten(0, 1), factors.flatten(0, 1), widths, strict=True):
        kept[best_first(values)[:width]] = True
    return mask


def restate_nearest(factors, ratio, r, cap):
    """The paper's operator, one head at a time."""
    layers, heads, dim = factors.shape
    best = best_first(factors.flatten())[: math.floor(round((1 - ratio) * factors.numel(), 9) + 0.5)]
    widths = []
    for head in range(layers * heads):
        n = sum(1 for place in best if place // dim == head)
        widths.append(min(min(dim, cap) // r * r, math.floor((n + r / 2) / r) * r))
    return keep_best(factors, widths)


def restate_budget(factors, ratio, r, cap):
    """One multiple at a time to the head whose next best channels have the largest sum, while one fits."""
    layers, heads, dim = factors.shape
    ranked = [sorted(values, reverse=True) for values in factors.flatten(0, 1).tolist()]
    widths = [0] * layers * heads
    while sum(widths) + r <= round((1 - ratio) * factors.numel(), 9):
        growing = [head for head, width in enumerate(widths) if width + r <= min(dim, cap)]
        if not growing:
            break
        most = max(growing, key=lambda head: sum(ranked[head][widths[head] : widths[head] + r]))
        widths[most] += r
    return keep_best(factors, widths)


def draw(kind, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(shape, generator=generator)
    if kind == "mostly zero":
        return torch.where(torch.rand(shape, generator=generator) < 0.85, 0.0, factors)
    if kind == "few values":
        return (factors * 3).round() / 3
    return {"distinct": factors, "all zero": torch.zeros(shape), "all one": torch.ones(shape)}[kind]


@pytest.mark.parametrize("kind", ["distinct", "mostly zero", "few values", "all zero", "all one"])
@pytest.mark.parametrize("shape", [(3, 4, 16), (1, 1, 8), (2, 3, 33)], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 0.99])
def test_the_choice_equals_its_restatement(kind, shape, ratio):
    for r, cap in ((1, None), (3, None), (8, None), (8, 16), (8, 20), (3, 1000)):
        # Sixteenths: their sums are exact, in whatever order they are added.
        factors = (draw(kind, shape, seed=r) * 16).round() / 16
        settings = {"pruning_ratio": ratio, "width_multiple": r, "max_width": cap}
        chosen = select_channels(factors, **settings)
        assert torch.equal(chosen, restate_nearest(factors, ratio, r, cap or shape[2]))
        chosen = select_channels(factors, rounding="budget", **settings)
        assert torch.equal(chosen, restate_budget(factors, ratio, r, cap or shape[2]))


def test_ratio_is_the_decimal_that_was_written():
    """(1 - 0.9) * 5 falls just short of one half in binary."""
    assert math.floor((1 - 0.9) * 5 + 0.5) == 0
    assert select_channels(torch.rand(1, 1, 5), pruning_ratio=0.9, width_multiple=1).sum() == 1


def test_negative_zero_ties_with_zero():
    factors = torch.tensor([[[0.0, -0.0, 0.0, -0.0]]])
    chosen = select_channels(factors, pruning_ratio=0.5, width_multiple=1)
    assert chosen.tolist() == [[[True, True, False, False]]]


@pytest.mark.parametrize("rounding", ["nearest", "budget"])
@pytest.mark.parametrize("cap", [None, 9])
@pytest.mark.parametrize(("shape", "ratio"), [((3, 4, 16), 0.0), ((2, 3, 33), 0.7)], ids=str)
def test_uniform_budget_treats_every_head_as_a_model_of_its_own(shape, ratio, cap, rounding):
    factors = draw("few values", shape, seed=1)
    options = {"pruning_ratio": ratio, "width_multiple": 2, "max_width": cap, "rounding": rounding}
    chosen = select_channels(factors, **options, budget="uniform")
    assert len(chosen.sum(-1).unique()) == 1
    for layer in range(shape[0]):
        for head in range(shape[1]):
            alone = select_channels(factors[layer, head][None, None], **options)
            assert torch.equal(chosen[layer, head], alone[0, 0])


@pytest.mark.parametrize(
    ("factors", "ratio", "options", "message", "hint"),
    [
        ([0.5], 0.5, {"width_multiple": 16, "max_width": 8}, "8 is below `width_multiple` 16", "null for no"),
        ([0.5], 0.5, {"width_multiple": 32}, "`width_multiple` 32 exceeds the model's `head_dim` 16", ""),
        ([float("nan")], 0.5, {"width_multiple": 1}, "not finite", ""),
        ([float("inf")], 0.5, {"width_multiple": 1}, "not finite", ""),
        (
            [0.5],
            0.9,
            {"width_multiple": 8, "budget": "uniform"},
            r"`pruning_ratio` 0.9 .* 1.6 of 16 channels, which",
            "`budget: global`",
        ),
    ],
)
def test_what_cannot_be_selected_is_refused(factors, ratio, options, message, hint):
    with refusal(message, hint):
        select_channels(torch.tensor(factors).expand(2, 3, 16), pruning_ratio=ratio, **options)
