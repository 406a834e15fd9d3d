"""The mean of keys: it comes off every key alike, so attention does not see it, and rounding sees less."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.constants_leank import Constants, choose_constants
from tests.tiny_families import FAMILIES, OPTIONS
from tests.twin_caches import Both, RoundedFirst, fed_apart, feed_joined, ids, restated

WIDTHS = [[0, 3, 16], [4, 8, 8]]


def centred(model, size=4.0, seed=3):
    """Give a model's checkpoint a mean of keys, as large as `size` times a random number."""
    layers = model.build_cache().pruned_layers
    generator = torch.Generator().manual_seed(seed)
    model.key_means = [torch.randn(layer.model_mask.shape, generator=generator) * size for layer in layers]
    model.config.leank = {**model.config.leank, "key_mean": True}
    return model


@pytest.fixture
def model(model_pair, some_masks):
    return centred(model_pair(some_masks(WIDTHS)).leank)


def twins(model, **kwargs):
    """A cache that centres keys, and one that is handed centred ones."""
    return [model.build_cache(**kwargs), restated(model.build_cache(**kwargs), RoundedFirst)]


def test_decoding_turns_and_drafts_are_those_of_centred_keys(model):
    Both(model, twins(model), 3).take_turns()


def test_rows_that_move_and_rows_that_join_stay_centred(model):
    Both(model, twins(model, prune="deferred"), 2).move_rows()
    ours, slow = fed_apart(model, lambda: twins(model))
    feed_joined(
        model, [type(ours[0]).concatenate(ours), restated(type(slow[0]).concatenate(slow), RoundedFirst)]
    )


def test_captured_steps_and_drafts_by_kernels_store_centred_keys(graphs, model):
    both = Both(model.double(), twins(model), 2)
    for count, padding in (
        (60, (0, 23)),
        *[(1, None)] * 40,
        (4, (0, 2)),
        (3, None),
        (40, (0, 30)),
        (1, None),
    ):
        both.feed(count, padding)
    assert both.caches[0].graph.num_replays > 30


@pytest.mark.parametrize("architecture", FAMILIES)
def test_with_all_channels_kept_no_mean_changes_an_answer(architecture, model_pair, some_masks):
    pair = model_pair(
        some_masks([[16] * 3] * 2), architecture.stem, **OPTIONS.get(architecture.model_type, {})
    )
    generator = torch.Generator().manual_seed(1)
    for ours, dense in zip(pair.leank.modules(), pair.dense.modules(), strict=True):
        if getattr(getattr(dense, "k_proj", None), "bias", None) is not None:  # as Qwen2's and GPT-OSS' are
            bias = torch.randn(dense.k_proj.bias.shape, generator=generator) * 20
            with torch.no_grad():
                ours.k_proj.bias.copy_(bias)
                dense.k_proj.bias.copy_(bias)
    leank, dense = centred(pair.leank.double()), pair.dense.double()
    prompt, mask = ids(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :25] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, "output_logits": True}
    options["return_dict_in_generate"] = True
    answers = [model.generate(prompt, **options) for model in (leank, dense)]
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    torch.testing.assert_close(*(torch.stack(answer.logits) for answer in answers), rtol=1e-7, atol=1e-7)
    # A turn, which attends by another way than a token.
    turn = torch.cat([answers[0].sequences, ids(2, 40, seed=5)], 1)
    options["attention_mask"] = torch.cat([mask, torch.ones(2, turn.shape[1] - 60, dtype=torch.long)], 1)
    ours, expected = (
        model.generate(turn, past_key_values=answer.past_key_values, **options)
        for model, answer in zip((leank, dense), answers, strict=True)
    )
    torch.testing.assert_close(*(torch.stack(x.logits) for x in (ours, expected)), rtol=1e-7, atol=1e-7)


