"""What tools do with caches: join prompts that ran one at a time, fork a prefill, drive one layer alone."""

import copy
import weakref

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from runtime.tools import concatenate, fill_layer, fork
from tests.runtime.tiny_inputs import WIDTHS, ids
from tests.tiny_families import random_mask

LENGTHS = [20, 33, 5]


def prefilled(model, lengths=LENGTHS, **kwargs):
    with torch.no_grad():
        return [
            model(ids(1, length, seed), cache=model.build_cache(**kwargs))[CACHE]
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
    for caches, message in (
        ([], "there is no cache"),
        ([first, second, first], "given twice"),
        ([first, model.build_cache()], "cache 1 is empty"),
        ([first, second, pending], "cache 2 holds input that is not pruned yet, cache 0 is"),
        ([pending, first], "cache 1 is pruned, cache 0 is not"),
        ([first, other], "cache 1 is of a model that keeps other channels"),
        ([first, wider], r"cache 1 has window sizes \(3, 9, 4\), cache 0 has \(3, 6, 4\)"),
        ([first, double], r"cache 1 has dtypes .*float64"),
        ([first, prefilled(centred)[0]], r"cache 1 has constants \[\['key_mean'\].*, cache 0 has \[\[\], "),
    ):
        with pytest.raises(ValueError, match=message):
            concatenate(caches)
    assert (first.get_seq_length(), second.get_seq_length(), pending.get_seq_length()) == (20, 33, 20)
    assert concatenate([first]).rows.lengths.tolist() == [20]


def states(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(2, heads, tokens, 16, generator=torch.Generator().manual_seed(seed))


def test_forks_share_a_prompt_and_are_refused_where_they_make_no_sense(model):
    (cache,) = prefilled(model, [30], prune="deferred")
    for ours, theirs in zip(fork(cache, recent_size=4).layers, cache.layers, strict=True):
        assert all(a is b for a, b in zip(ours.pending, theirs.pending, strict=True))
    assert cache.rows.is_pending and cache.rows.recent_size == 6
    for sizes, message in (
        ({"flush_size": 0}, "`flush_size` is 0, not an integer from 1 to 16777216"),
        ({"recent_size": -1}, "`recent_size` is -1"),
        ({"sink_size": 1.5}, "`sink_size` is 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            fork(cache, **sizes)
    with torch.no_grad():
        model(ids(1, 1), cache=cache)
    with pytest.raises(ValueError, match="pruned already cannot be forked"):
        fork(cache)


@pytest.mark.parametrize("prune", ["eager", "deferred"])
def test_layers_are_filled_without_a_model(prune, model):
    """As the attention function fills them."""
    cache, expected = model.build_cache(prune), model.build_cache()
    keys, values, queries = states(31, 3, 0), states(31, 3, 1), states(31, 6, 2)
    attention = model.model.layers[0].self_attn
    for layer in range(2):
        fill_layer(cache, layer, keys[:, :, :30], values[:, :, :30])
    outputs = []
    for caches, part in (([expected], slice(0, 30)), ([cache, expected], slice(30, 31))):
        for layer in range(2):
            handles = [own.layers[layer].update(keys[:, :, part], values[:, :, part])[0] for own in caches]
            outputs += [handle.attend(attention, queries[:, :, part], None)[0] for handle in handles]
    assert torch.equal(outputs[2], outputs[3]) and torch.equal(outputs[4], outputs[5])
    assert cache.rows.lengths.tolist() == [31, 31] and cache.get_seq_length() == 31


def test_layers_are_filled_only_where_they_are_empty(model):
    cache, keys = model.build_cache(), states(30, 3, 0)
    fill_layer(cache, 0, keys, keys)
    with pytest.raises(ValueError, match="layer 0 holds 30 columns, only an empty one is filled"):
        fill_layer(cache, 0, keys, keys)
    with pytest.raises(ValueError, match="given 2 rows of 29 columns, another layer holds 2 of 30"):
        fill_layer(cache, 1, keys[:, :, 1:], keys[:, :, 1:])
    with pytest.raises(ValueError, match="heads"):
        fill_layer(model.build_cache(), 0, keys[:, :2], keys[:, :2])
