"""Caches in FP8 and int4: how they round, what by, the bits that it takes, and who chooses them."""

import math

import pytest
import torch

from bin.baselines.int4 import assign_chunks
from bin.baselines.int4 import quantise as emulate
from bin.benchmarks.decode_attention import fill_layer
from runtime.codec_leank import Int4
from runtime.fp8_leank import key_scale_of, reread, scale_of
from runtime.fp8_leank import quantise as quantise_fp8
from tests.runtime.conftest import coded_pair
from tests.runtime.conversation import NUMBERS, in_eight_bits
from tests.runtime.tiny_inputs import everything, feed, ids


def test_fp8_is_clamped_and_rounded_to_the_nearest_even():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor(NUMBERS)
    ties = (numbers[1:] + numbers[:-1]) / 2
    exponents = torch.randint(-12, 12, (4000,), generator=generator)
    random = torch.randn(4000, generator=generator) * 2.0**exponents
    edges = torch.tensor([0.0, 448, 449, 464, 1e9, torch.inf, torch.nan, 2**-10, 2**-11, 1e-30])
    positive = torch.cat([numbers, ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0), random, edges])
    for states in (positive, -positive):
        for scale in (2.0**-14, 0.25, 1.0, 2.0**15):
            exact = torch.tensor(scale)
            read = quantise_fp8(states * exact, exact).float() * exact
            assert torch.equal(read.nan_to_num(9e9), in_eight_bits(states * exact, exact).nan_to_num(9e9))


def test_scales_leave_room_for_numbers_twice_as_large():
    largest = torch.tensor([224.0, 224.001, 223.9, 1.75, 1.76, 0.0, 1e-30, 3e38, torch.inf, torch.nan])
    expected = [1, 2, 1, 2**-7, 2**-6, 1, 2**-14, 2**15, 1, 1]
    assert scale_of(largest).tolist() == expected
    head = torch.stack([largest, largest.flip(0), torch.full_like(largest, torch.nan)])
    assert key_scale_of(head).tolist() == [[2.0**15] * 10, [2.0**15] * 10, [1.0] * 10]


@pytest.mark.parametrize(
    "partners", [torch.arange(16).roll(8), torch.arange(16) ^ 1, torch.arange(16).roll(5)]
)
def test_keys_that_rotation_turns_into_other_channels_are_not_clamped(partners):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 64, 16, generator=generator) * torch.tensor([8.0, *[1e-3] * 15])
    scale = key_scale_of(keys.abs().amax(1))[:, None]
    turned = (keys + keys[..., partners]) / 2**0.5  # half of a right angle
    torch.testing.assert_close(reread(turned, scale), turned, rtol=2**-4, atol=float(scale.max()) * 2**-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "chunk_size"), [(128, 32), (80, 16), (6, 1)])