def test_a_dropped_channel_counts_as_its_mean(model_pair, some_masks):
    """Keys that are their mean in all that is dropped lose nothing, whatever is pruned."""
    model = model_pair(some_masks(WIDTHS)).leank
    means = [torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    caches = [model.build_cache() for _ in range(2)]
    outputs = []
    for cache, keeps_all in zip(caches, (False, True), strict=True):
        layer = cache.layers[1]
        layer.model_constants = Constants(means[1])
        mask = layer.model_mask[0]
        if keeps_all:
            layer.set_channel_mask(torch.ones_like(mask))
        states = [torch.randn(2, 3, 91, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        keys = torch.where(mask[:, None], states[0], means[1][0][:, None])
        query = states[2][:, :, 90:].repeat_interleave(2, 1)
        cache.fill_layer(1, keys[:, :, :90], states[1][:, :, :90])
        outputs.append(cache.decode_layer(1, query, keys[:, :, 90:], states[1][:, :, 90:]))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
def test_large_constants_of_slow_pairs_cost_a_rounded_cache_little(kv_dtype, model_pair):
    """As in Qwen2.5, whose biases leave channels of keys far larger than they vary."""
    losses = []
    for size in (0.0, 150.0):
        model = model_pair(
            torch.ones(2, 2, 32, dtype=torch.bool),
            "Qwen2",
            groups=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ).leank
        with torch.no_grad():
            for layer in model.model.layers:
                bias = layer.self_attn.k_proj.bias.view(2, 2, 16)
                bias.zero_()
                bias[:, 0, -3:], bias[:, 1, -3:] = size, -size
        prompt, answer = ids(4, 360), ids(4, 24, seed=1)
        logits = []
        for cache in (model.build_cache(kv_dtype="auto"), model.build_cache(kv_dtype=kv_dtype)):
            with torch.no_grad():
                model(prompt, past_key_values=cache)
                logits.append(
                    torch.cat([model(token, past_key_values=cache).logits for token in answer.split(1, 1)], 1)
                )
        exact, rounded = (x.double().log_softmax(-1) for x in logits)
        losses.append(float((exact.exp() * (exact - rounded)).sum(-1).mean()))
    assert 0 < losses[1] <= 2 * losses[0]


def test_a_rows_own_mean_is_that_of_its_real_tokens():
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 2, 50, 8, generator=generator) * 3 + 40 for _ in range(2))
    real = torch.ones(3, 50, dtype=torch.bool)
    real[1, :30], real[2] = False, False
    hidden = ~real[:, None, :, None]
    given = keys.masked_fill(hidden, torch.nan), values.masked_fill(hidden, torch.nan)
    for kv_dtype in ("int4", "fp8"):
        found = choose_constants(*given, real, kv_dtype, Constants())
        assert found.key_mean is not None
        torch.testing.assert_close(found.key_mean[0], keys[0].mean(1))
        torch.testing.assert_close(found.key_mean[1], keys[1, :, 30:].mean(1))
        # A row of padding alone has what the others have together.
        torch.testing.assert_close(found.key_mean[2], torch.cat([keys[0], keys[1, :, 30:]], 1).mean(1))
    alone = choose_constants(keys[:1], values[:1], None, "fp8", Constants())
    assert torch.equal(found.key_scale[:1], alone.key_scale)
    largest = (keys[0] - found.key_mean[0][:, None]).abs().amax(1)
    paired = torch.maximum(largest[:, :4], largest[:, 4:])
    expected = [[2.0 ** math.ceil(math.log2(2 * x / 448)) for x in row] for row in paired.tolist()]
    assert found.key_scale[0, :, :4].tolist() == expected
    assert torch.equal(found.key_scale[2], torch.maximum(found.key_scale[0], found.key_scale[1]))
    keys[0, 1, 3, 2] = torch.inf
    broken = choose_constants(keys, values, None, "int4", Constants()).key_mean
    assert broken[0, 1, 2] == 0 and broken.isfinite().all()
    # The model's stands where it has one, and nothing is looked for where nothing is rounded.
    assert choose_constants(keys, values, None, "auto", Constants()) == Constants()
    own = torch.ones(1, 2, 8)
    assert choose_constants(keys, values, None, "int4", Constants(own)).key_mean is own


def test_a_cache_without_the_mean_that_the_config_speaks_of_is_refused(model):
    model.key_means = None
    with pytest.raises(ValueError, match=r"^this model was made from its config alone, and the mean of"):
        model.build_cache()
    model.config.leank = {**model.config.leank, "key_mean": 3}
    with pytest.raises(ValueError, match=r"^config.json: `leank.key_mean` is 3, not true or false$"):
        model.build_cache()
