"""What a LeanK model cannot do, it refuses at once, in a sentence that names the way out."""

import copy
import itertools
from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from leank_convert._runtime.configuration_leank import CACHE
from runtime.configuration_leank import LeanKLlamaConfig
from runtime.modeling_leank import LeanKLlamaForCausalLM, LeanKLlamaModel
from tests.runtime.tiny_inputs import GREEDY, everything, feed, one_row
from tests.tiny_families import random_mask


@pytest.fixture
def model(model_pair):
    """Of which all channels are kept."""
    return model_pair(everything()).leank


def settings(**options):
    """A generation config."""
    return {"generation_config": GenerationConfig(**options)}


DENSE = ["static", "offloaded", "offloaded_static", "quantized", "paged"]
EARLY, DRAFTS = {"assistant_early_exit": 1}, r": .* `prompt_lookup_num_tokens`"


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        *(
            ("generate", {"cache_implementation": name}, f"cache_implementation '{name}' is a dense cache")
            for name in DENSE
        ),
        *(("generate", settings(cache_implementation=name), "is a dense cache") for name in DENSE[:4]),
        ("generate", EARLY, f"assistant_early_exit{DRAFTS}"),
        ("generate", settings(**EARLY), "assistant_early_exit"),
        ("generate", {"use_mtp": True}, f"use_mtp{DRAFTS}"),
        ("forward", {"output_attentions": True}, r"output_attentions: .* stock class"),
        ("generate", {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ("generate_batch", settings(max_new_tokens=2), "continuous batching keeps a dense paged cache"),
    ],
    ids=str,
)
def test_what_only_dense_models_do_is_refused_and_leaves_the_model_whole(call, options, message, model):
    expected = model.generate(one_row(), **GREEDY)
    given = [[5, 6, 7]] if call == "generate_batch" else one_row()
    options = {**GREEDY, **options} if call == "generate" and "generation_config" not in options else options
    with pytest.raises(ValueError, match=message):
        getattr(model, call)(given, **options)
    assert model.config.num_hidden_layers == 2
    assert torch.equal(model.generate(one_row(), **GREEDY), expected)


def test_training_mode_refuses_a_cache(model):
    model.train()
    for call, options in ((model, {"use_cache": True}), (model.generate, GREEDY)):
        with pytest.raises(ValueError, match=r"training mode .* `model.eval\(\)`"):
            call(one_row(), **options)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_another_number_of_rows_is_refused_and_leaves_the_cache_as_it_was(rows, columns, model):
    cache = feed(model, one_row().expand(2, -1))[CACHE]
    with pytest.raises(ValueError, match=f"input has {rows} rows, the cache holds 2; .*batch_select"):
        feed(model, one_row(columns).expand(rows, -1), cache)
    assert cache.get_seq_length() == 21 and cache.rows.lengths.tolist() == [21, 21]
    with pytest.raises(ValueError, match=f"covers 22 tokens of {rows} rows, .* hold 22 of 2;"):
        feed(model, one_row(1).expand(2, -1), cache, attention_mask=torch.ones(rows, 22))
    feed(model, one_row(1).expand(2, -1), cache)
    pending = model.build_cache("deferred")
    feed(model, one_row().expand(2, -1), pending)
    with pytest.raises(ValueError, match=f"input has {rows} rows, the cache holds 2; .*batch_select"):
        feed(model, one_row(columns).expand(rows, -1), pending)
    feed(model, one_row(1).expand(2, -1), pending)


@pytest.mark.parametrize(
    ("held", "index", "columns"), [(0, 1, 21), (21, 0, 1), (21, 1, 1), (21, 0, 40), (21, 1, 40)]
)
def test_a_pass_that_failed_within_a_layer_is_told_when_the_cache_is_used_again(
    held, index, columns, model, monkeypatch
):
    cache = feed(model, one_row(held))[CACHE] if held else model.build_cache()
    layer = cache.layers[index]
    failing, error = ("append", KeyboardInterrupt) if held else ("split", torch.OutOfMemoryError)
    monkeypatch.setattr(layer.store if held else layer, failing, Mock(side_effect=error))
    with pytest.raises(error):
        feed(model, one_row(columns), cache)
    monkeypatch.undo()
    for count in (1, columns):
        with pytest.raises(RuntimeError, match=r"did not reach every layer; call `reset\(\)`"):
            feed(model, one_row(count), cache)
    cache.reset()
    feed(model, one_row(), cache)


def test_a_pass_without_input_is_refused(model):
    with pytest.raises(ValueError, match="neither input_ids nor inputs_embeds is given"):
        model(cache=None)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            torch.zeros(1, 1, 1, 22),
            "is torch.float32 \\[1, 1, 1, 22\\]: the pruned cache needs a 2-D padding mask",
        ),
        (torch.ones(1, 5, dtype=torch.bool), "covers 5 tokens, the cache and the input hold 22"),
    ],
    ids=["float", "short"],
)
@pytest.mark.parametrize("prune", ["eager", "deferred"])
def test_an_inner_model_refuses_masks_that_are_no_padding_and_goes_on(prune, mask, message, model):
    with torch.no_grad():
        caches = [model.build_cache(prune=prune) for _ in range(2)]
        for cache in caches:
            model.model(one_row(), **{CACHE: cache})
        with pytest.raises(ValueError, match=message):
            model.model(one_row(1), attention_mask=mask, **{CACHE: caches[0]})
        after = [model.model(one_row(1), **{CACHE: cache}).last_hidden_state for cache in caches]
    assert torch.equal(*after)
    assert caches[0].rows.lengths.tolist() == [22]