def test_int4_is_rounded_as_evaluate_rounds_it(dtype, head_dim, chunk_size):
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
    for given, rows_per_head in ((states, 1), (chunks, num_chunks)):
        codec = Int4(dtype, [rows_per_head] * 2, given.shape[-1], torch.device("cpu"))
        packed = codec.pack(given).flatten(0, 1)
        num_bytes = 4 * -(-head_dim // 32) * dtype.itemsize + given.shape[2] * -(-given.shape[-1] // 2)
        pool = 1, -(-num_bytes // dtype.itemsize) * dtype.itemsize, torch.uint8
        assert (*packed.shape[1:], packed.dtype) == codec.pool_of(*given.shape[2:]) == pool
        read = codec.read(packed).view(states.shape).transpose(1, 2)
        assert torch.equal(read.isnan(), expected.isnan())
        assert torch.equal(read.nan_to_num(9), expected.nan_to_num(9))
    assert int(expected.isnan().sum()) == 3 * min(head_dim, 32) and not expected.isinf().any()
    assert torch.equal(expected[0, :, :9], states.transpose(1, 2)[0, :, :9])


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
def test_large_constants_of_slow_pairs_cost_a_rounded_cache_little(kv_dtype, model_pair):
    """As in Qwen2.5, whose biases leave channels of keys far larger than they vary."""
    losses = []
    rope = {"rope_type": "default", "rope_theta": 1e6}
    for size in (0.0, 150.0):
        model = model_pair(everything(head_dim=32), "Qwen2", rope_parameters=rope).leank
        with torch.no_grad():
            for layer in model.model.layers:
                bias = layer.self_attn.k_proj.bias.view(2, 2, 16)
                bias.zero_()
                bias[:, 0, -3:], bias[:, 1, -3:] = size, -size
        logits = []
        for dtype in ("auto", kv_dtype):
            cache = model.build_cache(kv_dtype=dtype)
            feed(model, ids(4, 360), cache)
            steps = ids(4, 24, seed=1).split(1, 1)
            logits.append(torch.cat([feed(model, token, cache).logits for token in steps], 1))
        exact, rounded = (x.double().log_softmax(-1) for x in logits)
        losses.append(float((exact.exp() * (exact - rounded)).sum(-1).mean()))
    assert 0 < losses[1] <= 2 * losses[0]


@pytest.mark.parametrize(("kv_dtype", "bits"), [("auto", 16), ("fp8", 8), ("int4", 5)])
def test_bits_that_a_number_of_half_precision_takes(kv_dtype, bits, model_pair):
    model = model_pair([[32, 64], [0, 128]], head_dim=128).leank.to(torch.bfloat16)
    memories = []
    for length in (640, 1280):
        cache = model.build_cache(kv_dtype=kv_dtype)
        cache.reserve(length)
        feed(model, ids(1, length), cache)
        memories.append(cache.memory())
    numbers = (32 + 64 + 128) + 3 * 128
    for kind in ("used", "allocated"):
        grown = [getattr(memory.total, kind) for memory in memories]
        assert grown[1] - grown[0] == 640 * numbers * bits // 8
    assert memories[1].dense_keys == 1280 * 2 * 2 * 128 * 2


@pytest.mark.parametrize("codec", ["fp8", "int4"])
def test_what_is_not_finite_stays_in_its_row(codec):
    model = coded_pair(codec).leank
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
        handle, _ = cache.layers[0].update(*new[:2])
        outputs.append(handle.attend(None, new[2].repeat_interleave(2, 1), None)[0])
    assert torch.equal(outputs[0][0], outputs[1][0]) and outputs[1][1].isnan().any()


@pytest.mark.parametrize("codec", ["fp8", "fp8 static", "int4"])
def test_the_config_the_generation_config_and_arguments_choose(codec):
    model = coded_pair(codec).leank
    if codec == "int4":
        model.config.leank = {**model.config.leank, "kv_dtype": "int4"}
    assert model.build_cache().kv_dtype == ("auto" if codec == "fp8" else codec.split()[0])
    other = "fp8" if codec == "fp8" else "auto"
    model.generation_config.kv_dtype = other
    cache = model.build_cache()
    model.generate(ids(1, 9), cache=cache, max_new_tokens=2, pad_token_id=0)
    assert cache.kv_dtype == other
    with pytest.raises(ValueError, match=rf"^the cache stores `{other}` and holds tokens already, it cannot"):
        model.generate(ids(1, 20), cache=cache, kv_dtype="auto" if other == "fp8" else "fp8")


def test_what_is_no_dtype_is_refused():
    model = coded_pair("fp8").leank
    block = {**model.config.leank, "kv_dtype": "int3"}
    for refused in (
        lambda: model.build_cache(kv_dtype="int3"),
        lambda: model.generate(ids(1, 3), kv_dtype="int3"),
        lambda: type(model.config)(**{**model.config.to_dict(), "leank": block}),
    ):
        with pytest.raises(ValueError, match=r"kv_dtype` is 'int3', not one of `auto`, `fp8`, `int4`$"):
            refused()


def test_constants_of_a_checkpoint_that_cannot_be_used_are_refused():
    model = coded_pair("fp8 static").leank
    attention = model.model.layers[1].self_attn
    for value in (0.0, -1.0, 3.0, 2.0**-15, 2.0**16, math.inf, math.nan):
        attention.value_scale[2, 5] = value
        with pytest.raises(ValueError, match=rf"^layer 1: `value_scale` holds {value}, which is no power of"):
            model.build_cache()
    attention.to("meta")  # as accelerate leaves them with `offload_buffers`
    with pytest.raises(ValueError, match=r"^layer 1: `key_scale` is offloaded and cannot be read; load"):
        model.build_cache()
    model = coded_pair("auto centred").leank
    model.key_means = None
    with pytest.raises(ValueError, match=r"^this model was made from its config alone, and the mean of"):
        model.build_cache()
    model.config.leank = {**model.config.leank, "key_mean": 3}
    with pytest.raises(ValueError, match=r"^config.json: `leank.key_mean` is 3, not true$"):
        model.build_cache()
