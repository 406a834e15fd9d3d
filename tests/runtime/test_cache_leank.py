"""The cache as an object: bytes, growth, crop, beams, copies, channel masks of one's own."""

import copy
import pickle

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from runtime.tools import concatenate
from tests.checks import changed
from tests.runtime.conftest import coded_pair
from tests.runtime.tiny_inputs import GREEDY, assert_close, feed, ids, padded
from tests.tiny_families import random_mask

MASK_WIDTHS = [[0, 4, 8], [16, 16, 16]]


def test_bytes_are_counted_by_region(model_pair):
    model = model_pair(MASK_WIDTHS, sink=3, recent=6, flush=4).leank
    cache = feed(model, ids(2, 30), attention_mask=padded(30, 10))[CACHE]
    memory = cache.memory()
    # Rows of 30 and 20 tokens, 9 whole tokens each; fp32; head_dim 16 in chunks of 4; a page of 64 each.
    for region, num_tokens, num_channels in (
        (memory.kept_keys, 30 + 20, 0 + 4 + 8 + 48),
        (memory.kept_values, 30 + 20, (2 + 3) * 16),
        (memory.window_keys, 2 * 9, 16 + 12 + 8),
        (memory.window_values, 2 * 9, 16),
    ):
        assert region.used == num_tokens * num_channels * 4
        assert region.allocated == 2 * 64 * num_channels * 4
    assert memory.dense_keys == memory.dense_values == (30 + 20) * 2 * 3 * 16 * 4
    assert memory.total.used == memory.keys.used + memory.values.used
    for _ in range(4):
        feed(model, ids(2, 1), cache)
    assert cache.memory().window_keys.used == 2 * 13 * (16 + 12 + 8) * 4
    feed(model, ids(2, 1), cache)
    assert cache.memory().window_keys.used == 2 * 10 * (16 + 12 + 8) * 4
    pending = feed(model, ids(2, 30), model.build_cache("deferred"))[CACHE].memory()
    used, keys, dense = pending.total.used, pending.pending_keys.used, pending.dense_keys
    assert used == 2 * keys == 2 * dense == 2 * 30 * 2 * 2 * 48 * 4


def test_rows_of_mixed_lengths_take_what_each_needs(model_pair):
    pair = model_pair([[0, 4, 8]], sink=128, recent=1024, flush=32, max_position_embeddings=8192)
    lengths = [2048, *[100] * 7]
    mask = (torch.arange(2048) >= 2048 - torch.tensor(lengths)[:, None]).long()
    padded = feed(pair.leank, ids(8, 2048), attention_mask=mask)[CACHE]
    caches = [feed(pair.leank, ids(1, length))[CACHE] for length in lengths]
    joined = concatenate(caches)
    page = 64 * (4 + 8 + 2 * 16) * 4, 64 * (16 + 12 + 8 + 16) * 4  # of kept channels and V, and of the window
    for cache in (padded, joined):
        for _ in range(2):
            for _ in range(40):
                feed(pair.leank, ids(8, 1), cache)
            memory = cache.memory()
            for regions, page_bytes in (
                ((memory.kept_keys, memory.kept_values), page[0]),
                ((memory.window_keys, memory.window_values), page[1]),
            ):
                names = "used", "allocated"
                used, allocated = (sum(getattr(region, name) for region in regions) for name in names)
                assert used < allocated <= 9 / 8 * used + 8 * page_bytes


def test_scoring_tokens_and_taking_them_back_does_not_grow_the_cache(model_pair):
    model = model_pair(MASK_WIDTHS, sink=3, recent=6, flush=8).leank
    mask = padded(21, 5)
    cache = feed(model, ids(2, 20), attention_mask=mask[:, :20])[CACHE]
    feed(model, ids(2, 1), cache, attention_mask=mask)
    allocated = cache.memory().total.allocated
    for _ in range(70):
        cache.crop(-1)
        given = mask.clone()
        feed(model, ids(2, 1), cache, attention_mask=given)
        given.zero_()  # who gave it may need it for something else
    assert cache.rows.lengths.tolist() == [21, 16] and cache.rows.max_length == 21
    assert cache.memory().total.allocated == allocated


def test_crop_into_the_pruned_region_is_refused_and_of_everything_leaves_an_empty_cache(model_pair):
    model = model_pair(MASK_WIDTHS, sink=3, recent=6, flush=4).leank
    cache = feed(model, ids(1, 20))[CACHE]
    message = (
        r"crop of 7 tokens reaches into the pruned region: only the last 6 .* at most recent_size \+ 1 tokens"
    )
    with pytest.raises(ValueError, match=message):
        cache.crop(-7)
    assert cache.get_seq_length() == 20
    cache.crop(-6)
    assert cache.rows.lengths.tolist() == [14]
    with pytest.raises(ValueError, match="crop of 15 tokens from a cache that holds 14"):
        cache.crop(-15)
    for length in (8, 20):
        cache = feed(model, ids(1, length))[CACHE]
        cache.crop(-length)
        assert cache.get_seq_length() == 0
        assert torch.equal(feed(model, ids(1, 12), cache).logits, feed(model, ids(1, 12)).logits)


