"""A window that is larger than what the cache holds: nothing is allocated for it before tokens come."""

from __future__ import annotations

import pytest
import torch

from runtime.tools import concatenate, fork
from tests.runtime.tiny_inputs import WIDTHS, row

HUGE = 2**24
# In pages of four tokens: a sink that fills while decoding, rings that do and that go round, a
# window of many times what there is.
SIZES = {
    "long sink": (30, 3, 2),
    "no sink": (0, 21, 14),
    "wraps": (5, 12, 9),
    "nothing but flush": (0, 0, 37),
    "huge": (HUGE, HUGE, HUGE),
    "huge ring": (3, HUGE, HUGE),
}


def window_pages(cache) -> set[int]:
    """Pages of a row in the window."""
    stores = [layer.store for layer in cache.layers]
    assert all(len(store.window_keys) == sum(store.tables.window_runs) for store in stores)
    return {run for store in stores for run in store.tables.window_runs}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("turns", [[1] * 60, [14, 7, 1, 1, 20, 1, 2, 14]], ids=["tokens", "turns"])
def test_a_growing_window_follows_the_rule(
    sizes, turns, model_pair, some_masks, slow_logits, fed_logits, assert_close, small_pages
):
    sink, recent, flush = sizes
    pair = model_pair(some_masks(WIDTHS), sink=sink, recent=recent, flush=flush)
    ids = row(60)
    (ours,), cache = fed_logits(pair.leank, [ids], [[n] for n in turns])
    assert_close(pair.leank, ours, slow_logits(pair, ids, turns))
    most = -(-sink // 4) + (recent + flush + 32 + 2) // 4 + 1
    assert window_pages(cache) == {min(most, cache.rows.tables.runs[0])}


@pytest.mark.parametrize("name", ["long sink", "wraps", "huge ring"])
def test_steps_on_a_growing_window_are_captured_anew(
    name, graphs, model_pair, some_masks, slow_logits, fed_logits, assert_close, small_pages
):
    sink, recent, flush = SIZES[name]
    pair = model_pair(some_masks(WIDTHS), sink=sink, recent=recent, flush=flush)
    ids, turns = row(60), [9] + [1] * 51
    (ours,), cache = fed_logits(pair.leank, [ids], [[n] for n in turns])
    assert_close(pair.leank, ours, slow_logits(pair, ids, turns))
    assert cache.graph.num_captures > 1 and cache.graph.num_replays == 50


@pytest.mark.parametrize("prune", ["eager", "deferred"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rows_of_unequal_length_share_a_growing_window(
    prune, sizes, model_pair, some_masks, slow_logits, fed_logits, assert_close, small_pages
):
    sink, recent, flush = sizes
    pair = model_pair(some_masks(WIDTHS), sink=sink, recent=recent, flush=flush, prune=prune)
    per_row = [[30, 1, 9, 1, 1, 4] + [1] * 9, [2, 1, 1, 1, 1, 1] + [1] * 9, [11, 1, 0, 1, 0, 2] + [1] * 9]
    rows = [row(sum(turns), seed) for seed, turns in enumerate(per_row)]
    ours, _ = fed_logits(pair.leank, rows, list(zip(*per_row, strict=True)))
    for logits, ids, turns in zip(ours, rows, per_row, strict=True):
        assert_close(pair.leank, logits, slow_logits(pair, ids, [n for n in turns if n]))


@pytest.mark.parametrize("sizes", [(3, 6, HUGE), (3, HUGE, 4), (HUGE, HUGE, HUGE)], ids=str)
def test_a_huge_window_takes_what_its_tokens_take(sizes, model_pair, some_masks):
    sink, recent, flush = sizes
    pair = model_pair(some_masks(WIDTHS), sink=sink, recent=recent, flush=flush, prune="deferred")
    whole = pair.leank.build_cache()
    with torch.no_grad():
        pair.leank(torch.stack([row(100, 0), row(100, 1)]), cache=whole)
        forked = fork(whole, recent_size=HUGE)
        joined = concatenate([fork(whole), fork(whole)], num_reserved=150)
        for cache, batch in ((whole, 2), (forked, 2), (joined, 4)):
            for _ in range(50):
                pair.leank(torch.full((batch, 1), 5), cache=cache)
            memory = cache.memory()
            assert memory.total.allocated <= 1.5 * (memory.dense_keys + memory.dense_values)


def test_what_is_reserved_covers_the_window(model_pair, some_masks):
    model = model_pair(some_masks(WIDTHS), sink=3, recent=300, flush=32).leank
    cache = model.build_cache()
    cache.reserve(250)
    with torch.no_grad():
        model(row(130)[None], cache=cache)
        assert window_pages(cache) == {4}
        addresses = cache.addresses()
        for _ in range(120):
            model(row(1)[None], cache=cache)
    assert cache.addresses() == addresses
    cache.reserve(1000)
    assert window_pages(cache) == {1 + 7}


def test_a_crop_and_other_rows_keep_a_window_that_is_not_whole(
    model_pair, some_masks, slow_logits, fed_logits, assert_close, small_pages
):
    pair = model_pair(some_masks(WIDTHS), sink=5, recent=30, flush=40)
    rows = [row(70, 0), row(70, 1)]
    _, cache = fed_logits(pair.leank, [ids[:30] for ids in rows], [[20, 20], [10, 10]])
    cache.crop(-8)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    with torch.no_grad():
        logits = [
            pair.leank(torch.stack([rows[b][i : i + 1] for b in (1, 1, 0, 0)]), cache=cache).logits
            for i in range(22, 70)
        ]
    ours = torch.cat(logits, 1)
    for logits, ids in zip(ours, [rows[1], rows[1], rows[0], rows[0]], strict=True):
        assert_close(pair.leank, logits, slow_logits(pair, ids, [20, 2] + [1] * 48)[22:])
