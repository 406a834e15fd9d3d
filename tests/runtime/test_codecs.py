"""Caches that centre or round: all that one does is what it does to keys and values so centred and rounded.

The slow re-statement is an ordinary cache whose layers are handed numbers that were changed before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bin.baselines.int4 import assign_chunks
from bin.baselines.int4 import quantise as emulate
from leank_convert._runtime.configuration_leank import CACHE
from runtime import graph_leank, layer_leank
from runtime.constants_leank import Constants
from runtime.fp8_leank import SCALE_NAMES
from runtime.tools import concatenate, decode_layer, fill_layer, fork
from tests.runtime.tiny_inputs import WIDTHS
from tests.tiny_families import OPTIONS, some_families
from tests.twin_caches import (
    POOLS,
    Both,
    RoundedFirst,
    fed_apart,
    feed_joined,
    ids,
    in_eight_bits,
    restated,
)

# Heads of 80 channels, in chunks of 16: groups of 32, of 16, of what is left, and lanes of padding.
INT4_WIDTHS = [[0, 7, 80], [16, 48, 33]]
# Families whose attention differs in what a codec meets: biases, sinks, and layers beside pruned ones.
FAMILIES = some_families("llama", "qwen2", "phi3", "gpt_oss", "gemma3_text", "qwen3_next")


def slow_scales(keys, values, real):
    """Scales of every row, number by number; the second half of a key's channels turns with the first."""
    rows, heads, _, head_dim = keys.shape
    found = []
    for states, paired in ((keys, True), (values, False)):
        scale = torch.ones(rows, heads, head_dim)
        for row in range(rows):
            # A row of padding alone takes the other rows' scales.
            given = [row] if real[row].any() else [other for other in range(rows) if real[other].any()]
            largest = torch.cat([states[other][:, real[other]] for other in given], 1).abs().amax(1)
            if paired:
                largest = torch.maximum(largest, largest.roll(head_dim // 2, -1))
            for place in largest.nonzero().tolist():
                most = float(largest[tuple(place)])
                scale[(row, *place)] = 2.0 ** math.ceil(math.log2(2 * most / 448))
        found.append(scale)
    return found


class InEightBits(RoundedFirst):
    """A layer of an ordinary cache that is handed what an FP8 cache would give back."""

    static = None

    def prepare(self, keys, values, real):
        own = slow_scales(keys, values, real)
        self.of_rows = own if self.static is None else [s.expand(len(keys), -1, -1) for s in self.static]

    def rounded(self, keys, values):
        scales = [scale[:, :, None] for scale in self.of_rows]
        return in_eight_bits(keys, scales[0]), in_eight_bits(values, scales[1])


class InFourBits(RoundedFirst):
    """A layer of an ordinary cache that is handed what an int4 cache would give back."""

    def rounded(self, keys, values):
        masks = self.channel_mask.expand(len(keys), -1, -1)
        return tuple(
            torch.cat([emulate(row[None], assign_chunks(mask)) for row, mask in zip(states, of, strict=True)])
            for states, of in ((keys, masks), (values, torch.ones_like(masks)))
        )


@dataclass
class Coded:
    """A model whose keys differ much in size, and how its cache is coded."""

    model: Any
    kv_dtype: str
    kind: type

    def twins(self, **kwargs):
        """A cache so coded, and the slow re-statement of one."""
        slow = restated(self.model.build_cache(kv_dtype="auto", **kwargs), self.kind)
        for layer in slow.pruned_layers:
            attention = self.model.model.layers[layer.layer_idx].self_attn
            if hasattr(attention, "key_scale"):
                layer.static = [getattr(attention, name)[None] for name in SCALE_NAMES]
            layer.takes_mean = self.kv_dtype != "auto" and layer.static is None
        return [self.model.build_cache(kv_dtype=self.kv_dtype, **kwargs), slow]

    def fed(self, rows, length):
        caches = self.twins(prune="deferred")
        for cache in caches:
            with torch.no_grad():
                self.model(ids(rows, length), cache=cache)
        return caches


KINDS = {"auto": RoundedFirst, "fp8": InEightBits, "int4": InFourBits}


def centred(model, size=4.0):
    """Give a model's checkpoint a mean of keys, as large as `size` times a random number."""
    layers = model.build_cache().pruned_layers
    generator = torch.Generator().manual_seed(3)
    model.key_means = [torch.randn(layer.model_mask.shape, generator=generator) * size for layer in layers]
    model.config.leank = {**model.config.leank, "key_mean": True}
    return model


@pytest.fixture
def build(model_pair, some_masks):
    """In double: in single precision numbers that nearly agree are rounded apart now and then."""

    def build(codec):
        kv_dtype, _, constants = codec.partition(" ")
        widths, head_dim = (INT4_WIDTHS, 80) if kv_dtype == "int4" else (WIDTHS, 16)
        model = model_pair(some_masks(widths, head_dim)).leank.double()
        generator = torch.Generator().manual_seed(1)
        sizes = 2.0 ** torch.randint(-3, 3, (3 * head_dim, 1), generator=generator)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.mul_(sizes)
                layer.self_attn.v_proj.weight.mul_(sizes.flip(0))
        if "centred" in constants:
            centred(model)
        if "static" in constants:
            block = {"kv_dtype": "fp8", "kv_scales": {"num_tokens": 1}}
            model.config.leank = {**model.config.leank, **block}
            for layer in model.model.layers:
                for name in SCALE_NAMES:
                    scale = 2.0 ** torch.randint(-9, 1, (3, 16), generator=generator)
                    layer.self_attn.register_buffer(name, scale)
        return Coded(model, kv_dtype, KINDS[kv_dtype])

    return build


CODECS = ["auto centred", "fp8", "fp8 static", "fp8 static centred", "int4"]


@pytest.fixture(params=CODECS)
def coded(request, build):
    return build(request.param)


def test_decoding_turns_and_drafts_are_those_of_coded_keys_and_values(coded):
    Both(coded.model, coded.twins(), 3).take_turns()


def test_rows_that_move_take_what_is_theirs_along(coded):
    Both(coded.model, coded.twins(prune="deferred"), 2).move_rows()


@pytest.mark.parametrize("prune", ["eager", "deferred"])
def test_rows_of_several_caches_keep_what_is_theirs(coded, prune):
    ours, slow = fed_apart(coded.model, lambda: coded.twins(prune=prune))
    parts = [[layer.of_rows for layer in cache.layers] for cache in slow]
    joined = restated(concatenate(slow), coded.kind)
    for layer, *of_rows in zip(joined.layers, *parts, strict=True):
        layer.of_rows = [torch.cat(own) for own in zip(*of_rows, strict=True)]
    feed_joined(coded.model, [concatenate(ours), joined])


def test_a_fork_with_channels_of_its_rows_own(coded, some_masks):
    head_dim = coded.model.build_cache().layers[0].model_mask.shape[-1]
    widths = INT4_WIDTHS if head_dim == 80 else WIDTHS
    per_row = torch.stack([some_masks(widths, head_dim, seed=seed) for seed in (3, 4)], dim=1)
    both = Both(coded.model, [fork(cache, recent_size=2) for cache in coded.fed(2, 60)], 2)
    for cache in both.caches:
        for layer, masks in zip(cache.layers, per_row, strict=True):
            layer.set_channel_mask(masks)
    both.mask = torch.ones(2, 60, dtype=torch.long)
    for count in (1, 3, 1):
        both.feed(count)
    both.each("reorder_cache", torch.tensor([1, 1]))
    both.feed(1)


def test_rows_whose_padding_fills_the_first_chunk_disturb_no_other(coded):
    both = Both(coded.model, coded.twins(), 3)
    for count, padding in ((40, (0, 40, 7)), (40, (0, 20, 0)), (1, None), (5, (0, 2, 4)), (1, None)):
        both.feed(count, padding)


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("codec", ["fp8", "int4"])
def test_generate_decodes_from_a_rounded_cache(codec, kwargs, build):
    coded = build(codec)
    prompt, mask = ids(1 if "prompt_lookup_num_tokens" in kwargs else 2, 50), None
    if len(prompt) == 2:
        mask = torch.ones_like(prompt)
        mask[1, :30] = 0
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20, "attention_mask": mask, **kwargs}
    generate, (ours, slow) = coded.model.generate, coded.twins()
    expected = generate(prompt, cache=slow, kv_dtype="auto", **options)
    assert torch.equal(generate(prompt, kv_dtype=codec, **options), expected)
    assert torch.equal(generate(prompt, cache=ours, **options), expected)
    if len(prompt) == 2:  # a turn
        turn = torch.cat([expected, ids(2, 7)], 1)
        more = torch.ones(2, turn.shape[1] - 50, dtype=torch.long)
        options["attention_mask"] = torch.cat([mask, more], 1)
        assert torch.equal(*(generate(turn, cache=cache, **options) for cache in (ours, slow)))


@pytest.mark.parametrize("codec", CODECS[:4])
def test_captured_steps_and_drafts_by_kernels_are_those_of_coded_keys_and_values(
    codec, graphs, build, monkeypatch
):
    monkeypatch.setattr(graph_leank, "fuse_weights", lambda *_: False)  # as the stock class computes
    coded = build(codec)
    both = Both(coded.model, coded.twins(), 2)
    for count, padding in (
        (60, (0, 23)),
        *[(1, None)] * 20,
        (4, (0, 2)),
        (4, None),
        (3, None),
        (40, (0, 30)),
    ):
        both.feed(count, padding)
    both.each("reorder_cache", torch.tensor([1, 0]))
    both.mask = both.mask.flip(0)
    for _ in range(40):
        both.feed(1)
    assert both.caches[0].graph.num_replays > 40 and both.caches[0].graph.num_captures > 2


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_families_decode_from_a_rounded_cache(architecture, kv_dtype, model_pair, some_masks):
    options = OPTIONS.get(architecture.model_type, {})
    model = model_pair(some_masks(WIDTHS), architecture.stem, **options).leank
    both = Both(model, Coded(model, kv_dtype, KINDS[kv_dtype]).twins(), 2)
    for count, padding in ((40, (0, 13)), (1, None), (1, None), (5, (0, 2)), (1, None)):
        both.feed(count, padding)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_with_all_channels_kept_no_mean_changes_an_answer(architecture, model_pair, some_masks):
    options = OPTIONS.get(architecture.model_type, {})
    pair = model_pair(some_masks([[16] * 3] * 2), architecture.stem, **options)
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
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    caches = {leank: None, dense: None}
    for _ in range(2):  # a turn attends by another way than a token
        answers = [
            model.generate(prompt, attention_mask=mask, **options, **{CACHE: cache})
            for model, cache in caches.items()
        ]
        torch.testing.assert_close(*(torch.stack(answer.logits) for answer in answers), rtol=1e-7, atol=1e-7)
        caches = {model: answer[CACHE] for model, answer in zip(caches, answers, strict=True)}
        prompt = torch.cat([answers[0].sequences, ids(2, 40, seed=5)], 1)
        mask = torch.cat([mask, torch.ones(2, prompt.shape[1] - mask.shape[1], dtype=torch.long)], 1)


def test_a_dropped_channel_counts_as_its_mean(model_pair, some_masks):
    """Keys that are their mean in all that is dropped lose nothing, whatever is pruned."""
    model = model_pair(some_masks(WIDTHS)).leank
    mean = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1))
    states = [torch.randn(2, 3, 91, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    outputs = []
    for keeps_all in (False, True):
        cache = model.build_cache()
        layer = cache.layers[1]
        layer.model_constants, mask = Constants(mean), layer.model_mask[0]
        if keeps_all:
            layer.set_channel_mask(torch.ones_like(mask))
        keys = torch.where(mask[:, None], states[0], mean[0][:, None])
        query = states[2][:, :, 90:].repeat_interleave(2, 1)
        fill_layer(cache, 1, keys[:, :, :90], states[1][:, :, :90])
        outputs.append(decode_layer(cache, 1, query, keys[:, :, 90:], states[1][:, :, 90:]))
    torch.testing.assert_close(*outputs)


def test_what_int4_stores_of_a_prompt_and_of_later_tokens_is_bit_for_bit_the_same(build):
    coded = build("int4")
    caches = coded.twins()
    both = Both(coded.model, caches, 1)
    for total in (2, 3):
        both.feed(1 + (total == 2))
        for layers in zip(*(cache.pruned_layers for cache in caches), strict=True):
            index = layers[0].store.chunk_index[0]
            for name in POOLS:
                one, other = (
                    layer.store.tensors.read(name, lambda pool: pool[:1, :, :3])[0, :, :total]
                    for layer in layers
                )
                if name.endswith("keys"):  # lanes of padding are no numbers of a head's
                    lanes = index[: len(one)] if name == "kept_keys" else index[-len(one) :]
                    real = (lanes >= 0)[:, None].expand_as(one)
                    one, other = one[real], other[real]
                assert torch.equal(one, other)


@pytest.mark.parametrize("codec", ["fp8", "int4"])
def test_what_is_not_finite_stays_in_its_row(codec, build):
    model = build(codec).model
    head_dim = model.build_cache().layers[0].model_mask.shape[-1]
    states = [torch.randn(2, 3, 90, head_dim, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    outputs = []
    for is_broken in (False, True):
        keys, values = states[0].clone(), states[1].clone()
        if is_broken:
            keys[1, :, 5], values[1, :, 6] = torch.nan, torch.inf
        cache = model.build_cache(kv_dtype=codec)
        fill_layer(cache, 0, keys, values)
        new = [x[:, :, :1] for x in states]
        outputs.append(decode_layer(cache, 0, new[2].repeat_interleave(2, 1), *new[:2]))
    assert torch.equal(outputs[0][0], outputs[1][0]) and outputs[1][1].isnan().any()


def test_int4_in_chunks_of_16_takes_what_evaluate_counts(build):
    model = build("int4").model.to(torch.bfloat16)
    cache = model.build_cache(kv_dtype="int4")
    with torch.no_grad():
        model(ids(1, 200), cache=cache)
    memory, groups = cache.memory(), 4 + (1 + 2 + 2) + 5 * 3
    pruned_region = memory.kept_keys.used + memory.kept_values.used
    assert pruned_region == 200 * ((7 + 80 + 16 + 48 + 33 + 5 * 80) / 2 + groups * 4)


def test_where_kernels_serve_the_other_caches_plain_torch_serves_int4(build, monkeypatch):
    asked = []
    monkeypatch.setattr(
        layer_leank, "find_kernels", lambda *args, **kwargs: asked.append(kwargs["cache_dtype"])
    )
    coded = build("int4")
    both = Both(coded.model, coded.twins(), 1)
    for count in (40, 1, 3):
        both.feed(count)
    assert torch.uint8 in asked and both.caches[0].graph.num_captures == 0


@pytest.mark.parametrize("codec", ["fp8", "fp8 static", "int4"])
def test_the_config_the_generation_config_and_arguments_choose(codec, build):
    coded = build(codec)
    model = coded.model
    if codec == "int4":
        model.config.leank = {**model.config.leank, "kv_dtype": "int4"}
    assert model.build_cache().kv_dtype == ("auto" if codec == "fp8" else coded.kv_dtype)
    other = "fp8" if codec == "fp8" else "auto"
    model.generation_config.kv_dtype = other
    cache = model.build_cache()
    model.generate(ids(1, 9), cache=cache, max_new_tokens=2, pad_token_id=0)
    assert cache.kv_dtype == other
    with pytest.raises(ValueError, match=rf"^the cache stores `{other}` and holds tokens already, it cannot"):
        model.generate(ids(1, 20), cache=cache, kv_dtype="auto" if other == "fp8" else "fp8")


def test_what_is_no_dtype_or_does_not_go_together_is_refused(build):
    model = build("fp8").model
    block = {**model.config.leank, "kv_dtype": "int3"}
    for refused in (
        lambda: model.build_cache(kv_dtype="int3"),
        lambda: model.generate(ids(1, 3), kv_dtype="int3"),
        lambda: type(model.config)(**{**model.config.to_dict(), "leank": block}),
    ):
        with pytest.raises(ValueError, match=r"kv_dtype` is 'int3', not one of `auto`, `fp8`, `int4`$"):
            refused()
    caches = [model.build_cache(kv_dtype=kv_dtype) for kv_dtype in ("fp8", "auto")]
    for cache in caches:
        with torch.no_grad():
            model(ids(1, 9), cache=cache)
    with pytest.raises(ValueError, match=r"^cache 1 has kv_dtype auto, cache 0 has fp8$"):
        concatenate(caches)


def test_constants_of_a_checkpoint_that_cannot_be_used_are_refused(build):
    model = build("fp8 static").model
    attention = model.model.layers[1].self_attn
    for value in (0.0, -1.0, 3.0, 2.0**-15, 2.0**16, math.inf, math.nan):
        attention.value_scale[2, 5] = value
        with pytest.raises(ValueError, match=rf"^layer 1: `value_scale` holds {value}, which is no power of"):
            model.build_cache()
    attention.to("meta")  # as accelerate leaves them with `offload_buffers`
    with pytest.raises(ValueError, match=r"^layer 1: `key_scale` is offloaded and cannot be read; load"):
        model.build_cache()
    model = build("auto centred").model
    model.key_means = None
    with pytest.raises(ValueError, match=r"^this model was made from its config alone, and the mean of"):
        model.build_cache()
    model.config.leank = {**model.config.leank, "key_mean": 3}
    with pytest.raises(ValueError, match=r"^config.json: `leank.key_mean` is 3, not true$"):
        model.build_cache()
