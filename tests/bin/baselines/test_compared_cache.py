"""The cache of compared methods: without a method it computes and counts what a LeanK cache does."""

import torch

from bin.baselines.compared_cache import Compared, ComparedLayer
from leank_convert.evaluate.comparison import used_bytes
from leank_convert.evaluate.prefill import decode_token
from leank_convert.evaluate.variants import Dense, Masked

EVERY_CHANNEL = torch.ones(2, 2, 16, dtype=torch.bool)
LENGTHS = (40, 25, 5)
NUM_STEPS = 70  # more than room is made for at a time
FLOAT32 = 1e-4  # what sums of another order may differ by


def decode(variant, prefill):
    """The logits of some steps on the same tokens, and the cache."""
    generator = torch.Generator().manual_seed(6)
    model, cache = variant.start(prefill)
    attention_mask, steps = prefill.attention_mask, []
    for _ in range(NUM_STEPS):
        token = torch.randint(5, 300, (len(LENGTHS), 1), generator=generator)
        logits, attention_mask = decode_token(model, cache, token, attention_mask)
        steps.append(logits)
    return torch.stack(steps), cache


def mask_with_all_kinds_of_heads():
    mask = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0, 0], mask[1, 1] = False, True
    return mask


def test_without_a_method_it_decodes_and_counts_as_a_leank_cache_does(prefill):
    mask = mask_with_all_kinds_of_heads()
    expected, leank = decode(Masked("leank", mask), prefill)
    logits, cache = decode(Compared("compared", ComparedLayer, mask), prefill)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32)
    assert used_bytes(cache) == used_bytes(leank)
    every_channel, _ = decode(Masked("all", torch.ones_like(mask)), prefill)
    assert (expected - every_channel).abs().max() > 1e-2


def test_with_every_channel_it_is_the_dense_model(evaluated, prefill):
    expected, _ = decode(Dense(evaluated.dense), prefill)
    logits, cache = decode(Compared("compared", ComparedLayer, EVERY_CHANNEL), prefill)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32)
    per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes
    assert used_bytes(cache).held == (sum(LENGTHS) + len(LENGTHS) * NUM_STEPS) * per_token


def test_the_prefill_serves_others_after_it(prefill):
    before = [states.clone() for pair in prefill.keys_and_values for states in pair]
    _, cache = decode(Compared("compared", ComparedLayer, EVERY_CHANNEL), prefill)
    for layer in cache.layers:
        layer.keys.zero_()
    after = [states for pair in prefill.keys_and_values for states in pair]
    assert all(map(torch.equal, before, after))
