import math

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.train.selection import select_channels


def restate_nearest(factors, ratio, r, cap=None):
    """The paper's operator, one channel at a time."""
    layers, heads, dim = factors.shape
    values = factors.tolist()
    ranked = sorted(
        (-values[i][j][k], i, j, k) for i in range(layers) for j in range(heads) for k in range(dim)
    )
    best = ranked[: math.floor(round((1 - ratio) * len(ranked), 9) + 0.5)]
    mask = torch.zeros(factors.shape, dtype=torch.bool)
    for i in range(layers):
        for j in range(heads):
            n = sum(1 for _, a, b, _ in best if (a, b) == (i, j))
            width = min(dim // r * r, math.floor((n + r / 2) / r) * r)
            while cap is not None and width > cap:
                width -= r
            for k in sorted(range(dim), key=lambda k: (-values[i][j][k], k))[:width]:
                mask[i, j, k] = True
    return mask


def restate_budget(factors, ratio, r, cap):
    """One multiple at a time to the head whose next best channels have the largest sum, while one fits."""
    layers, heads, dim = factors.shape
    values = factors.tolist()
    mask = torch.zeros(factors.shape, dtype=torch.bool)
    allowed = round((1 - ratio) * factors.numel(), 9)
    while True:
        offers = []
        for i in range(layers):
            for j in range(heads):
                order = sorted(range(dim), key=lambda k: (-values[i][j][k], k))
                width = int(mask[i, j].sum())
                if width + r <= min(dim, cap):
                    offers.append((-sum(values[i][j][k] for k in order[width : width + r]), i, j))
        if not offers or int(mask.sum()) + r > allowed:
            return mask
        _, i, j = min(offers)
        order = sorted(range(dim), key=lambda k: (-values[i][j][k], k))
        for k in order[: int(mask[i, j].sum()) + r]:
            mask[i, j, k] = True


def draw(kind, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(shape, generator=generator)
    if kind == "mostly zero":
        return torch.where(torch.rand(shape, generator=generator) < 0.85, 0.0, factors)
    if kind == "few values":
        return (factors * 3).round() / 3
    return {"distinct": factors, "all zero": torch.zeros(shape), "all one": torch.ones(shape)}[kind]


KINDS = ["distinct", "mostly zero", "few values", "all zero", "all one"]
SHAPES = [(3, 4, 16), (1, 1, 8), (2, 3, 20), (2, 5, 33), (4, 2, 64)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 0.99])
def test_nearest_equals_its_restatement(kind, shape, ratio):
    for r in (1, 3, 8):
        factors = draw(kind, shape, seed=r)
        chosen = select_channels(factors, pruning_ratio=ratio, width_multiple=r)
        assert torch.equal(chosen, restate_nearest(factors, ratio, r))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 0.99])
