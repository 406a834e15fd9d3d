"""What tools do with caches: join and fork them, drive one layer alone; and what padding may hold."""

import copy
import math
import weakref
from types import SimpleNamespace

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from runtime.attention_leank import leank_attention
from runtime.tools import concatenate, fork
from tests.runtime.tiny_inputs import WIDTHS, feed, ids
from tests.tiny_families import random_mask

LENGTHS = [20, 33, 5]


def prefilled(model, lengths=LENGTHS, **kwargs):
    return [
        feed(model, ids(1, length, seed), model.build_cache(**kwargs))[CACHE]
        for seed, length in enumerate(lengths)
    ]


def test_layers_are_joined_one_by_one(model):
    """The inputs' first layers are gone before the last ones are touched: no more than one is held twice."""
    caches, gone = prefilled(model), []
    for cache in caches:
        for layer in cache.layers:
            weakref.finalize(layer.store, gone.append, layer.layer_idx)
    concatenate(caches)
    assert gone == [0, 0, 0, 1, 1, 1]


def test_what_does_not_go_together_is_refused_and_left_alone(model, model_pair):
    first, second, _ = prefilled(model)
    other = prefilled(model_pair(random_mask(WIDTHS, seed=1)).leank)[0]
    wider = prefilled(model_pair(WIDTHS, recent=9).leank)[0]
    double = prefilled(copy.deepcopy(model).double())[0]
    centred = copy.deepcopy(model)
    centred.key_means = [torch.ones(1, 3, 16) for _ in model.model.layers]
    (pending,) = prefilled(model, [20], prune="deferred")
    (rounded,) = prefilled(model, [20], kv_dtype="fp8")
    for caches, message in (
        ([], "there is no cache"),
        ([first, second, first], "given twice"),
        ([first, model.build_cache()], "cache 1 is empty"),
        ([first, second, pending], "cache 2 holds input that is not pruned yet, cache 0 is"),
        ([pending, first], "cache 1 is pruned, cache 0 is not"),
        ([first, other], "cache 1 is of a model that keeps other channels"),
        ([first, wider], r"cache 1 has window sizes \(3, 9, 4\), cache 0 has \(3, 6, 4\)"),
        ([first, double], r"cache 1 has dtypes .*float64"),
        ([rounded, first], "cache 1 has kv_dtype auto, cache 0 has fp8$"),
        ([first, prefilled(centred)[0]], r"cache 1 has constants \[\['key_mean'\].*, cache 0 has \[\[\], "),
    ):
        with pytest.raises(ValueError, match=message):
            concatenate(caches)
    assert (first.get_seq_length(), second.get_seq_length(), pending.get_seq_length()) == (20, 33, 20)
    assert concatenate([first]).rows.lengths.tolist() == [20]


def test_forks_share_a_prompt_and_are_refused_where_they_make_no_sense(model):
    (cache,) = prefilled(model, [30], prune="deferred")
    for ours, theirs in zip(fork(cache, recent_size=4).layers, cache.layers, strict=True):
        assert all(a is b for a, b in zip(ours.pending, theirs.pending, strict=True))
    assert cache.rows.is_pending and cache.rows.windows.recent_size == 6
    for sizes, message in (
        ({"flush_size": 0}, "`flush_size` is 0, not an integer from 1 to 16777216"),
        ({"recent_size": -1}, "`recent_size` is -1"),
        ({"sink_size": 1.5}, "`sink_size` is 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            fork(cache, **sizes)
    feed(model, ids(1, 1), cache)
    with pytest.raises(ValueError, match="pruned already cannot be forked"):
        fork(cache)


# What an attention function asks of its module.
ATTENTION = SimpleNamespace(
    config=SimpleNamespace(leank={}), num_key_value_groups=2, is_causal=True, layer_idx=0, training=False
)


def test_what_padding_holds_does_not_matter(model_pair):
    pair = model_pair([[0, 4, 16]], sink=2, recent=3, flush=2)
    mask = torch.ones(2, 18, dtype=torch.bool)
    mask[1, :4] = False
    mask[1, 13:15] = False
    mask[0, 17] = False
    results = []
    for filler in (1.0, math.nan):
        cache = pair.leank.build_cache()
        outputs = []
        for start, stop in ((0, 12), (12, 16), (16, 17), (17, 18)):
            query, key, value = (
                torch.randn(2, heads, stop - start, 16, generator=torch.Generator().manual_seed(start))
                for heads in (6, 3, 3)
            )
            padding = ~mask[:, start:stop]
            handle, _ = cache.layers[0].update(key, value)
            if start:  # a prompt's padding runs through SDPA, which needs finite numbers
                key.transpose(1, 2)[padding] = filler
                value.transpose(1, 2)[padding] = filler
                query.transpose(1, 2)[padding] = filler
                seen = mask[:, :stop]
            else:
                seen = mask[:, None, None, :stop] & torch.ones(stop, stop, dtype=torch.bool).tril()
                seen[1, 0, :4, :4] |= torch.eye(4, dtype=torch.bool)
            out, _ = leank_attention(ATTENTION, query, handle, handle, seen, scaling=0.3)
            outputs.append(out[mask[:, start:stop]])
        for pool in cache.layers[0].store.tensors[:4]:
            assert pool.isfinite().all()
        results.append(torch.cat(outputs))
    assert torch.equal(*results)
