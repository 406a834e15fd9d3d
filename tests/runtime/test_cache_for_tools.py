"""What tools do with caches: join prompts that ran one at a time, fork a prefill, drive one layer alone."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from leank_convert._runtime.configuration_leank import CACHE
from runtime.tools import concatenate, decode_layer, fill_layer, fork
from tests.runtime.tiny_inputs import WIDTHS
from tests.twin_caches import ids

LENGTHS = [20, 33, 5]


def prefilled(model, lengths=LENGTHS, **kwargs):
    with torch.no_grad():
        return [
            model(ids(1, length, seed), cache=model.build_cache(**kwargs))[CACHE]
            for seed, length in enumerate(lengths)
        ]


def decode(model, cache, positions, steps=30, mask=None):
    logits = []
    with torch.no_grad():
        for step in range(steps):
            tokens = ids(positions.shape[0], 1, 100 + step)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            output = model(tokens, attention_mask=mask, position_ids=positions + step, cache=cache)
            logits.append(output.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("with_mask", [False, True])
def test_a_joined_cache_is_that_of_a_padded_batch(with_mask, model, assert_close):
    mask = torch.stack([torch.arange(33) >= 33 - length for length in LENGTHS]).long()
    batch = torch.zeros(3, 33, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        batch[row, -length:] = ids(1, length, row)[0]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(batch, attention_mask=mask, position_ids=positions)[CACHE]
    joined = concatenate(prefilled(model))
    next_position = torch.tensor(LENGTHS)[:, None]
    given = mask if with_mask else None
    ours = decode(model, joined, next_position, 10, given)
    assert_close(model, ours, decode(model, padded, next_position, 10, given))
    padded.crop(-3)
    joined.crop(-3)
    assert joined.rows.lengths.tolist() == padded.rows.lengths.tolist()


def test_rows_of_several_batches_and_own_masks(model_pair, some_masks, assert_close):
    model = model_pair(some_masks(WIDTHS), prune="deferred").leank
    own = [some_masks([[3, 16, 0], [8, 0, 8]], seed=seed) for seed in (3, 4)]
    caches, expected = [], model.build_cache()
    for mask in own:
        cache = model.build_cache()
        for index, layer in enumerate(cache.layers):
            layer.set_channel_mask(mask[index])
        caches.append(cache)
    for index, layer in enumerate(expected.layers):
        layer.set_channel_mask(torch.stack([own[0][index], own[1][index], own[1][index]]))
    tokens, next_tokens = ids(3, 30), ids(3, 1, 9)
    with torch.no_grad():
        for cache, rows in ((caches[0], [0]), (caches[1], [1, 2]), (expected, [0, 1, 2])):
            model(tokens[rows], cache=cache)
            model(next_tokens[rows], cache=cache)
    joined = concatenate(caches)
    positions = torch.full((3, 1), 31)
    assert_close(model, decode(model, joined, positions, 5), decode(model, expected, positions, 5))


def test_layers_are_joined_one_by_one(model):
    """The inputs' first layers are gone before the last ones are touched: no more than one is held twice."""
    caches, gone = prefilled(model), []
    for cache in caches:
        for layer in cache.layers:
            weakref.finalize(layer.store, gone.append, layer.layer_idx)
    concatenate(caches)
    assert gone == [0, 0, 0, 1, 1, 1]


def test_what_does_not_go_together_is_refused_and_left_alone(model, model_pair, some_masks):
    first, second, _ = prefilled(model)
    other = prefilled(model_pair(some_masks(WIDTHS, seed=1)).leank)[0]
    wider = prefilled(model_pair(some_masks(WIDTHS), recent=9).leank)[0]
    double = prefilled(copy.deepcopy(model).double())[0]
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
    ):
        with pytest.raises(ValueError, match=message):
            concatenate(caches)
    assert (first.get_seq_length(), second.get_seq_length(), pending.get_seq_length()) == (20, 33, 20)
    assert concatenate([first]).rows.lengths.tolist() == [20]


