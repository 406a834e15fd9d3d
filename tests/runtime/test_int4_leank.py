"""The int4 cache: what is stored, and that all a cache does is what it does to keys and values so rounded.

The slow re-statement is an ordinary cache whose layers are handed numbers that were rounded before, by the
arithmetic by which `evaluate --also int4` measures what four bits lose.
"""

from __future__ import annotations

import pytest
import torch

from bin.baselines.int4 import assign_chunks
from bin.baselines.int4 import quantise as emulate
from runtime import layer_leank
from runtime.int4_leank import group_chunks, group_heads, quantise, widen
from tests.tiny_families import FAMILIES, OPTIONS
from tests.twin_caches import POOLS, Both, RoundedFirst, fed_apart, feed_joined, ids, restated

# Heads of 80 channels, in chunks of 16: groups of 32, of 16, of what is left, and lanes of padding.
WIDTHS = [[0, 7, 80], [16, 48, 33]]


def rounded(keys, values, masks):
    """What `[B, H_kv, S, D]` are rounded to where rows keep the channels of masks `[1 or B, H_kv, D]`."""
    masks = masks.expand(len(keys), -1, -1)
    return tuple(
        torch.cat([emulate(row[None], assign_chunks(mask)) for row, mask in zip(states, of, strict=True)])
        for states, of in ((keys, masks), (values, torch.ones_like(masks)))
    )


class InFourBits(RoundedFirst):
    """A layer of an ordinary cache that is handed what an int4 cache would give back."""

    def rounded(self, keys, values):
        return rounded(keys, values, self.channel_mask)


@pytest.fixture
def model(model_pair, some_masks):
    """A model whose keys differ much in size, in double: in single the order of sums shows, too."""
    made = model_pair(some_masks(WIDTHS, head_dim=80)).leank
    with torch.no_grad():
        for layer in made.model.layers:
            sizes = 2.0 ** torch.randint(-3, 3, (240, 1), generator=torch.Generator().manual_seed(1))
            layer.self_attn.k_proj.weight.mul_(sizes)
            layer.self_attn.v_proj.weight.mul_(sizes.flip(0))
    return made.double()


def twins(model, **kwargs):
    """An int4 cache, and the slow re-statement of one."""
    cache = model.build_cache(kv_dtype="int4", **kwargs)
    return [cache, restated(model.build_cache(kv_dtype="auto", **kwargs), InFourBits)]


