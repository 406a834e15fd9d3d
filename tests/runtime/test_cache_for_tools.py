"""What tools do with a cache: fork a prefill, fill and decode one layer without a model."""

from __future__ import annotations

import pytest
import torch

WIDTHS = [[0, 3, 16], [4, 8, 8]]


@pytest.fixture
def model(model_pair, some_masks):
    return model_pair(some_masks(WIDTHS)).leank


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(seed))


def decoded(model, cache, steps=12):
    with torch.no_grad():
        return torch.cat([model(ids(1, step), past_key_values=cache).logits for step in range(steps)])


def states(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(2, heads, tokens, 16, generator=torch.Generator().manual_seed(seed))


def test_forks_share_a_prompt_and_go_their_own_ways(model, model_pair, some_masks):
    cache = model.build_cache("deferred")
    other = model_pair(some_masks(WIDTHS), sink=1, recent=4, flush=2).leank
    with torch.no_grad():
        model(ids(30), past_key_values=cache)
    forks = [cache.fork(), cache.fork(sink_size=1, recent_size=4, flush_size=2)]
    for fork in forks:
        for ours, theirs in zip(fork.layers, cache.layers, strict=True):
            assert all(a is b for a, b in zip(ours.pending, theirs.pending, strict=True))
    for fork, alone in zip(forks, (model, other), strict=True):
        with torch.no_grad():
            expected = alone(ids(30)).past_key_values
        assert torch.equal(decoded(model, fork), decoded(alone, expected))
    assert cache.rows.is_pending and (cache.rows.sink_size, cache.get_seq_length()) == (3, 30)


def test_a_fork_has_masks_of_its_own(model, some_masks):
    cache = model.build_cache("deferred")
    with torch.no_grad():
        model(ids(30), past_key_values=cache)
    fork = cache.fork()
    for layer, mask in zip(fork.layers, some_masks([[16, 16, 16]] * 2), strict=True):
        layer.set_channel_mask(mask)
    assert cache.layers[0].layout.widths == (0, 3, 16) and fork.layers[0].layout.widths == (16, 16, 16)


def test_forks_are_refused_where_they_make_no_sense(model):
    cache = model.build_cache("deferred")
    with torch.no_grad():
        model(ids(30), past_key_values=cache)
    for sizes, message in (
        ({"flush_size": 0}, "`flush_size` is 0, not an integer of at least 1"),
        ({"recent_size": -1}, "`recent_size` is -1"),
        ({"sink_size": 1.5}, "`sink_size` is 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.fork(**sizes)
    decoded(model, cache, 1)
    with pytest.raises(ValueError, match="pruned already cannot be forked"):
        cache.fork()


@pytest.mark.parametrize("prune", ["eager", "deferred"])
def test_layers_are_filled_and_decoded_without_a_model(prune, model):
    """As the attention function fills and decodes them."""
    cache, expected = model.build_cache(prune), model.build_cache()
    keys, values, queries = states(31, 3, 0), states(31, 3, 1), states(31, 6, 2)
    attention = model.model.layers[0].self_attn
    for layer in range(2):
        cache.fill_layer(layer, keys[:, :, :30], values[:, :, :30])
    outputs = [
        cache.decode_layer(layer, *(t[:, :, 30:] for t in (queries, keys, values))) for layer in (0, 1)
    ]
    for part in (slice(0, 30), slice(30, 31)):
        for layer in range(2):
            handle, _ = expected.layers[layer].update(keys[:, :, part], values[:, :, part])
            out, _ = handle.attend(attention, queries[:, :, part], None)
            if part.start:
                assert torch.equal(outputs[layer], out.transpose(1, 2))
    assert cache.rows.lengths.tolist() == [31, 31] and cache.get_seq_length() == 31
    for layer in range(2):
        for _ in range(2):
            assert torch.equal(cache.attend_layer(layer, queries[:, :, 30:]), outputs[layer])
    assert cache.rows.attended(keys.device) is cache.rows.attended(keys.device)
    assert cache.rows.lengths.tolist() == [31, 31] and cache.get_seq_length() == 31


def test_what_a_filled_layer_attends_to_follows_the_cache(model):
    cache = model.build_cache()
    keys, query = states(30, 3, 0), states(1, 6, 2)
    cache.fill_layer(0, keys, keys)
    before = cache.attend_layer(0, query, 0.5)
    out = cache.decode_layer(0, query, keys[:, :, :1], keys[:, :, :1], 0.5)
    assert not torch.equal(before, out) and torch.equal(out, cache.attend_layer(0, query, 0.5))


def test_layers_are_filled_only_where_they_are_empty(model):
    cache, keys = model.build_cache(), states(30, 3, 0)
    with pytest.raises(ValueError, match="holds no pruned prompt"):
        cache.decode_layer(0, states(1, 6, 0), keys[:, :, :1], keys[:, :, :1])
    cache.fill_layer(0, keys, keys)
    with pytest.raises(ValueError, match="layer 0 holds 30 columns, only an empty one is filled"):
        cache.fill_layer(0, keys, keys)
    with pytest.raises(ValueError, match="given 2 rows of 29 columns, another layer holds 2 of 30"):
        cache.fill_layer(1, keys[:, :, 1:], keys[:, :, 1:])
    with pytest.raises(ValueError, match="is given one token at a time, here 2"):
        cache.decode_layer(0, states(2, 6, 0), keys[:, :, :2], keys[:, :, :2])
    with pytest.raises(ValueError, match="heads"):
        model.build_cache().fill_layer(0, keys[:, :2], keys[:, :2])
