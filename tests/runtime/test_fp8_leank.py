"""The FP8 cache: what is stored, and that all a cache does is what it does to keys and values so rounded.

The slow re-statement is an ordinary cache whose layers are handed numbers that were rounded before.
"""

from __future__ import annotations

import math

import pytest
import torch

from runtime import graph_leank
from runtime.configuration_leank import read_settings
from runtime.fp8_leank import FP8, SCALE_NAMES, quantise, scale_of
from tests.tiny_families import FAMILIES, OPTIONS
from tests.twin_caches import Both, RoundedFirst, fed_apart, feed_joined, ids, restated

WIDTHS = [[0, 3, 16], [4, 8, 8]]
# All numbers that e4m3 has, by the definition of its bits.
NUMBERS = sorted(
    {0.0}
    | {
        (8 * (exponent > 0) + fraction) * 2.0 ** (max(exponent, 1) - 10)
        for exponent in range(16)
        for fraction in range(8)
        if (exponent, fraction) != (15, 7)
    }
)


def rounded(numbers, scale):
    """Clamp and round to the nearest number of e4m3, of two as near to the one whose last bit is 0."""
    magnitude = (numbers.double() / scale.double()).abs().clamp(max=448)
    table = torch.tensor(NUMBERS, dtype=torch.float64)
    above = torch.searchsorted(table, magnitude.contiguous()).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    over, under = table[above] - magnitude, magnitude - table[below]
    place = torch.where((over < under) | ((over == under) & (above % 2 == 0)), above, below)
    nearest = torch.where(numbers.isnan(), torch.nan, table[place])
    return (nearest.copysign(numbers.double()) * scale.double()).to(numbers.dtype)