def stored(cache):
    """What a cache of one row reads of its first tokens, by layer and pool."""
    return [
        [layer.store.tensors.read(name, lambda pool: pool[:1, :, :3]) for name in POOLS]
        for layer in cache.pruned_layers
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "chunk_size"), [(128, 32), (80, 16), (12, 2), (6, 1)])
def test_numbers_are_rounded_as_evaluate_rounds_them(dtype, head_dim, chunk_size):
    generator = torch.Generator().manual_seed(0)
    states = (torch.randn(3, 70, 2, head_dim, generator=generator) * 5).to(dtype)
    states[0, :6] = 0
    states[0, 6:9] = 1.7
    states[1, 3, 0, 1], states[1, 4, 0, 1], states[1, 5, 1, 0] = torch.nan, torch.inf, -torch.inf
    states[2, 7] = 0
    states[2, 7, 0, 0] = torch.finfo(dtype).tiny
    # Least steps are rounded most: to 1 in the place of 1.4, and to 0.
    states[2, 8:10] = 0
    states[2, 8, 0, 0] = 21 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    states[2, 9, 0, 0] = 5 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    if dtype == torch.float16:  # its ends lie 15 steps apart, which are rounded to more
        states[2, 10, 0, :2] = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max])
    expected = emulate(states.transpose(1, 2), assign_chunks(torch.ones(2, head_dim, dtype=torch.bool)))
    num_chunks = head_dim // chunk_size
    chunks = states.reshape(3, 70, 2 * num_chunks, chunk_size)
    for given, groups in (
        (states, group_heads(2, head_dim, torch.device("cpu"))),
        (chunks, group_chunks([num_chunks] * 2, chunk_size, torch.device("cpu"))),
    ):
        codes, extremes = (part.flatten(0, 1) for part in quantise(given, groups))
        assert codes.dtype == torch.uint8 and codes.shape[-1] == -(-given.shape[-1] // 2)
        assert extremes.dtype == dtype and extremes.shape[1:] == (2 * -(-head_dim // 32), 2)
        read = widen(codes, extremes, groups).view(states.shape).transpose(1, 2)
        assert torch.equal(read.isnan(), expected.isnan())
        assert torch.equal(read.nan_to_num(9), expected.nan_to_num(9))
    assert int(expected.isnan().sum()) == 3 * min(head_dim, 32) and not expected.isinf().any()
    assert torch.equal(expected[0, :, :9], states.transpose(1, 2)[0, :, :9])


def test_what_is_in_double_is_rounded_as_in_single():
    states = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    groups = group_heads(4, 64, torch.device("cpu"))
    single, double = (
        widen(*quantise(states.to(of), groups), groups) for of in (torch.float32, torch.float64)
    )
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single)


def test_what_is_stored_of_a_prompt_and_of_later_tokens_is_bit_for_bit_the_same(model):
    caches = twins(model)
    both = Both(model, caches, 1)
    for count in (2, 1):
        both.feed(count)
        for ours, slow in zip(*map(stored, caches), strict=True):
            assert all(map(torch.equal, ours[1::2], slow[1::2]))
    # Lanes of padding are no numbers of a head's.
    for layer, ours, slow in zip(caches[0].layers, *map(stored, caches), strict=True):
        parts = layer.store.chunk_index[0].split([ours[0].shape[1], ours[2].shape[1]])
        for lanes, one, other in zip(parts, ours[::2], slow[::2], strict=True):
            real = (lanes >= 0)[:, None].expand_as(one[0])
            assert torch.equal(one[0][real], other[0][real])


def test_decoding_turns_and_drafts_are_those_of_rounded_keys_and_values(model):
    Both(model, twins(model), 3).take_turns()


def test_rows_that_move_take_their_numbers_along(model):
    Both(model, twins(model, prune="deferred"), 2).move_rows()


@pytest.mark.parametrize("prune", ["eager", "deferred"])
def test_rows_of_several_caches_become_one(model, prune):
    ours, slow = fed_apart(model, lambda: twins(model, prune=prune))
    feed_joined(
        model, [type(ours[0]).concatenate(ours), restated(type(slow[0]).concatenate(slow), InFourBits)]
    )


def test_rows_with_channels_of_their_own_and_a_fork(model, some_masks):
    caches = twins(model, prune="deferred")
    per_row = torch.stack([some_masks(WIDTHS, head_dim=80, seed=seed) for seed in (3, 4)], dim=1)
    for cache in caches:
        with torch.no_grad():
            model(ids(2, 60), past_key_values=cache)
    both = Both(model, [cache.fork(recent_size=2) for cache in caches], 2)
    for cache in both.caches:
        for layer, masks in zip(cache.layers, per_row, strict=True):
            layer.set_channel_mask(masks)
    both.mask = torch.ones(2, 60, dtype=torch.long)
    for count in (1, 3, 1):
        both.feed(count)
    both.each("reorder_cache", torch.tensor([1, 1]))
    both.feed(1)


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generate_decodes_from_an_int4_cache(model, kwargs):
    prompt, mask = ids(1 if "prompt_lookup_num_tokens" in kwargs else 2, 50), None
    if len(prompt) == 2:
        mask = torch.ones_like(prompt)
        mask[1, :30] = 0
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20, "attention_mask": mask, **kwargs}
    ours, slow = twins(model)
    expected = model.generate(prompt, past_key_values=slow, kv_dtype="auto", **options)
    assert torch.equal(model.generate(prompt, kv_dtype="int4", **options), expected)
    assert torch.equal(model.generate(prompt, past_key_values=ours, **options), expected)


def test_what_is_not_finite_stays_in_its_row_and_padding_disturbs_no_other(model):
    caches = [model.build_cache(kv_dtype="int4") for _ in range(2)]
    states = [torch.randn(2, 3, 90, 80, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    outputs = []
    for cache, broken in zip(caches, (None, torch.nan), strict=True):
        keys, values = states[0].clone(), states[1].clone()
        if broken is not None:
            keys[1, :, 5], values[1, :, 6] = broken, torch.inf
        cache.fill_layer(0, keys, values)
        new = [x[:, :, :1] for x in states]
        outputs.append(cache.decode_layer(0, new[2].repeat_interleave(2, 1), *new[:2]))
    assert torch.equal(outputs[0][0], outputs[1][0]) and outputs[1][1].isnan().any()
    cache = model.build_cache(kv_dtype="int4")
    mask = torch.ones(2, 41, dtype=torch.long)
    mask[1, :40] = 0
    with torch.no_grad():
        model(ids(2, 40), attention_mask=mask[:, :40], past_key_values=cache)
        logits = model(ids(2, 1), attention_mask=mask, past_key_values=cache).logits
    assert logits.isfinite().all()


def test_a_token_takes_five_bits_for_every_number_of_half_precision(model_pair, some_masks):
    model = model_pair(some_masks([[32, 64], [0, 128]], head_dim=128)).leank.to(torch.bfloat16)
    memories = []
    for length in (640, 1280):
        cache = model.build_cache(kv_dtype="int4")
        cache.reserve(length)
        with torch.no_grad():
            model(ids(1, length), past_key_values=cache)
        memories.append(cache.memory())
    numbers = (32 + 64 + 128) + 3 * 128
    for kind in ("used", "allocated"):
        grown = [getattr(memory.total, kind) for memory in memories]
        assert grown[1] - grown[0] == 640 * numbers * 5 // 8


def test_channels_in_chunks_of_16_take_what_evaluate_counts(model):
    model = model.to(torch.bfloat16)
    cache = model.build_cache(kv_dtype="int4")
    with torch.no_grad():
        model(ids(1, 200), past_key_values=cache)
    memory, groups = cache.memory(), 4 + (1 + 2 + 2) + 5 * 3
    pruned_region = memory.kept_keys + memory.kept_values
    assert pruned_region.used == 200 * ((7 + 80 + 16 + 48 + 33 + 5 * 80) / 2 + groups * 4)


def test_where_kernels_serve_the_other_caches_plain_torch_serves_this_one(model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        layer_leank, "find_kernels", lambda *args, **kwargs: asked.append(kwargs["cache_dtype"])
    )
    both = Both(model, twins(model), 1)
    for count in (40, 1, 3):
        both.feed(count)
    assert torch.uint8 in asked and both.caches[0].graph.num_captures == 0


def test_the_config_chooses_and_a_cache_that_holds_tokens_stays_as_it_is(model):
    model.config.leank = {**model.config.leank, "kv_dtype": "int4"}
    cache = model.build_cache()
    model.generate(ids(1, 9), past_key_values=cache, max_new_tokens=2, pad_token_id=0)
    assert cache.kv_dtype == "int4" and cache.layers[0].store.kept_keys.dtype == torch.uint8
    with pytest.raises(ValueError, match=r"^the cache stores `int4` and holds tokens already, it cannot"):
        model.generate(ids(1, 20), past_key_values=cache, kv_dtype="fp8")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_decodes_from_an_int4_cache(architecture, model_pair, some_masks):
    options = OPTIONS.get(architecture.model_type, {})
    model = model_pair(some_masks([[0, 3, 16], [4, 8, 8]]), architecture.stem, **options).leank
    both = Both(model, twins(model), 2)
    for count, padding in ((40, (0, 13)), (1, None), (1, None), (5, (0, 2)), (1, None)):
        both.feed(count, padding)
