"""What a method takes for a channel's worth."""

from types import SimpleNamespace

import torch

from leank_convert.methods import scores
from leank_convert.methods.statistics import AttentionStatistics, mean_statistics


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 2, 8)
    norms, products = (torch.rand(shape, generator=generator) for _ in range(2))
    return AttentionStatistics(norms, torch.rand(shape[:2], generator=generator), products)


def calibration(measured=None, seed=0):
    """What a score reads of a `Calibration`."""
    return SimpleNamespace(shape=(3, 2, 8), statistics=lambda: measured, recipe=SimpleNamespace(seed=seed))


def test_every_prompt_weighs_the_same():
    measured = [draw(seed) for seed in range(4)]
    mean = mean_statistics(measured)
    for name in ("channel_norms", "high_frequency_ratio", "product_magnitudes"):
        expected = sum(getattr(one, name) for one in measured) / 4
        torch.testing.assert_close(getattr(mean, name), expected)


def test_static_norm_and_double_sparsity_prefer_large_channels():
    measured = draw(0)
    assert torch.equal(scores.static_norm(calibration(measured)), measured.channel_norms)
    assert torch.equal(scores.double_sparsity(calibration(measured)), measured.product_magnitudes)


def test_high_frequency_ratio_prefers_heads_of_a_low_ratio_and_no_channel_within_one():
    measured = draw(0)
    found = scores.high_frequency_ratio(calibration(measured))
    assert found.shape == (3, 2, 8)
    assert bool((found == found[..., :1]).all())
    worst_first = found[..., 0].flatten().argsort()
    assert torch.equal(worst_first, measured.high_frequency_ratio.flatten().argsort(descending=True))


def test_random_scores_are_a_function_of_seed_and_shape():
    found = scores.random(calibration(seed=5))
    assert found.shape == (3, 2, 8)
    assert torch.equal(found, scores.random(calibration(seed=5)))
    assert not torch.equal(found, scores.random(calibration(seed=6)))
    assert len(found.unique()) == found.numel()