def slow_scales(keys, values, real):
    """Scales of every row, number by number; the second half of a key's channels turns with the first."""
    rows, heads, _, head_dim = keys.shape
    found = []
    for states, paired in ((keys, True), (values, False)):
        scale = torch.ones(rows, heads, head_dim)
        for row in range(rows):
            # A row of padding alone takes the other rows' scales.
            given = [row] if real[row].any() else [other for other in range(rows) if real[other].any()]
            tokens = torch.cat([states[other][:, real[other]] for other in given], 1)
            largest = tokens.abs().amax(1).tolist()
            for head in range(heads):
                for channel in range(head_dim):
                    both = {channel, (channel + head_dim // 2) % head_dim} if paired else {channel}
                    most = max(largest[head][number] for number in both)
                    if most > 0:
                        scale[row, head, channel] = 2.0 ** math.ceil(math.log2(2 * most / 448))
        found.append(scale)
    return found


class InEightBits(RoundedFirst):
    """A layer of an ordinary cache that is handed what an FP8 cache would give back."""

    static = None

    def prepare(self, keys, values, real):
        own = slow_scales(keys, values, real)
        self.slow = own if self.static is None else [s.expand(len(keys), -1, -1) for s in self.static]

    def rounded(self, keys, values):
        return tuple(
            rounded(states, s[:, :, None]) for states, s in zip((keys, values), self.slow, strict=True)
        )

    def select(self, rows):
        if self.store is not None:
            self.slow = [scale[rows] for scale in self.slow]
        super().select(rows)


@pytest.fixture(params=["dynamic", "static", "centred"])
def model(request, model_pair, some_masks):
    """A model whose keys differ much in size; its checkpoint has scales, or has not, or has a mean too."""
    made = model_pair(some_masks(WIDTHS)).leank
    with torch.no_grad():
        for layer in made.model.layers:
            sizes = 2.0 ** torch.randint(-6, 7, (48, 1), generator=torch.Generator().manual_seed(1))
            layer.self_attn.k_proj.weight.mul_(sizes)
            layer.self_attn.v_proj.weight.mul_(sizes.flip(0))
    if request.param != "dynamic":
        block = {**made.config.leank, "kv_dtype": "fp8", "kv_scales": {"num_tokens": 1}}
        made.config.leank = block
        generator = torch.Generator().manual_seed(2)
        if request.param == "centred":
            made.config.leank = {**block, "key_mean": True}
            made.key_means = [torch.randn(1, 3, 16, generator=generator) for _ in made.model.layers]
        for layer in made.model.layers:
            for name in SCALE_NAMES:
                scale = 2.0 ** torch.randint(-9, 1, (3, 16), generator=generator)
                layer.self_attn.register_buffer(name, scale)
    return made


def twins(model, **kwargs):
    """An FP8 cache, and the slow re-statement of one."""
    cache = model.build_cache(kv_dtype="fp8", **kwargs)
    slow = restated(model.build_cache(kv_dtype="auto", **kwargs), InEightBits)
    for layer in slow.pruned_layers:
        attention = model.model.layers[layer.layer_idx]
        if hasattr(attention.self_attn, "key_scale"):
            layer.static = [getattr(attention.self_attn, name)[None] for name in SCALE_NAMES]
            layer.takes_mean = False
    return [cache, slow]


def test_what_is_stored_is_clamped_and_rounded_to_the_nearest_even():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor(NUMBERS)
    ties = (numbers[1:] + numbers[:-1]) / 2
    random = torch.randn(4000, generator=generator) * 2.0 ** torch.randint(
        -12, 12, (4000,), generator=generator
    )
    edges = torch.tensor([0.0, 448, 449, 464, 1e9, torch.inf, torch.nan, 2**-10, 2**-11, 1e-30])
    positive = torch.cat([numbers, ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0), random, edges])
    for states in (positive, -positive):
        for scale in (2.0**-14, 0.25, 1.0, 2.0**15):
            exact = torch.tensor(scale)
            read = quantise(states * exact, exact).float() * exact
            assert torch.equal(read.nan_to_num(9e9), rounded(states * exact, exact).nan_to_num(9e9))


def test_scales_leave_room_for_numbers_twice_as_large():
    largest = torch.tensor([224.0, 224.001, 223.9, 1.75, 1.76, 0.0, 1e-30, 3e38, torch.inf, torch.nan])
    expected = [1, 2, 1, 2**-7, 2**-6, 1, 2**-14, 2**15, 1, 1]
    assert scale_of(largest).tolist() == expected


def test_decoding_turns_and_drafts_are_those_of_rounded_keys_and_values(model):
    Both(model, twins(model), 3).take_turns()


def test_rows_that_move_take_their_scales_along(model):
    Both(model, twins(model, prune="deferred"), 2).move_rows()


@pytest.mark.parametrize("prune", ["eager", "deferred"])
def test_rows_of_several_caches_keep_their_scales(model, prune):
    ours, slow = fed_apart(model, lambda: twins(model, prune=prune))
    slow_parts = [[layer.slow for layer in cache.layers] for cache in slow]
    joined = restated(type(slow[0]).concatenate(slow), InEightBits)
    for number, layer in enumerate(joined.layers):
        layer.slow = [torch.cat(scales) for scales in zip(*(p[number] for p in slow_parts), strict=True)]
    feed_joined(model, [type(ours[0]).concatenate(ours), joined])


def test_a_fork_and_a_layer_filled_by_hand_store_fp8(model):
    caches = twins(model, prune="deferred")
    for cache in caches:
        with torch.no_grad():
            model(ids(2, 60), past_key_values=cache)
    forks = [cache.fork(recent_size=2) for cache in caches]
    both = Both(model, forks, 2)
    both.mask = torch.ones(2, 60, dtype=torch.long)
    both.feed(1)

    states = [torch.randn(2, 3, 77, 16, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    outputs = []
    for cache in twins(model):
        cache.fill_layer(0, *states[:2])
        new = [x[:, :, :1] for x in states[1:]]
        outputs.append(cache.decode_layer(0, new[0].repeat_interleave(2, 1), *new[1:]))
        outputs.append(cache.attend_layer(0, new[1].repeat_interleave(2, 1)))
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])


def test_a_row_of_padding_alone_disturbs_no_other(model):
    cache = model.build_cache(kv_dtype="fp8")
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1] = 0
    with torch.no_grad():
        model(ids(2, 40), attention_mask=mask, past_key_values=cache)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        logits = model(ids(2, 1), attention_mask=mask, past_key_values=cache).logits
    assert logits.isfinite().all()


def test_a_row_whose_padding_fills_the_first_chunk_has_scales_of_the_others(model):
    both = Both(model, twins(model), 3)
    for count, padding in ((40, (0, 40, 7)), (40, (0, 20, 0)), (1, None), (5, (0, 2, 4)), (1, None)):
        both.feed(count, padding)
    if not read_settings(model.config).has_scales:
        for layer in both.caches[0].layers:
            for scale in layer.store.constants[1:]:
                assert torch.equal(scale[1], torch.maximum(scale[0], scale[2]))


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generate_decodes_from_an_fp8_cache(model, kwargs):
    prompt, mask = ids(1 if "prompt_lookup_num_tokens" in kwargs else 2, 50), None
    if len(prompt) == 2:
        mask = torch.ones_like(prompt)
        mask[1, :30] = 0
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20, "attention_mask": mask, **kwargs}
    ours, slow = twins(model)
    expected = model.generate(prompt, past_key_values=slow, kv_dtype="auto", **options)
    assert torch.equal(model.generate(prompt, kv_dtype="fp8", **options), expected)
    assert torch.equal(model.generate(prompt, past_key_values=ours, **options), expected)
    if "prompt_lookup_num_tokens" in kwargs:
        return
    turn = torch.cat([expected, ids(len(prompt), 7)], 1)
    if mask is not None:
        options["attention_mask"] = torch.cat([mask, torch.ones(2, turn.shape[1] - 50, dtype=torch.long)], 1)
    answers = [model.generate(turn, past_key_values=cache, **options) for cache in (ours, slow)]
    assert torch.equal(*answers)


