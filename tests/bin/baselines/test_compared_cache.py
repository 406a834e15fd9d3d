"""The cache of compared methods: without a method it computes and counts what a LeanK cache does."""

import torch

from bin.baselines.compared_cache import Compared, ComparedLayer
from leank_convert.evaluate.comparison import used_bytes
from leank_convert.evaluate.variants import Masked
from tests.bin.baselines.conftest import EVERY_CHANNEL, decode

LENGTHS = (40, 25, 5)  # of the prompts that `prefill` reads
NUM_STEPS = 70  # more than room is made for at a time
FLOAT32 = 1e-4  # what sums of another order may differ by


def test_without_a_method_it_decodes_and_counts_as_a_leank_cache_does(prefill):
    mask = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0, 0], mask[1, 1] = False, True  # all kinds of heads
    expected, leank = decode(prefill, Masked("leank", mask), NUM_STEPS)
    logits, cache = decode(prefill, Compared("compared", ComparedLayer, mask), NUM_STEPS)
    torch.testing.assert_close(logits, expected, rtol=0, atol=FLOAT32)
    assert used_bytes(cache) == used_bytes(leank)
    every_channel, _ = decode(prefill, Masked("all", torch.ones_like(mask)), NUM_STEPS)
    assert (expected - every_channel).abs().max() > 1e-2


def test_the_prefill_serves_others_after_it(prefill):
    before = [states.clone() for pair in prefill.keys_and_values for states in pair]
    _, cache = decode(prefill, Compared("compared", ComparedLayer, EVERY_CHANNEL), NUM_STEPS)
    for layer in cache.layers:
        layer.keys.zero_()
    after = [states for pair in prefill.keys_and_values for states in pair]
    assert all(map(torch.equal, before, after))
