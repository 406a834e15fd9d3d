"""How much memory a cache takes: what is reserved, how it grows, and what a prompt leaves behind."""

import weakref
from unittest.mock import Mock

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from runtime import store_leank
from runtime.attention_leank import AttentionHandle
from runtime.tools import concatenate, fork
from tests.runtime.tiny_inputs import WIDTHS, feed, ids, padded

GREEDY = {"do_sample": False, "pad_token_id": 0}


def pages(cache, pool, runs):
    """Pages that rows have in a pool."""
    stores = [layer.store for layer in cache.layers]
    assert all(len(getattr(store.tensors, pool)) == sum(getattr(store.tables, runs)) for store in stores)
    return {run for store in stores for run in getattr(store.tables, runs)}


def capacities(cache):
    """Tokens that rows have room for."""
    return {64 * run for run in pages(cache, "kept_keys", "runs")}


def window_pages(cache):
    """Pages of a row in the window."""
    return pages(cache, "window_keys", "window_runs")


def test_reserved_memory_never_grows(model):
    cache = model.build_cache()
    cache.reserve(250)
    feed(model, ids(2, 130), cache)
    addresses = cache.addresses()
    for _ in range(120):
        feed(model, ids(2, 1), cache)
    assert capacities(cache) == {256} and cache.addresses() == addresses
    for _ in range(7):
        feed(model, ids(2, 1), cache)
    assert capacities(cache) == {320} and cache.addresses() != addresses
    cache = model.build_cache()
    cache.reserve(168)
    feed(model, ids(2, 100), cache, attention_mask=(torch.arange(100) >= 40).expand(2, -1))
    assert capacities(cache) == {128}, "a row needs no more than its columns"


@pytest.mark.parametrize("num_columns", [10**12, 10**300, -1, 2.5, "64"], ids=lambda value: str(value)[:9])
def test_an_absurd_reservation_is_refused(num_columns, model):
    cache = feed(model, ids(2, 60))[CACHE]
    with pytest.raises(ValueError, match=r"^`num_columns` is .{1,60}, not an integer from 0 to 16777216$"):
        cache.reserve(num_columns)
    with pytest.raises(ValueError, match=r"^`num_reserved` is .{1,60}, not an integer from 0 to 16777216$"):
        concatenate([cache], num_columns)
    assert capacities(cache) == {64} and cache.rows.num_reserved == 0


def test_a_reservation_that_memory_does_not_suffice_for_leaves_the_cache_usable(model, monkeypatch):
    cache = feed(model, ids(2, 60))[CACHE]

    with monkeypatch.context() as patched:
        patched.setattr(store_leank, "take_pages", Mock(side_effect=torch.OutOfMemoryError("no memory")))
        with pytest.raises(torch.OutOfMemoryError):
            cache.reserve(2**24)
    for _ in range(6):
        feed(model, ids(2, 1), cache)
    assert capacities(cache) == {128}


@pytest.mark.parametrize(
    ("options", "capacity"),
    # More than 256 tokens beyond a short prompt may never come.
    [({"max_new_tokens": 200}, 320), ({"max_length": 130}, 192), ({"max_new_tokens": 300}, 128)],
    ids=str,
)
def test_generate_reserves_for_a_short_answer_and_in_a_second_turn_too(options, capacity, model):
    # Any token ends the answer: what is there by then was reserved.
    settings = {"return_dict_in_generate": True, "eos_token_id": list(range(64)), **GREEDY}
    result = model.generate(ids(2, 100), attention_mask=torch.ones(2, 100), **options, **settings)
    assert capacities(result[CACHE]) == {capacity}
    tokens = torch.cat([result.sequences, ids(2, 59)], 1)
    result = model.generate(tokens, cache=result[CACHE], max_new_tokens=200, **settings)
    assert capacities(result[CACHE]) == {384}


def test_blocks_of_a_prompt_give_what_the_whole_gives(model, monkeypatch):
    mask = padded(70, 23)
    whole = feed(model, ids(2, 70), attention_mask=mask)[CACHE]
    monkeypatch.setattr(store_leank, "_BLOCK_SIZE", 2 * 3 * 16 * 9)
    blocks = feed(model, ids(2, 70), attention_mask=mask)[CACHE]
    for ours, expected in zip(blocks.layers, whole.layers, strict=True):
        for pool, other in zip(ours.store.tensors[:4], expected.store.tensors[:4], strict=True):
            assert torch.equal(pool, other)


def test_a_layers_whole_prompt_is_gone_before_the_next_layers_comes(model, monkeypatch):
    whole: list[weakref.ref] = []
    alive: list[list[bool]] = []
    attend = AttentionHandle.attend

    def watched(handle, *args, **kwargs):
        alive.append([ref() is not None for ref in whole])
        whole.extend([weakref.ref(handle.key), weakref.ref(handle.value)])
        result = attend(handle, *args, **kwargs)
        alive.append([ref() is not None for ref in whole])
        return result

    monkeypatch.setattr(AttentionHandle, "attend", watched)
    feed(model, ids(2, 70))
    assert len(whole) == 4 and not any(map(any, alive))


@pytest.mark.parametrize("sizes", [(3, 6, 2**24), (3, 2**24, 4), (2**24, 2**24, 2**24)], ids=str)
def test_a_huge_window_takes_what_its_tokens_take(sizes, model_pair):
    sink, recent, flush = sizes
    pair = model_pair(WIDTHS, sink=sink, recent=recent, flush=flush, prune="deferred")
    whole = pair.leank.build_cache()
    feed(pair.leank, ids(2, 100), whole)
    forked = fork(whole, recent_size=2**24)
    joined = concatenate([fork(whole), fork(whole)], num_reserved=150)
    for cache, batch in ((whole, 2), (forked, 2), (joined, 4)):
        for _ in range(50):
            feed(pair.leank, torch.full((batch, 1), 5), cache)
        memory = cache.memory()
        assert memory.total.allocated <= 1.5 * (memory.dense_keys + memory.dense_values)


def test_what_is_reserved_covers_the_window(model_pair):
    model = model_pair(WIDTHS, sink=3, recent=300, flush=32).leank
    cache = model.build_cache()
    cache.reserve(250)
    feed(model, ids(1, 130), cache)
    assert window_pages(cache) == {4}
    addresses = cache.addresses()
    for _ in range(120):
        feed(model, ids(1, 1), cache)
    assert cache.addresses() == addresses
    cache.reserve(1000)
    assert window_pages(cache) == {1 + 7}