def test_the_config_the_generation_config_and_arguments_choose(model):
    is_static = read_settings(model.config).has_scales
    assert model.build_cache().kv_dtype == ("fp8" if is_static else "auto")
    model.generation_config.kv_dtype = "auto" if is_static else "fp8"
    cache = model.build_cache()
    model.generate(ids(1, 9), past_key_values=cache, max_new_tokens=2, pad_token_id=0)
    assert cache.kv_dtype == model.generation_config.kv_dtype
    assert (cache.layers[0].store.kept_keys.dtype == FP8) is not is_static
    with pytest.raises(
        ValueError, match=r"^the cache stores `\w+` and holds tokens already, it cannot change"
    ):
        model.generate(ids(1, 20), past_key_values=cache, kv_dtype="fp8" if is_static else "auto")


def test_what_is_no_dtype_or_does_not_go_together_is_refused(model):
    for refused in (
        lambda: model.build_cache(kv_dtype="int3"),
        lambda: model.generate(ids(1, 3), kv_dtype="int3"),
        lambda: type(model.config)(
            **{**model.config.to_dict(), "leank": {**model.config.leank, "kv_dtype": "int3"}}
        ),
    ):
        with pytest.raises(ValueError, match=r"kv_dtype` is 'int3', not one of `auto`, `fp8`, `int4`$"):
            refused()
    caches = [model.build_cache(kv_dtype=kv_dtype) for kv_dtype in ("fp8", "auto")]
    for cache in caches:
        with torch.no_grad():
            model(ids(1, 9), past_key_values=cache)
    with pytest.raises(ValueError, match=r"^cache 1 has kv_dtype auto, cache 0 has fp8$"):
        type(cache).concatenate(caches)


@pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 2.0**-15, 2.0**16, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("model", ["static"], indirect=True)
def test_scales_that_are_no_powers_of_two_are_refused(model, value):
    model.model.layers[1].self_attn.value_scale[2, 5] = value
    with pytest.raises(ValueError, match=rf"^layer 1: `value_scale` holds {value}, which is no power of two"):
        model.build_cache()


@pytest.mark.parametrize("model", ["static"], indirect=True)
def test_scales_that_are_offloaded_are_refused(model):
    model.model.layers[1].self_attn.to("meta")  # as accelerate leaves them with `offload_buffers`
    with pytest.raises(ValueError, match=r"^layer 1: `key_scale` is offloaded and cannot be read; load"):
        model.build_cache()


def test_a_token_takes_half_of_what_it_takes_in_half_precision(model):
    model = model.to(torch.bfloat16)
    sizes = {}
    for kv_dtype in ("fp8", "auto"):
        memories = []
        for length in (640, 1280):
            cache = model.build_cache(kv_dtype=kv_dtype)
            cache.reserve(length)
            with torch.no_grad():
                model(ids(1, length), past_key_values=cache)
            memories.append(cache.memory())
        sizes[kv_dtype] = memories[1].total.allocated - memories[0].total.allocated
        dense = [memory.dense_keys + memory.dense_values for memory in memories]
        assert dense[1] - dense[0] == 640 * 2 * 3 * 16 * 2 * 2
    assert 2 * sizes["fp8"] == sizes["auto"]


def test_captured_steps_and_drafts_by_kernels_are_those_of_rounded_keys_and_values(
    graphs, model, monkeypatch
):
    # In double precision and as the stock class computes, or keys that nearly agree are rounded apart now and
    # then.
    model = model.double()
    monkeypatch.setattr(graph_leank, "fuse_weights", lambda *_: False)
    both = Both(model, twins(model), 2)
    for count, padding in (
        (60, (0, 23)),
        *[(1, None)] * 30,
        (4, (0, 2)),
        (4, None),
        (3, None),
        (40, (0, 30)),
    ):
        both.feed(count, padding)
    both.each("reorder_cache", torch.tensor([1, 0]))
    both.mask = both.mask.flip(0)
    for _ in range(70):
        both.feed(1)
    assert both.caches[0].graph.num_replays > 80 and both.caches[0].graph.num_captures > 2


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_decodes_from_an_fp8_cache(architecture, model_pair, some_masks):
    options = OPTIONS.get(architecture.model_type, {})
    model = model_pair(some_masks(WIDTHS), architecture.stem, **options).leank
    both = Both(model, twins(model), 2)
    for count, padding in ((40, (0, 13)), (1, None), (1, None), (5, (0, 2)), (1, None)):
        both.feed(count, padding)
