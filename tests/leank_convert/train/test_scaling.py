import pytest
import torch

from leank_convert.train.scaling import distillation_loss, l1_penalty, learning_rate_factor, straight_through


def test_learning_rate_rises_over_the_first_fifth_falls_over_the_last_and_never_goes_below_a_tenth():
    for num_steps, expected in ((1, [1]), (5, [1] * 5), (10, [0.5, *[1] * 8, 0.5])):
        assert [learning_rate_factor(step, num_steps) for step in range(num_steps)] == expected
    assert learning_rate_factor(0, 2000) == 0.1
    assert learning_rate_factor(99, 2000) == 0.25
    assert learning_rate_factor(399, 2000) == 1
    assert learning_rate_factor(1601, 2000) == 399 / 400
    assert learning_rate_factor(1999, 2000) == 0.1


def test_distillation_is_the_mean_over_questions_of_the_mean_over_tokens_and_dims_in_float32():
    teacher = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]], dtype=torch.bfloat16)
    student = torch.tensor([[0.0, 2.0], [3.0, 1.0], [2.0, 0.0]], dtype=torch.bfloat16)
    loss = distillation_loss(teacher, student, torch.tensor([0, 0, 0]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((1 + 9 + 4) / 6)
    two = distillation_loss(teacher, student, torch.tensor([0, 0, 1]))
    assert two.item() == pytest.approx(((1 + 9) / 4 + 4 / 2) / 2)


def test_penalty_is_the_mean_over_the_whole_model():
    assert l1_penalty(torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])).item() == 0.5


def test_straight_through_gives_exact_zeros_and_ones_and_passes_the_gradient_to_every_channel():
    factors = torch.rand(2, 3, 8, requires_grad=True)
    kept = torch.rand(2, 3, 8) > 0.5
    mask = straight_through(factors, kept)
    assert torch.equal(mask, kept.float())
    weights = torch.randn(2, 3, 8)
    (mask * weights).sum().backward()
    assert torch.equal(factors.grad, weights)
