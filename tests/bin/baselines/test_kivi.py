"""KIVI: numbers, groups and ages as published, and pruning before it or after it is the same bit for bit."""

import math
from functools import partial

import pytest
import torch

from bin.baselines.compared_cache import Compared, ComparedLayer
from bin.baselines.kivi import KiviLayer, round_in_groups
from tests.bin.baselines.conftest import EVERY_CHANNEL, decode

LENGTHS = (380, 100)
IN_WINDOW = partial(KiviLayer, in_window=True)
NUM_STEPS = 6  # the longer row's K is rounded up to 256, and at the fourth step to 384


def first_layer(prefill, make_layer, masks=EVERY_CHANNEL, num_steps=NUM_STEPS):
    """The first layer's keys depend on its tokens alone, whatever a cache rounds."""
    _, cache = decode(prefill, Compared("compared", make_layer, masks), num_steps)
    return cache.layers[0]


def round_slowly(group):
    """Two bits for each number of a group."""
    low, high = float(group.min()), float(group.max())
    step = (high - low) / 3
    return torch.tensor([low + step * math.floor((float(x) - low) / step + 0.5) for x in group])


def restate(plain, num_steps):
    """Rounded K and V of the first layer, number by number of every group."""
    keys, values = plain.keys.clone(), plain.values.clone()
    for row, length in enumerate(LENGTHS):
        length += num_steps
        for head in range(2):
            for channel in range(16):
                for start in range(0, length // 128 * 128, 32):
                    tokens = slice(start, start + 32)
                    keys[row, head, tokens, channel] = round_slowly(plain.keys[row, head, tokens, channel])
            for token in range(length - 128):
                values[row, head, token] = round_slowly(plain.values[row, head, token])
    return keys, values


@pytest.mark.parametrize("num_steps", [0, 3, 4, 6])
def test_old_tokens_are_rounded_in_groups_and_new_ones_are_not(prefill, num_steps):
    plain = first_layer(prefill, ComparedLayer, num_steps=num_steps)
    kivi = first_layer(prefill, KiviLayer, num_steps=num_steps)
    for stored, expected in zip((kivi.keys, kivi.values), restate(plain, num_steps), strict=True):
        for row, length in enumerate(LENGTHS):
            tokens = slice(0, length + num_steps)
            torch.testing.assert_close(stored[row, :, tokens], expected[row, :, tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pruning_then_quantising_is_quantising_then_pruning(dtype):
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        keys = torch.randn(4, 32, 64, generator=generator).mul(10).to(dtype)
        kept = torch.rand(64, generator=generator) < 0.3
        assert torch.equal(round_in_groups(keys.mT)[:, kept], round_in_groups(keys[:, :, kept].mT))


@pytest.mark.parametrize("make_layer", [KiviLayer, IN_WINDOW])
def test_kept_channels_are_kivis_whatever_else_is_pruned(masks, prefill, make_layer):
    plain = first_layer(prefill, ComparedLayer)
    kivi, product = first_layer(prefill, KiviLayer), first_layer(prefill, make_layer, masks)
    kept = masks[0][:, None]
    other = plain if make_layer is KiviLayer else kivi
    assert torch.equal(product.keys, torch.where(kept, kivi.keys, other.keys))
    sees = kept.any(-1, keepdim=True)
    assert torch.equal(product.values, torch.where(sees, kivi.values, other.values))


@pytest.mark.parametrize(("make_layer", "window_bits"), [(KiviLayer, None), (IN_WINDOW, 4.0)])
def test_bytes_count_codes_extremes_residuals_and_the_window(masks, prefill, make_layer, window_bits):
    layer = first_layer(prefill, make_layer, masks)
    expected = 0.0
    for length in (length + NUM_STEPS for length in LENGTHS):
        flushed = -(-(NUM_STEPS - 2) // 2) * 2  # of windows 2, 6 and 2
        pruned = length - NUM_STEPS - 2 - 6 + flushed
        for token in range(length):
            # Two bits, and two extremes of 32 bits for 32 tokens, or for the 16 channels that there are.
            key = 4.0 if token < length // 128 * 128 else 32.0
            value = 6.0 if token < length - 128 else 32.0
            is_whole = token < 2 or token >= 2 + pruned
            width = int(masks[0, 1].sum())
            expected += width * key + 16 * value
            if is_whole:
                in_key, in_value = (key, value) if window_bits else (32.0, 32.0)
                expected += (16 - width) * in_key + 16 * in_key + 16 * in_value
    assert layer.used().held == layer.used().read == int(expected) // 8
