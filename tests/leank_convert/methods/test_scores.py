"""What a method takes for a channel's worth."""

import torch

from leank_convert.architectures import read_model_facts
from leank_convert.methods import scores
from leank_convert.methods.statistics import AttentionStatistics, mean_statistics


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 2, 8)
    norms, products = (torch.rand(shape, generator=generator) for _ in range(2))
    return AttentionStatistics(norms, torch.rand(shape[:2], generator=generator), products)


def facts(**changes):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "vocab_size": 10,
    }
    return read_model_facts({**config, **changes}, origin="tiny")


def test_every_prompt_weighs_the_same():
    measured = [draw(seed) for seed in range(4)]
    mean = mean_statistics(measured)
    for name in ("channel_norms", "high_frequency_ratio", "product_magnitudes"):
        expected = sum(getattr(one, name) for one in measured) / 4
        torch.testing.assert_close(getattr(mean, name), expected)


def test_static_norm_and_double_sparsity_prefer_large_channels():
    measured = draw(0)
    assert torch.equal(scores.static_norm(measured), measured.channel_norms)
    assert torch.equal(scores.double_sparsity(measured), measured.product_magnitudes)


def test_high_frequency_ratio_prefers_heads_of_a_low_ratio_and_no_channel_within_one():
    measured = draw(0)
    found = scores.high_frequency_ratio(measured)
    assert found.shape == (3, 2, 8)
    assert bool((found == found[..., :1]).all())
    worst_first = found[..., 0].flatten().argsort()
    assert torch.equal(worst_first, measured.high_frequency_ratio.flatten().argsort(descending=True))


def test_random_scores_are_a_function_of_seed_and_shape():
    found = scores.random(facts(), 5)
    assert found.shape == (3, 2, 8)
    assert torch.equal(found, scores.random(facts(), 5))
    assert not torch.equal(found, scores.random(facts(), 6))
    assert len(found.unique()) == found.numel()
