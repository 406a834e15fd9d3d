"""Four bits: chunks, numbers and bytes restated slowly, and what a rotation leaves as it is."""

import math

import pytest
import torch

from bin.baselines import int4
from bin.baselines.compared_cache import Compared, ComparedLayer
from bin.baselines.int4 import HadamardLayer
from tests.bin.baselines.conftest import EVERY_CHANNEL, decode

LENGTHS = (30, 12)
NUM_STEPS = 3
CHUNK = 6  # of 16 channels, so that heads have several and chunks have sizes that are no powers of two


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(int4, "CHUNK_SIZE", CHUNK)


def first_layer(prefill, make_layer, masks):
    """The last logits, and the first layer: what it holds depends on its tokens alone."""
    logits, cache = decode(prefill, Compared("compared", make_layer, masks), NUM_STEPS)
    return logits[-1], cache.layers[0]


def chunks_of(mask):
    """Channels of each chunk of one head."""
    for kept in (True, False):
        channels = [channel for channel in range(len(mask)) if bool(mask[channel]) == kept]
        yield from (channels[start : start + CHUNK] for start in range(0, len(channels), CHUNK))


def rotate_slowly(numbers):
    """Hadamard's sums and differences, of as many numbers as the largest power of two, then of the rest."""
    size = 1 << (len(numbers).bit_length() - 1)
    if size == len(numbers) == 1:
        return list(numbers)
    if size < len(numbers):
        return rotate_slowly(numbers[:size]) + rotate_slowly(numbers[size:])
    first, second = (rotate_slowly(half) for half in (numbers[: size // 2], numbers[size // 2 :]))
    pairs = list(zip(first, second, strict=True))
    return [(a + b) / math.sqrt(2) for a, b in pairs] + [(a - b) / math.sqrt(2) for a, b in pairs]


def round_slowly(numbers):
    low, step = min(numbers), (max(numbers) - min(numbers)) / 15
    return [low + step * math.floor((x - low) / step + 0.5) if step else low for x in numbers]


def test_every_token_is_rounded_in_chunks_of_its_kept_and_its_dropped_channels(prefill, masks):
    _, plain = first_layer(prefill, ComparedLayer, masks)
    _, layer = first_layer(prefill, HadamardLayer, masks)
    for stored, given, mask in (
        (layer.keys, plain.keys, masks[0]),
        (layer.values, plain.values, EVERY_CHANNEL[0]),
    ):
        for row, length in enumerate(LENGTHS):
            for head in range(2):
                for token in range(length + NUM_STEPS):
                    for chunk in chunks_of(mask[head]):
                        numbers = given[row, head, token, chunk].tolist()
                        rounded = torch.tensor(round_slowly(rotate_slowly(numbers)))
                        torch.testing.assert_close(stored[row, head, token, chunk].float(), rounded)


def test_without_rounding_a_rotated_cache_predicts_what_the_plain_one_does(prefill, masks, monkeypatch):
    expected, _ = first_layer(prefill, ComparedLayer, masks)
    rounded, _ = first_layer(prefill, HadamardLayer, masks)
    monkeypatch.setattr(int4, "quantise", lambda states, chunks: states)
    exact, _ = first_layer(prefill, HadamardLayer, masks)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-5)
    assert (rounded - expected).abs().max() > 100 * (exact - expected).abs().max()


def test_bytes_count_codes_and_every_chunks_minimum_and_step_in_the_window_too(prefill, masks):
    _, layer = first_layer(prefill, HadamardLayer, masks)
    size = 8 * layer.keys.element_size()
    expected = 0
    for length in (length + NUM_STEPS for length in LENGTHS):
        flushed = -(-(NUM_STEPS - 2) // 2) * 2  # of windows 2, 6 and 2
        num_pruned = length - NUM_STEPS - 2 - 6 + flushed
        value = 4 * 16 + 2 * size * math.ceil(16 / CHUNK)
        for mask in masks[0]:
            width = int(mask.sum())
            kept, dropped = (4 * n + 2 * size * math.ceil(n / CHUNK) for n in (width, 16 - width))
            expected += length * (kept + value if width else 0)
            expected += (length - num_pruned) * (dropped if width else dropped + value)
    assert layer.used().held == layer.used().read == expected // 8