@pytest.mark.parametrize("make", [DynamicCache, lambda: ()], ids=["DynamicCache", "tuple"])
def test_foreign_caches_are_refused_also_empty_ones_because_they_would_stay_empty(make, model_pair):
    """transformers' documented loop passes one and goes on with it: it would decode without context."""
    pair = model_pair(everything())
    with torch.no_grad():
        full = pair.dense(one_row())[CACHE]
    base = LeanKLlamaModel(pair.leank.config).eval()
    for call in (pair.leank, base, pair.leank.generate):
        for cache, message in (
            (full, r"DynamicCache with 21 tokens .* run the prompt through this"),
            (StaticCache(config=pair.dense.config, max_cache_len=64), "cache is a StaticCache"),
            (DynamicCache(config=pair.dense.config, offloading=True), "cache is a DynamicCache"),
            (make(), rf"is a {type(make()).__name__}, .* pass `model.build_cache\(\)`"),
        ):
            with pytest.raises(ValueError, match=message):
                call(one_row(), cache=cache)


def test_a_cache_of_a_model_of_other_channels_or_another_mean_is_refused_empty_and_filled(model_pair):
    mine = model_pair([[0, 4], [4, 8]]).leank
    same, less_v, centred = (copy.deepcopy(mine) for _ in range(3))
    less_v.config.leank = {**mine.config.leank, "value_widths": [[0, 8], [8, 8]]}
    centred.key_means = [torch.ones(1, 2, 16)] * 2
    masks = random_mask([[0, 4], [4, 8]], seed=1), [[0, 4], [8, 4]], everything(layers=1)
    others = [model_pair(own).leank for own in masks]
    given = [
        (call, other.build_cache()) for other in (*others, less_v, centred) for call in (mine, mine.generate)
    ]
    given.append((mine.generate, feed(others[1], one_row())[CACHE]))
    message = r"keeps other channels, or centres keys otherwise.*`model.build_cache\(\)`"
    for call, cache in given:
        with pytest.raises(ValueError, match=message):
            call(one_row(30), cache=cache)
    mine.generate(one_row(), cache=same.build_cache(), **GREEDY)


def test_a_draft_longer_than_can_be_taken_back_is_named(model_pair):
    model = model_pair([[0, 4], [4, 8]], recent=2, flush=1).leank
    with pytest.raises(ValueError, match=r"drafts .* at most recent_size \+ 1 tokens, here 3"):
        model.generate(one_row(6).repeat(1, 4), prompt_lookup_num_tokens=10, **GREEDY)


@pytest.mark.parametrize("width", [1, 21, 23])
def test_a_mask_of_another_length_than_the_conversation_is_refused(width, model):
    cache = feed(model, one_row())[CACHE]
    with pytest.raises(ValueError, match=f"covers {width} tokens of 1 rows, .* hold 22 of 1;"):
        feed(model, one_row(1), cache, attention_mask=torch.ones(1, width))
    with pytest.raises(ValueError, match=f"covers {21 + width} tokens of 1 rows, .* hold 21 of 1;"):
        feed(model, one_row(), model.build_cache(), attention_mask=torch.ones(1, 21 + width))
    assert feed(model, one_row(1), cache, attention_mask=torch.ones(1, 22))[CACHE].get_seq_length() == 22


@pytest.mark.parametrize("request_", ["flex_attention", "flash_attention_2", "paged|eager"])
def test_other_attention_requests_are_refused(request_, model):
    with pytest.raises((ValueError, ImportError)):
        model.set_attn_implementation(request_)
    assert model.config._attn_implementation == "leank"
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r'call `model.set_attn_implementation\("leank"\)`'):
        model(one_row())


def test_an_adapter_is_refused_where_heads_moved_or_v_is_in_another_basis(model, monkeypatch):
    base = LeanKLlamaModel(model.config).eval()
    loaded = []
    monkeypatch.setattr(
        PreTrainedModel, "load_adapter", lambda _, *given, **named: loaded.append((given, named))
    )
    for each in (model, base):
        each.load_adapter("own/adapter", adapter_name="x")
    assert loaded == [(("own/adapter",), {"adapter_name": "x"})] * 2
    block = model.config.leank
    folded = {"value_widths": [[8, 8], [8, 8]], "files": {"channel_mask.safetensors": "0"}}
    for change, each in itertools.product(({"head_permutation": [[0, 1], [1, 0]]}, folded), (model, base)):
        model.config.leank = {**block, **change}
        with pytest.raises(
            ValueError, match=r"load_adapter: KV heads are in another order, .*`leank-convert adapter"
        ):
            each.load_adapter("own/adapter")
        with pytest.raises(ValueError, match="load_adapter: KV heads"):
            each.load_adapter(peft_config={"target_modules": ["q_proj"]}, adapter_state_dict={})
    assert len(loaded) == 2


def test_a_model_needs_a_leank_block():
    with pytest.raises(ValueError, match=r"config\.json has no `leank` block"):
        LeanKLlamaForCausalLM(LeanKLlamaConfig())
