"""Variants by their names, and ThinK: each row's channels are those of its formula, token by token."""

from types import SimpleNamespace

import pytest
import torch

from bin.baselines import VARIANTS
from leank_convert.evaluate import names as variant_names
from leank_convert.evaluate.names import BASELINES
from leank_convert.evaluate.prefill import decode_token
from leank_convert.evaluate.variants import OTHERS, ThinK, find_variants, kept_channels
from leank_convert.windows import Windows
from tests.checks import refusal

KV_HEADS, HEAD_DIM, GROUPS = 2, 16, 2
# The shortest has fewer tokens than the queries that choose.
LENGTHS = (40, 25, 5)
QUERIES = 8
# More than these variants look at, as when another one in the same batch wants them.
QUERY_WINDOW = QUERIES + 3


def think_scores(prefill, layer, row, head):
    """||Q_i K_i^T||_F^2 of every channel i, over the row's own tokens, summed over the G query heads."""
    num_tokens = int(prefill.attention_mask[row].sum())
    keys = prefill.keys_and_values[layer][0][row, head].double()[-num_tokens:]
    scores = [0.0] * HEAD_DIM
    for query_head in range(head * GROUPS, (head + 1) * GROUPS):
        queries = prefill.queries[layer][row, query_head].double()[-min(QUERIES, num_tokens) :]
        for channel in range(HEAD_DIM):
            scores[channel] += sum(
                float(query[channel] * key[channel]) ** 2 for query in queries for key in keys
            )
    return scores


@pytest.mark.parametrize(
    ("budget", "widths"),
    [
        *((ratio, [[HEAD_DIM - int(HEAD_DIM * ratio)] * KV_HEADS] * 2) for ratio in (0.3, 0.7)),
        (torch.tensor([[0, 5], [16, 3]]), [[0, 5], [16, 3]]),
    ],
    ids=["three tenths", "seven tenths", "widths"],
)
def test_think_keeps_each_heads_largest_products_of_queries_and_keys(prefill, budget, widths):
    """In every row of every layer, the channels that the formula ranks first."""
    model, cache = ThinK(budget, query_window=QUERIES).start(prefill)
    assert model is prefill.model
    for layer_idx, layer in enumerate(cache.layers):
        for row in range(len(LENGTHS)):
            for head, width in enumerate(widths[layer_idx]):
                scores = think_scores(prefill, layer_idx, row, head)
                best = sorted(range(HEAD_DIM), key=scores.__getitem__, reverse=True)[:width]
                assert layer.channel_mask[row, head].nonzero().flatten().tolist() == sorted(best)


def test_decoding_is_pruned_to_the_chosen_channels_and_the_variants_own_windows(prefill):
    windows = Windows(sink_size=1, recent_size=3, flush_size=1)
    logits = {}
    for ratio in (0.0, 0.75):
        model, cache = ThinK(ratio, windows, query_window=QUERIES).start(prefill)
        logits[ratio], _ = decode_token(model, cache, prefill.next_token, prefill.attention_mask)
        assert cache.rows.pruned_lengths.tolist() == [length + 1 - 1 - 4 for length in LENGTHS]
    assert (logits[0.0] - logits[0.75]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("head_dim", "pruning_ratio", "width"), [(128, 0.7, 39), (128, 0.0, 128), (100, 0.29, 71)]
)
def test_think_rounds_down_what_it_drops(head_dim, pruning_ratio, width):
    assert kept_channels(head_dim, pruning_ratio) == width


def test_every_setting_has_a_column_of_its_own_and_products_are_of_the_checkpoints_mask(evaluated):
    variants = find_variants(["fp8", "leank+fp8", "int4", "leank+int4", *BASELINES], evaluated)
    names = [variant.name for variant in variants]
    assert names == [
        "fp8", "leank+fp8", "int4", "leank+int4", "int4+hadamard", "leank+int4+hadamard",
        "kivi", "leank+kivi", "leank+kivi+window",
        "quest-16", "quest-16-kv", "quest-64", "quest-64-kv",
        "leank+quest-16", "leank+quest-16-kv", "leank+quest-64", "leank+quest-64-kv",
        "snapkv-2048", "snapkv-56%",
    ]  # fmt: skip
    for variant in variants:
        is_product = variant.name.startswith("leank+")
        assert (variant.channel_masks is evaluated.channel_masks) == is_product
        assert is_product or bool(variant.channel_masks.all())


def test_beside_layers_that_are_not_pruned_bits_are_the_runtimes_caches():
    masks = torch.ones(1, 2, 16, dtype=torch.bool)
    mixed = SimpleNamespace(leank={"layers": [1]}, channel_masks=masks, key_mean=None)
    variants = find_variants(["fp8", "leank+fp8", "int4", "leank+int4"], mixed)
    assert [(variant.name, variant.kv_dtype) for variant in variants] == [
        ("fp8", "fp8"), ("leank+fp8", "fp8"), ("int4", "int4"), ("leank+int4", "int4")
    ]  # fmt: skip
    with refusal("`leank\\+kivi` is not known of a model with layers"):
        find_variants(["leank+kivi"], mixed)


def test_a_checkout_has_all_baselines_that_are_named_and_loads_those_asked_for(tmp_path, monkeypatch):
    assert set(variant_names.load_baselines(["kivi"])) == set(VARIANTS) == set(BASELINES)
    assert {*OTHERS, *VARIANTS} == set(variant_names.ALSO)
    monkeypatch.setattr(variant_names, "_CHECKOUT", tmp_path)
    assert variant_names.load_baselines(["window", "int4"]) == {}
