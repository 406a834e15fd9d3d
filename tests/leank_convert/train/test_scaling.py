"""Losses, learning rates and the warning when more factors or gates are equal and best than are kept."""

import pytest
import torch

from leank_convert.mask import ChannelMask
from leank_convert.train.loop import write_result
from leank_convert.train.scaling import distillation_loss, learning_rate_factor, straight_through
from leank_convert.train.state import TrainingDirectory
from tests.checks import short_recipe


def test_learning_rate_rises_over_the_first_fifth_falls_over_the_last_and_never_goes_below_a_tenth():
    for num_steps, expected in ((1, [1]), (5, [1] * 5), (10, [0.5, *[1] * 8, 0.5])):
        assert [learning_rate_factor(step, num_steps) for step in range(num_steps)] == expected
    for step, factor in ((0, 0.1), (99, 0.25), (399, 1), (1601, 399 / 400), (1999, 0.1)):
        assert learning_rate_factor(step, 2000) == factor


def test_distillation_is_the_mean_over_questions_of_the_mean_over_tokens_and_dims_in_float32():
    teacher = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]], dtype=torch.bfloat16)
    student = torch.tensor([[0.0, 2.0], [3.0, 1.0], [2.0, 0.0]], dtype=torch.bfloat16)
    loss = distillation_loss(teacher, student, torch.tensor([0, 0, 0]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((1 + 9 + 4) / 6)
    two = distillation_loss(teacher, student, torch.tensor([0, 0, 1]))
    assert two.item() == pytest.approx(((1 + 9) / 4 + 4 / 2) / 2)


def test_straight_through_gives_exact_zeros_and_ones_and_passes_the_gradient_to_every_channel():
    factors = torch.rand(2, 3, 8, requires_grad=True)
    kept = torch.rand(2, 3, 8) > 0.5
    mask = straight_through(factors, kept)
    assert torch.equal(mask, kept.float())
    weights = torch.randn(2, 3, 8)
    (mask * weights).sum().backward()
    assert torch.equal(factors.grad, weights)


@pytest.fixture
def write(tmp_path):
    def run(factors, kept, gates=None, **changes):
        channel_mask = torch.zeros(2, 2, 16, dtype=torch.bool)
        channel_mask.view(-1)[:kept] = True
        mask = ChannelMask(channel_mask, factors)
        write_result(mask, TrainingDirectory(tmp_path), short_recipe(**changes), tmp_path, gates)

    return run


@pytest.mark.parametrize(("kept", "warned"), [(16, True), (20, False), (24, False)])
def test_more_equal_best_factors_than_channels_to_keep_are_told(write, caplog, kept, warned):
    factors = torch.full((2, 2, 16), 0.5)
    factors.view(-1)[:20] = 1.0
    write(factors, kept)
    told = f"20 channels ended with the largest factor and the mask keeps {kept}" in caplog.text
    assert told == warned
    assert ("stage1.l1_weight" in caplog.text) == warned


@pytest.mark.parametrize(
    ("method", "gates", "told"),
    [
        ("duo-attention", [1.0, 1.0, 1.0, 0.2], "3 heads ended with the largest gate and the mask keeps 2"),
        ("duo-attention", [0.0, 0.0, 0.0, 0.0], "`heads.l1_weight` below 0.05 tells them apart"),
        ("duo-attention", [1.0, 1.0, 0.3, 0.2], None),
        ("duo-attention+leank", [1.0, 1.0, 1.0, 0.2], "`heads.l1_weight` above 0.05 tells them apart"),
    ],
)
def test_more_equal_best_gates_than_heads_to_keep_are_told(write, caplog, method, gates, told):
    write(None, 32, torch.tensor(gates).view(2, 2, 1), method=method)
    assert told in caplog.text if told else caplog.text == ""


def test_a_mask_without_a_channel_is_told_as_one(write, caplog):
    write(torch.zeros(2, 2, 16), 0)
    assert "no head keeps a channel" in caplog.text
    assert "tells them apart" not in caplog.text
