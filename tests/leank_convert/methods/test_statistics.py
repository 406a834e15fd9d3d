"""Statistics of a prompt against their formulas, written out element by element."""

from importlib import import_module

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.families import ARCHITECTURES
from leank_convert.methods.statistics import high_frequency_channels, measure_attention
from leank_convert.train.attention import ATTENTION_NAME
from tests.tiny_families import tiny_model

FAMILIES = ["llama", "qwen3"]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 8
GROUPS = HEADS // KV_HEADS


def build(family):
    heads = {"num_attention_heads": HEADS, "head_dim": HEAD_DIM, "attn_implementation": ATTENTION_NAME}
    return tiny_model(family, seed=3, std=0.3, hidden_size=24, vocab_size=50, **heads)


def draw_prompt(length):
    return torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(4))


def queries_and_keys(model, input_ids):
    """Of each layer, after RoPE: [H, N, D] and [H_kv, N, D], float64, from transformers' own attention."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append((query[0].double(), key[0].double()))
        return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **kwargs)

    AttentionInterface.register("spy", spy)
    model.set_attn_implementation("spy")
    model(input_ids[None], use_cache=False)
    model.set_attn_implementation(ATTENTION_NAME)
    assert len(seen) == LAYERS
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [50, 9])  # longer and shorter than the observation window
def test_channel_norms_are_ratios_of_frobenius_norms_of_the_last_32_queries(family, length):
    model, ids = build(family), draw_prompt(length)
    found = measure_attention(model, ids).channel_norms
    expected = torch.zeros(LAYERS, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    for layer, (query, key) in enumerate(queries_and_keys(model, ids)):
        for head in range(HEADS):
            window, keys = query[head, -32:], key[head // GROUPS]
            whole = sum(float(q @ k) ** 2 for q in window for k in keys) ** 0.5
            for channel in range(HEAD_DIM):
                one = sum(float(q[channel] * k[channel]) ** 2 for q in window for k in keys) ** 0.5
                expected[layer, head // GROUPS, channel] += one / whole / GROUPS
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_high_frequency_ratio_takes_the_faster_half_of_the_pairs_and_all_query_heads_at_once(family):
    model, ids = build(family), draw_prompt(40)
    found = measure_attention(model, ids).high_frequency_ratio
    high = [0, 1, 4, 5]  # i and i + D/2 for i < D/4, with D 8
    for layer, (query, key) in enumerate(queries_and_keys(model, ids)):
        for kv_head in range(KV_HEADS):
            fast = whole = 0.0
            for head in range(kv_head * GROUPS, (kv_head + 1) * GROUPS):
                for k in key[kv_head]:
                    products = query[head, -1] * k
                    fast += float(sum(products[i] for i in high)) ** 2
                    whole += float(products.sum()) ** 2
            assert found[layer, kv_head].item() == pytest.approx((fast / whole) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_product_magnitudes_are_means_of_each_query_with_its_own_key(family, is_centred):
    model, ids = build(family), draw_prompt(40)
    mean = torch.randn(LAYERS, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(5)) * 3
    found = measure_attention(model, ids, mean if is_centred else None).product_magnitudes
    for layer, (query, key) in enumerate(queries_and_keys(model, ids)):
        key = key - mean[layer][:, None] if is_centred else key
        for kv_head in range(KV_HEADS):
            for channel in range(HEAD_DIM):
                values = [
                    abs(float(query[head, token, channel] * key[kv_head, token, channel]))
                    for head in range(kv_head * GROUPS, (kv_head + 1) * GROUPS)
                    for token in range(40)
                ]
                expected = sum(values) / len(values)
                assert found[layer, kv_head, channel].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["glm4", "phi3", "glm4_moe"])
def test_of_heads_rotated_in_part_the_fast_channels_are_among_the_rotated(family):
    """The channels whose key changes most from a token to the next, told by rotating a key of ones."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    angles = torch.tensor([3.0, 1.0, 0.1, 0.01])[None, None]  # of 8 rotated channels of 16
    cos, sin = (wave.repeat(1, 1, 2) for wave in (angles.cos(), angles.sin()))
    ones = torch.ones(1, 1, 1, 16)
    _, turned = module.apply_rotary_pos_emb(ones, ones, cos, sin)
    moved = (turned - ones).abs().flatten()
    expected = torch.zeros(16, dtype=torch.bool)
    expected[moved.argsort(descending=True)[:4]] = True
    found = high_frequency_channels(16, rotated=8, interleaved=ARCHITECTURES[family].interleaved_pairs)
    assert torch.equal(found, expected)


def test_statistics_that_are_not_finite_are_refused():
    model = build("llama")
    model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("inf")
    with pytest.raises(LeanKError, match=r"`channel_norms` of a prompt of 20 tokens is not finite"):
        measure_attention(model, draw_prompt(20))