def test_pending_prompts_join_to_a_pending_padded_batch(model_pair, some_masks, assert_close):
    """What is deferred stays so: the joined cache is that of a batch prefilled with padding on the left."""
    model = model_pair(some_masks(WIDTHS), prune="deferred").leank
    mask = torch.stack([torch.arange(33) >= 33 - length for length in LENGTHS]).long()
    batch = torch.zeros(3, 33, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        batch[row, -length:] = ids(1, length, row)[0]
    with torch.no_grad():
        padded = model(batch, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))[CACHE]
    caches = prefilled(model)
    joined = concatenate(caches)
    assert all(cache.get_seq_length() == 0 and cache.layers[0].pending is None for cache in caches)
    assert joined.rows.is_pending and joined.get_seq_length() == 33
    assert joined.rows.padding.tolist() == mask.bool().tolist()
    for ours, theirs in zip(joined.layers, padded.layers, strict=True):
        for states, expected in zip(ours.pending, theirs.pending, strict=True):
            padding = mask[:, None, :, None] == 0
            assert not states.masked_select(padding).any()
            assert_close(model, states, expected.masked_fill(padding, 0))
    positions = torch.tensor(LENGTHS)[:, None]
    ours = decode(model, joined, positions, 10)
    assert joined.rows.lengths.tolist() == [length + 10 for length in LENGTHS]
    assert_close(model, ours, decode(model, padded, positions, 10))


def decoded(model, cache, steps=12):
    with torch.no_grad():
        return torch.cat([model(ids(1, 1, step), cache=cache).logits for step in range(steps)])


def states(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(2, heads, tokens, 16, generator=torch.Generator().manual_seed(seed))


def test_forks_share_a_prompt_and_go_their_own_ways(model, model_pair, some_masks):
    cache = model.build_cache("deferred")
    other = model_pair(some_masks(WIDTHS), sink=1, recent=4, flush=2).leank
    with torch.no_grad():
        model(ids(1, 30), cache=cache)
    forks = [fork(cache), fork(cache, sink_size=1, recent_size=4, flush_size=2)]
    for forked in forks:
        for ours, theirs in zip(forked.layers, cache.layers, strict=True):
            assert all(a is b for a, b in zip(ours.pending, theirs.pending, strict=True))
    for forked, alone in zip(forks, (model, other), strict=True):
        with torch.no_grad():
            expected = alone(ids(1, 30))[CACHE]
        assert torch.equal(decoded(model, forked), decoded(alone, expected))
    assert cache.rows.is_pending and (cache.rows.sink_size, cache.get_seq_length()) == (3, 30)


def test_forks_are_refused_where_they_make_no_sense(model):
    cache = model.build_cache("deferred")
    with torch.no_grad():
        model(ids(1, 30), cache=cache)
    for sizes, message in (
        ({"flush_size": 0}, "`flush_size` is 0, not an integer from 1 to 16777216"),
        ({"recent_size": -1}, "`recent_size` is -1"),
        ({"sink_size": 1.5}, "`sink_size` is 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            fork(cache, **sizes)
    decoded(model, cache, 1)
    with pytest.raises(ValueError, match="pruned already cannot be forked"):
        fork(cache)


@pytest.mark.parametrize("prune", ["eager", "deferred"])
def test_layers_are_filled_and_decoded_without_a_model(prune, model):
    """As the attention function fills and decodes them."""
    cache, expected = model.build_cache(prune), model.build_cache()
    keys, values, queries = states(31, 3, 0), states(31, 3, 1), states(31, 6, 2)
    attention = model.model.layers[0].self_attn
    for layer in range(2):
        fill_layer(cache, layer, keys[:, :, :30], values[:, :, :30])
    outputs = [
        decode_layer(cache, layer, *(t[:, :, 30:] for t in (queries, keys, values))) for layer in (0, 1)
    ]
    for part in (slice(0, 30), slice(30, 31)):
        for layer in range(2):
            handle, _ = expected.layers[layer].update(keys[:, :, part], values[:, :, part])
            out, _ = handle.attend(attention, queries[:, :, part], None)
            if part.start:
                assert torch.equal(outputs[layer], out.transpose(1, 2))
    assert cache.rows.lengths.tolist() == [31, 31] and cache.get_seq_length() == 31


def test_layers_are_filled_only_where_they_are_empty(model):
    cache, keys = model.build_cache(), states(30, 3, 0)
    with pytest.raises(ValueError, match="holds no pruned prompt"):
        decode_layer(cache, 0, states(1, 6, 0), keys[:, :, :1], keys[:, :, :1])
    fill_layer(cache, 0, keys, keys)
    with pytest.raises(ValueError, match="layer 0 holds 30 columns, only an empty one is filled"):
        fill_layer(cache, 0, keys, keys)
    with pytest.raises(ValueError, match="given 2 rows of 29 columns, another layer holds 2 of 30"):
        fill_layer(cache, 1, keys[:, :, 1:], keys[:, :, 1:])
    with pytest.raises(ValueError, match="is given one token at a time, here 2"):
        decode_layer(cache, 0, states(2, 6, 0), keys[:, :, :2], keys[:, :, :2])
    with pytest.raises(ValueError, match="heads"):
        fill_layer(model.build_cache(), 0, keys[:, :2], keys[:, :2])