@pytest.mark.parametrize(
    ("prune", "decoded", "count"), [("eager", 0, 1), ("deferred", 0, 3), ("eager", 1, 3), ("deferred", 1, 1)]
)
def test_a_cache_filled_in_inference_mode_goes_on_outside_it(count, decoded, prune, model_pair):
    model = model_pair(MASK_WIDTHS, prune=prune).leank
    expected = feed(model, ids(1, 20))[CACHE]
    with torch.inference_mode():
        cache = model(ids(1, 20), attention_mask=torch.ones(1, 20))[CACHE]
        if decoded:
            model(ids(1, 1), cache=cache)
    if decoded:
        feed(model, ids(1, 1), expected)
    for _ in range(2):
        ours = model(ids(1, count, 1), cache=cache).logits
        ours.sum().backward()
        assert_close(model, ours, feed(model, ids(1, count, 1), expected).logits)
    with torch.inference_mode():
        model(ids(1, 1), cache=cache)


def test_one_channel_mask_for_all_rows_is_a_model_with_that_mask(model_pair):
    others = random_mask([[3, 16, 0], [8, 0, 8]], seed=9)
    model = model_pair(MASK_WIDTHS, prune="deferred").leank
    expected = model_pair(others, prune="deferred").leank.generate(ids(2, 30), **GREEDY)
    cache = feed(model, ids(2, 30)[:, :29])[CACHE]
    for layer, mask in zip(cache.layers, others, strict=True):
        assert layer.pending[0].shape == (2, 3, 29, 16)
        layer.set_channel_mask(mask)
    ours = model.generate(ids(2, 30), cache=cache, **GREEDY)
    assert torch.equal(ours, expected)


def test_v_stays_pruned_but_where_the_model_kept_nothing_or_it_is_asked_to_be_whole():
    pair = coded_pair("auto values", prune="deferred")
    pruned = pair.leank.config.leank["value_widths"]
    for prune_values in (True, False):
        cache = feed(pair.leank, ids(2, 30)[:, :29])[CACHE]
        for layer, widths in zip(cache.layers, pruned, strict=True):
            layer.set_channel_mask(torch.ones(3, 16, dtype=torch.bool), prune_values=prune_values)
            kept = zip(widths, layer.model_mask[0].any(-1).tolist(), strict=True)
            whole = [16 if not keeps or not prune_values else width for width, keeps in kept]
            assert list(layer.layout.value_widths) == whole
        ours = pair.leank.generate(ids(2, 30), cache=cache, **GREEDY)
        dense = pair.dense.generate(ids(2, 30), **GREEDY)
        assert torch.equal(ours, dense) != prune_values


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, 16), r"torch.float32 \[3, 16\], not bool \[3, 16\]"),
        (torch.ones(2, 16, dtype=torch.bool), r"torch.bool \[2, 16\], not bool \[3, 16\]"),
        (torch.ones(4, 3, 16, dtype=torch.bool), "4 channel masks for 2 rows"),
        (changed(torch.ones(2, 3, 16, dtype=torch.bool), (1, 0, 5), False), "rows keep different numbers"),
    ],
    ids=["not bool", "heads", "rows", "widths"],
)
def test_a_channel_mask_that_does_not_fit_is_refused(mask, message, model_pair):
    cache = feed(model_pair(MASK_WIDTHS, prune="deferred").leank, ids(2, 30))[CACHE]
    with pytest.raises(ValueError, match=message):
        cache.layers[0].set_channel_mask(mask)


def test_padding_of_pending_input_is_known_without_a_mask(model):
    mask, positions = padded(24), (padded(24).cumsum(1) - 1).clamp(min=0)
    found = []
    for given in (mask, None):
        cache = model.build_cache("deferred")
        feed(model, ids(2, 12), cache, attention_mask=mask[:, :12], position_ids=positions[:, :12])
        more = {"attention_mask": given, "position_ids": positions[:, 12:]}
        found.append(feed(model, ids(2, 12, 1), cache, **more).logits)
    assert torch.equal(*found)


def test_no_copy_of_a_cache_has_its_addresses(model):
    cache = feed(model, ids(2, 40))[CACHE]
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert not set(cache.addresses()) & set(copied.addresses())