def test_budget_ends_at_or_above_the_ratio_and_as_close_as_the_multiple_allows(kind, shape, ratio):
    for r in (1, 3, 8):
        factors = draw(kind, shape, seed=r)
        chosen = select_channels(factors, pruning_ratio=ratio, width_multiple=r, rounding="budget")
        widths = chosen.sum(-1)
        assert (widths % r == 0).all()
        kept, allowed = int(widths.sum()), round((1 - ratio) * factors.numel(), 9)
        assert kept <= allowed
        capacity = shape[0] * shape[1] * (shape[2] // r * r)
        assert kept == capacity or kept + r > allowed


# Of multiples 8 and 16; 20 is a multiple of neither.
CAPS = [16, 20, 24, 64, 1000]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("ratio", [0.0, 0.7])
def test_nearest_under_a_cap_equals_its_restatement(kind, cap, ratio):
    for r in (8, 16):
        factors = draw(kind, (3, 2, 40), seed=r)
        chosen = select_channels(factors, pruning_ratio=ratio, width_multiple=r, max_width=cap)
        assert torch.equal(chosen, restate_nearest(factors, ratio, r, cap))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("ratio", [0.0, 0.7])
def test_budget_under_a_cap_equals_its_restatement(kind, cap, ratio):
    for r in (8, 16):
        # Sixteenths: their sums are exact, in whatever order they are added.
        factors = (draw(kind, (3, 2, 40), seed=r) * 16).round() / 16
        chosen = select_channels(
            factors, pruning_ratio=ratio, width_multiple=r, rounding="budget", max_width=cap
        )
        assert torch.equal(chosen, restate_budget(factors, ratio, r, cap))


@pytest.mark.parametrize("rounding", ["nearest", "budget"])
@pytest.mark.parametrize("r", [8, 32])
@pytest.mark.parametrize("cap", [32, 96, 128])
@pytest.mark.parametrize("ratio", [0.5, 0.8])
def test_every_width_is_a_multiple_and_no_wider_than_the_cap(rounding, r, cap, ratio):
    factors = draw("mostly zero", (6, 4, 128), seed=2)
    factors[:2] = draw("distinct", (2, 4, 128), seed=3)  # heads that would keep everything
    chosen = select_channels(factors, pruning_ratio=ratio, width_multiple=r, rounding=rounding, max_width=cap)
    widths = chosen.sum(-1)
    assert (widths % r == 0).all()
    assert widths.max() <= cap
    if rounding == "budget":
        kept, allowed = int(widths.sum()), round((1 - ratio) * factors.numel(), 9)
        assert kept <= allowed
        assert kept + r > allowed or (widths == cap).all()


def test_what_capped_heads_may_not_keep_goes_to_the_next_best_under_budget_alone():
    factors = torch.full((1, 3, 16), 0.1)
    factors[0, 1] = 0.9
    factors[0, 2] = 0.5
    settings = {"pruning_ratio": 2 / 3, "width_multiple": 8, "max_width": 8}
    assert select_channels(factors, rounding="budget", **settings).sum(-1).tolist() == [[0, 8, 8]]
    assert select_channels(factors, rounding="nearest", **settings).sum(-1).tolist() == [[0, 8, 0]]


def test_cap_below_the_multiple_is_refused():
    with pytest.raises(LeanKError, match="`max_width` 8 is below `width_multiple` 16") as caught:
        select_channels(torch.rand(1, 1, 32), pruning_ratio=0.5, width_multiple=16, max_width=8)
    assert caught.value.hint == "choose a multiple of 16, or null for no cap"


@pytest.mark.parametrize("max_width", [None, 12])
@pytest.mark.parametrize("rounding", ["nearest", "budget"])
def test_a_head_keeps_its_best_channels(rounding, max_width):
    factors = draw("few values", (3, 4, 32), seed=5)
    chosen = select_channels(
        factors, pruning_ratio=0.6, width_multiple=4, rounding=rounding, max_width=max_width
    )
    for head, kept in zip(factors.flatten(0, 1), chosen.flatten(0, 1), strict=True):
        order = sorted(range(32), key=lambda k: (-head[k].item(), k))
        assert kept.nonzero().flatten().tolist() == sorted(order[: int(kept.sum())])


def test_budget_prefers_the_heads_with_the_largest_factors():
    factors = torch.full((1, 3, 8), 0.1)
    factors[0, 1] = 0.9
    factors[0, 2, ::2] = 0.8
    chosen = select_channels(factors, pruning_ratio=0.5, width_multiple=4, rounding="budget")
    assert chosen.sum(-1).tolist() == [[0, 8, 4]]


def test_halves_are_rounded_up():
    factors = torch.zeros(1, 2, 8)
    factors[0, 0, :2] = 1  # 2 of 4 selected channels: half of the multiple
    factors[0, 1, :2] = 1
    chosen = select_channels(factors, pruning_ratio=0.75, width_multiple=4)
    assert chosen.sum(-1).tolist() == [[4, 4]]


def test_a_model_whose_factors_are_mostly_zero_is_still_pruned():
    """A threshold at the quantile would be 0 here, and keep every channel."""
    factors = draw("mostly zero", (8, 4, 64), seed=1)
    assert (factors == 0).float().mean() > 0.7
    chosen = select_channels(factors, pruning_ratio=0.7, width_multiple=16)
    assert 0.65 < 1 - chosen.float().mean() < 0.75


def test_ratio_is_the_decimal_that_was_written():
    """(1 - 0.9) * 5 falls just short of one half in binary."""
    assert math.floor((1 - 0.9) * 5 + 0.5) == 0
    chosen = select_channels(torch.rand(1, 1, 5), pruning_ratio=0.9, width_multiple=1)
    assert chosen.sum() == 1


def test_negative_zero_ties_with_zero():
    factors = torch.tensor([[[0.0, -0.0, 0.0, -0.0]]])
    chosen = select_channels(factors, pruning_ratio=0.5, width_multiple=1)
    assert chosen.tolist() == [[[True, True, False, False]]]


def test_multiple_larger_than_a_head_is_refused():
    with pytest.raises(LeanKError, match="`width_multiple` 32 exceeds the model's `head_dim` 16"):
        select_channels(torch.rand(1, 1, 16), pruning_ratio=0.5, width_multiple=32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_that_are_not_finite_are_refused(value):
    with pytest.raises(LeanKError, match="not finite"):
        select_channels(torch.tensor([[[0.5, value]]]), pruning_ratio=0.5, width_multiple=1)


@pytest.mark.parametrize("rounding", ["nearest", "budget"])
@pytest.mark.parametrize("cap", [None, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.7])
def test_uniform_budget_treats_every_head_as_a_model_of_its_own(shape, ratio, cap, rounding):
    factors = draw("few values", shape, seed=1)
    options = {"pruning_ratio": ratio, "width_multiple": 2, "max_width": cap, "rounding": rounding}
    chosen = select_channels(factors, **options, budget="uniform")
    assert len(chosen.sum(-1).unique()) == 1
    for layer in range(shape[0]):
        for head in range(shape[1]):
            alone = select_channels(factors[layer, head][None, None], **options)
            assert torch.equal(chosen[layer, head], alone[0, 0])


def test_uniform_budget_that_rounds_to_no_channel_is_refused():
    factors = draw("distinct", (2, 3, 16), seed=1)
    with pytest.raises(LeanKError, match=r"`pruning_ratio` 0.9 .* 1.6 of 16 channels, which") as caught:
        select_channels(factors, pruning_ratio=0.9, width_multiple=8, budget="uniform")
    assert "`budget: global`" in caught.value.hint
