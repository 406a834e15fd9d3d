"""Four bits: chunks, numbers and bytes restated slowly, and what a rotation leaves as it is."""

import math

import pytest
import torch

from bin.baselines import int4
from bin.baselines.compared_cache import Compared, ComparedLayer
from bin.baselines.int4 import HadamardLayer, assign_chunks, hadamard, quantise
from tests.bin.baselines.conftest import EVERY_CHANNEL, decode

LENGTHS = (30, 12)
NUM_STEPS = 3
CHUNK = 6  # of 16 channels, so that heads have several and chunks have sizes that are no powers of two


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(int4, "CHUNK_SIZE", CHUNK)


@pytest.fixture
def masks(evaluated):
    """Those of the checkpoint, and a head that keeps nothing."""
    masks = evaluated.channel_masks.clone()
    masks[0, 0] = False
    return masks


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sixteen_evenly_spaced_numbers_stay_as_they_are(dtype, monkeypatch):
    monkeypatch.setattr(int4, "CHUNK_SIZE", 32)
    generator = torch.Generator().manual_seed(1)
    chunks = assign_chunks(torch.rand(3, 96, generator=generator) < 0.4)
    codes = torch.randint(16, (2, 3, 20, 96), generator=generator)
    for head, of_head in enumerate(chunks):
        for chunk in of_head.unique():
            channels = (of_head == chunk).nonzero().flatten()
            codes[:, head, :, channels[0]], codes[:, head, :, channels[-1]] = 0, 15
    states = ((codes - 5) * 0.125).to(dtype)
    assert torch.equal(quantise(states, chunks), states)
    equal = torch.full_like(states, 0.3)
    assert torch.equal(quantise(equal, chunks), equal)


def test_a_rotation_leaves_scores_of_kept_and_of_dropped_channels_as_they_are(monkeypatch):
    monkeypatch.setattr(int4, "CHUNK_SIZE", 32)
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(4, 96, generator=generator) < torch.tensor([0.0, 0.3, 0.6, 1.1])[:, None]
    query, keys = (torch.randn(4, 10, 96, generator=generator) for _ in range(2))
    matrices = hadamard(assign_chunks(mask))
    rotated_query, rotated_keys = query @ matrices, keys @ matrices
    for part in (mask[:, None], ~mask[:, None]):
        scores, after = (query * part) @ keys.mT, (rotated_query * part) @ rotated_keys.mT
        torch.testing.assert_close(after, scores, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(rotated_keys @ matrices, keys)
    # Of a channel that stands out, a whole chunk takes equal parts.
    assert torch.equal(torch.unique(hadamard(torch.zeros(1, 32)).abs()), torch.tensor([32**-0.5]))


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
