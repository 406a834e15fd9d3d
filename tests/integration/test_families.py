"""What holds for every family of the table: conversion is exact, and what it gives decodes as its source."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.checkpoint_io import open_checkpoint
from leank_convert.errors import LeanKError
from leank_convert.evaluate.comparison import used_bytes
from leank_convert.evaluate.prefill import decode_token, run_prefill
from leank_convert.evaluate.variants import Dense, Masked
from leank_convert.export import export_checkpoint
from leank_convert.export.plan import list_stock_tensors, plan_export
from leank_convert.families import ARCHITECTURES
from leank_convert.inspection import inspect_artifact, render_inspection
from leank_convert.kv_scales import KVScales
from leank_convert.mask import ChannelMask, all_channels_mask
from leank_convert.methods.measured_cache import measure_cache
from leank_convert.methods.statistics import measure_attention
from leank_convert.onnx import export_onnx
from leank_convert.train.attention import ATTENTION_NAME
from tests.checks import facts_of, failed, short_recipe
from tests.integration.conftest import GREEDY
from tests.tiny_families import FAMILIES, batch, some_families


@pytest.mark.parametrize("row", FAMILIES)
def test_with_all_channels_kept_generate_is_the_sources(row, converted, load):
    checkpoint = converted(row.model_type)
    dense, ours = AutoModelForCausalLM.from_pretrained(checkpoint.source).eval(), load(checkpoint.folder)
    assert type(ours).__name__ == f"LeanK{row.causal_lm_class}"
    # Beams move rows, of caches of other layers in ways of their own.
    for options in ({}, {"num_beams": 3}) if row.other_layers or row.model_type == "llama" else ({},):
        expected = dense.generate(**batch(), **GREEDY, **options)
        assert ours.generate(**batch(), **GREEDY, **options).tolist() == expected.tolist()
    caches = [None, None]
    turn = batch()
    for _ in range(2):
        answers = []
        for index, model in enumerate((dense, ours)):
            result = model.generate(**turn, **GREEDY, return_dict_in_generate=True, **{CACHE: caches[index]})
            caches[index] = result[CACHE]
            answers.append(result.sequences)
        assert answers[1].tolist() == answers[0].tolist()
        ids = torch.cat([answers[0], batch()["input_ids"][:1, :5].repeat(2, 1)], dim=1)
        mask = torch.ones_like(ids)
        mask[1, :8] = 0
        turn = {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("row", FAMILIES)
def test_an_export_verifies_and_its_stock_class_loads_the_original(row, example, load, tmp_path):
    checkpoint = example(row.model_type)
    assert failed(checkpoint.folder, checkpoint.source) == {}
    stock = getattr(transformers, row.causal_lm_class)

    def logits(folder, dtype=torch.float32):
        # torch has no fused product of experts in float64.
        options = {}
        if row.experts:
            config = getattr(transformers, row.config_class).from_pretrained(folder)
            config.model_type = row.model_type  # by which transformers knows how experts lie in files
            options = {"experts_implementation": "eager", "config": config}
        model, found = stock.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
        assert not any(found.values()), found
        with torch.no_grad():
            return model.eval()(**batch()).logits

    exact = logits(checkpoint.source, torch.float64)
    rounding = (logits(checkpoint.source) - exact).norm()
    assert (logits(checkpoint.folder) - exact).norm() <= 3 * rounding
    model = load(checkpoint.folder)
    again = tmp_path / "again"
    model.save_pretrained(again)
    assert failed(again) == {}
    expected = model.generate(**batch(), **GREEDY)
    assert load(again).generate(**batch(), **GREEDY).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "qwen3_next"])
def test_one_prefill_serves_a_dense_and_a_pruned_cache_beside_other_layers(family, example, load):
    row = ARCHITECTURES[family]
    checkpoint = example(family)
    ours = load(checkpoint.folder)
    dense = getattr(transformers, row.causal_lm_class).from_pretrained(checkpoint.folder).eval()
    prefill = run_prefill(ours, *batch().values())  # a row at a time: one has padding
    for variant, model in ((Dense(dense), dense), (Masked("pruned"), ours)):
        runner, cache = variant.start(prefill)
        token, mask, answers = prefill.next_token, batch()["attention_mask"], [prefill.next_token]
        for _ in range(15):
            logits, mask = decode_token(runner, cache, token, mask)
            token = logits.argmax(-1, keepdim=True)
            answers.append(token)
        expected = model.generate(**batch(), **GREEDY)[:, 23:]
        assert torch.cat(answers, dim=1).tolist() == expected.tolist()
        if isinstance(variant, Dense):  # K and V, layers, heads, channels, bytes, rows, columns
            held, full = used_bytes(cache).held, 2 * 2 * 2 * 16 * 4 * 2 * (23 + 15)
            assert held == full if family == "qwen3_next" else held > full


def test_layers_without_full_attention_are_left_as_they_are(converted, load, tmp_path):
    kinds = ["full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 7}
    checkpoint = converted("qwen2", [[8, 0]], layer_types=kinds, **window)
    assert failed(checkpoint.folder, checkpoint.source) == {}
    ours = load(checkpoint.folder)
    assert ours.config.leank["layers"] == [0]
    card = (checkpoint.folder / "README.md").read_text()
    assert "prunes 1 of 2 layers" in card and "K cache of 1 of 2 layers pruned by 75.0%" in card
    told = render_inspection(inspect_artifact(checkpoint.folder / "channel_mask.safetensors"))
    assert "1 of the model's 2, those with full attention" in told
    cache = ours.generate(**batch(), **GREEDY, return_dict_in_generate=True)[CACHE]
    assert cache.layers[1].keys.shape[2] == 6
    assert cache.memory().other_values.used == 2 * 2 * 6 * 16 * 4  # rows, heads, tokens, channels, bytes
    with pytest.raises(ValueError, match="window of 7 tokens keep no tokens before it"):
        cache.crop(-2)
    with pytest.raises(LeanKError, match="only 1 of 2 layers have full attention"):
        export_onnx(checkpoint.folder, None, tmp_path / "onnx")


def test_masks_beside_linear_layers_are_measured(example, load):
    checkpoint = example("qwen3_next")
    facts = facts_of(checkpoint.source)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.source, attn_implementation=ATTENTION_NAME).eval()
    assert measure_attention(model, batch()["input_ids"][0]).channel_norms.shape == facts.mask_shape
    assert measure_cache(checkpoint.source, short_recipe()).statistics.mean.shape == facts.mask_shape
    cache = load(checkpoint.folder).generate(**batch(), **GREEDY, return_dict_in_generate=True)[CACHE]
    with pytest.raises(ValueError, match="state cannot forget a token"):
        cache.crop(-2)


@pytest.mark.parametrize("row", some_families("llama", "phi3", "gpt_oss", "qwen3_next"))
def test_measured_scales_of_an_fp8_cache_travel_with_it(row, example, load, tmp_path):
    checkpoint = example(row.model_type)
    largest = torch.full((2, 2, 16), 20.0)
    scales = KVScales.of_largest(largest, largest, num_tokens=7, tasks=("retrieval",), seed=3)
    mask, windows = ChannelMask(checkpoint.channel_mask), {"sink_size": 3, "recent_size": 6, "flush_size": 4}
    cache = {"kv_dtype": "fp8", "kv_scales": scales}
    out = export_checkpoint(checkpoint.source, mask, tmp_path / "fp8", **windows, **cache)
    assert failed(out, checkpoint.source) == {}
    result = load(out).generate(**batch(), **GREEDY, return_dict_in_generate=True)
    assert result.sequences.shape == (2, 39)
    assert result[CACHE].layers[1].store.tensors.kept_keys.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("row", FAMILIES)
def test_every_tensor_that_the_model_needs_is_asked_for(row, example, monkeypatch):
    """transformers would only warn of one that is missing, and go on with random values."""
    checkpoint = example(row.model_type)
    opened = open_checkpoint(checkpoint.source)
    facts = facts_of(checkpoint.source)
    needed = list_stock_tensors(facts, origin="config.json")  # whichever of them the files lack
    monkeypatch.setattr("leank_convert.export.plan.list_stock_tensors", lambda *_, **__: {**needed})
    places = {name: file for file, header in opened.shards.items() for name in header.tensors}
    # Of a layer's experts the first and the last.
    for name in (name for name in places if not re.search(r"experts\.[12]\.", name)):
        header = opened.shards[places[name]]
        rest = {key: info for key, info in header.tensors.items() if key != name}
        damaged = replace(opened, shards={**opened.shards, places[name]: replace(header, tensors=rest)})
        with pytest.raises(LeanKError, match="is missing"):
            plan_export(damaged, all_channels_mask(facts), facts)


# One family for each thing that the first four lack: scaled logits, scaled queries.
@pytest.mark.parametrize("family", ["granite", "ministral3"])
def test_a_graph_of_it_answers_as_its_source(family, converted, tmp_path):
    checkpoint = converted(family, [[8, 8]], num_hidden_layers=1)
    assert failed(export_onnx(checkpoint.folder, None, tmp_path / "onnx"), checkpoint.source) == {}


def test_a_mixture_of_experts_is_refused_as_a_graph(example, tmp_path):
    checkpoint = example("mixtral")
    for model, mask in ((checkpoint.folder, None), (checkpoint.source, ChannelMask(checkpoint.channel_mask))):
        # Before weights are copied.
        with pytest.raises(LeanKError, match=f"^`{model}`: .*mixture of experts"):
            export_onnx(model, mask, tmp_path / "onnx")
