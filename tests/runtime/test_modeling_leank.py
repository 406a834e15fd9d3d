"""`generate` and forward of LeanK models built in memory: dense where all is kept, clear refusals."""

import copy
import logging

import pytest
import torch
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.families import ARCHITECTURES
from runtime import modeling_leank
from runtime.modeling_leank import LeanKLlamaForCausalLM
from tests.runtime.tiny_inputs import GREEDY, WIDTHS, assert_close, everything, feed, feed_turns, ids, one_row
from tests.tiny_families import OPTIONS

LOOKUP = GenerationConfig(prompt_lookup_num_tokens=3)


@pytest.fixture
def pair(model_pair):
    return model_pair([[0, 4], [4, 8]])


def padded_batch():
    mask = (torch.arange(21) >= torch.tensor([[0], [9], [20]])).long()
    return {"input_ids": ids(3, 21, 5) * mask, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Qwen3", {"num_beams": 3, "num_return_sequences": 2}),
        ("Qwen2", {"do_sample": True, "num_return_sequences": 2}),
        ("Mistral", {"prefill_chunk_size": 4}),
        ("Llama", {"cache_implementation": "dynamic"}),
        ("Llama", {"prefill_chunk_size": 20, "prune": "deferred"}),
        ("Llama", {"use_cache": False, "max_new_tokens": 6, "min_new_tokens": 6}),
        ("Llama", {"prompt_lookup_num_tokens": 5}),
    ],
    ids=str,
)
def test_with_all_channels_kept_generate_is_the_dense_models(family, options, model_pair):
    pair = model_pair(everything(), family=family, recent=12, flush=3)
    settings = {**GREEDY, **options}
    prompt = (
        {"input_ids": one_row(6).repeat(1, 4)} if "prompt_lookup_num_tokens" in options else padded_batch()
    )
    torch.manual_seed(1)
    ours = pair.leank.generate(**prompt, **settings)
    for own in ("prune", "prompt_lookup_num_tokens"):
        settings.pop(own, None)
    torch.manual_seed(1)
    assert ours.tolist() == pair.dense.generate(**prompt, **settings).tolist()


@pytest.mark.filterwarnings("ignore")  # of PEFT's
def test_virtual_tokens_of_prompt_tuning_are_part_of_the_prompt(model_pair):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    pair, logits = model_pair([[0, 3], [4, 8]], recent=6, flush=4), []
    for model in (pair.dense, pair.leank):
        torch.manual_seed(0)
        tuned = peft.get_peft_model(model, config).eval()
        settings = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        logits.append(tuned.generate(input_ids=one_row(21), **settings).logits[0])
    assert_close(pair.leank, logits[1], logits[0])
    with pytest.raises(
        ValueError, match=r"^drafts and chunks .* prompt tuning adds tokens to it; leave assist"
    ):
        tuned.generate(input_ids=one_row(21), prompt_lookup_num_tokens=3)


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 30,
        "factor": 8.0,
        "partial_rotary_factor": 1.0,
    },
    "original_max_position_embeddings": 30,
}


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [("Phi3", LONGROPE, {}), ("Llama", {}, {"guidance_scale": 1.5})],
    ids=["another rope for long texts", "guidance"],
)
def test_every_cache_of_a_call_is_of_the_kind_that_it_asks_for(family, config, options, model_pair):
    model, caches = model_pair(everything(), family, **config).leank, []
    build_cache = model.build_cache

    def build(*args, **kwargs):
        caches.append(build_cache(*args, **kwargs))
        return caches[-1]

    model.build_cache = build
    model.generate(one_row(35), kv_dtype="fp8", prune="deferred", **GREEDY, **options)
    model(one_row(8))
    kinds = [(cache.kv_dtype, cache.prune) for cache in caches]
    assert kinds == [("fp8", "deferred")] * 2 + [("auto", "eager")]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])  # of any release of transformers
def test_a_cache_is_given_by_its_new_or_its_old_name(name, model_pair):
    model = model_pair([(3, 9), (5, 16)]).leank
    expected, cache = model.generate(one_row(), **GREEDY), model.build_cache()
    model.generation_config.use_cache = False  # as training leaves it, and pipelines pass a copy of that
    assert torch.equal(model.generate(one_row(), copy.copy(model.generation_config), **GREEDY), expected)
    assert model.generate(one_row(), **GREEDY, **{name: cache}).tolist() == expected.tolist()
    assert cache.get_seq_length() == expected.shape[1] - 1
    with torch.no_grad():  # by its name, which `feed` chooses
        assert model(expected[:, -1:], **{name: cache})[CACHE] is cache
    assert cache.get_seq_length() == expected.shape[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decodes_as_closely_to_fp32_as_the_dense_model(dtype, family, device, model_pair):
    options = {**OPTIONS.get(family, {})}
    if family == "gpt_oss":  # one expert: rounding may choose others
        options |= {"num_local_experts": 1, "num_experts_per_tok": 1}
    pair = model_pair(everything(heads=3, head_dim=64), ARCHITECTURES[family].stem, **options)
    models = pair.dense.to(device), copy.deepcopy(pair.dense).to(dtype), pair.leank.to(device, dtype)
    turns, tokens = [30, *[1] * 20], ids(3, 50)[:1]
    exact, dense, ours = (feed_turns(model, None, turns, tokens=tokens) for model in models)
    assert ours.dtype == dtype
    assert (ours.float() - exact).abs().max() <= 2 * (dense.float() - exact).abs().max()


def test_deferred_generate_gives_the_same_for_any_chunk_size(pair):
    expected = pair.leank.generate(**padded_batch(), **GREEDY).tolist()
    for size in (1, 4, 20):
        ours = pair.leank.generate(**padded_batch(), **GREEDY, prefill_chunk_size=size, prune="deferred")
        assert ours.tolist() == expected, size
    eager = pair.leank.generate(**padded_batch(), **GREEDY, prefill_chunk_size=4)
    assert eager.tolist() != expected


def test_prune_is_taken_from_argument_then_generation_config_then_config(pair):
    model = pair.leank
    settings = {**GREEDY, "return_dict_in_generate": True, "max_new_tokens": 1, "min_new_tokens": 1}

    def mode(**options):
        return model.generate(one_row(), **{**settings, **options})[CACHE].prune

    assert mode() == "eager"
    assert mode(prune="deferred") == "deferred"
    model.generation_config.prune = "deferred"
    assert mode() == "deferred"
    assert mode(prune="eager") == "eager"
    assert model.generate(one_row(), GenerationConfig(**settings, prune="eager"))[CACHE].prune == "eager"
    with pytest.raises(ValueError, match="`prune` is 'lazy', not one of `eager`, `deferred`"):
        model.generate(one_row(), prune="lazy")


def test_a_default_prune_leaves_a_cache_with_tokens_as_it_is(pair):
    model, cache = pair.leank, feed(pair.leank, one_row())[CACHE]
    model.generation_config.prune = "deferred"
    tokens = torch.cat([one_row(), one_row(3)], dim=1)
    with pytest.raises(ValueError, match="it cannot change to `deferred`"):
        model.generate(tokens, cache=cache, prune="deferred", **GREEDY)
    model.generate(tokens, cache=cache, **GREEDY)
    assert cache.prune == "eager"
    empty = model.build_cache()
    model.generate(tokens, cache=empty, **GREEDY)
    assert empty.prune == "deferred"


@pytest.mark.parametrize("use_cache", [None, False])  # transformers takes a cache for them all the same
def test_inputs_embeds_give_what_ids_give(use_cache, pair):
    batch = padded_batch()
    mask, embeds = batch["attention_mask"], pair.leank.get_input_embeddings()(batch["input_ids"])
    ours = pair.leank.generate(inputs_embeds=embeds, attention_mask=mask, use_cache=use_cache, **GREEDY)
    assert ours.tolist() == pair.leank.generate(**batch, **GREEDY)[:, 21:].tolist()


def test_without_a_cache_the_model_is_dense_and_trains_as_that_does(pair):
    with torch.no_grad():
        ours, dense = (model(**padded_batch(), use_cache=False) for model in (pair.leank, pair.dense))
    assert CACHE not in ours
    assert torch.equal(ours.logits, dense.logits)
    for model in (pair.leank, pair.dense):
        model.train()
        model(one_row(), labels=one_row()).loss.backward()
    ours, dense = pair.leank.model.layers[0].self_attn.k_proj, pair.dense.model.layers[0].self_attn.k_proj
    assert torch.equal(ours.weight.grad, dense.weight.grad)


@pytest.mark.parametrize("turns", [(20, 1, 1), (20, 3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decodes_what_full_precision_does(dtype, turns, model_pair):
    model = model_pair(WIDTHS).leank
    cache, expected = model.build_cache(), model.build_cache()
    for seed, count in enumerate(turns):
        exact = feed(model, ids(2, count, seed), expected).logits
        with torch.autocast("cpu", dtype=dtype):
            ours = feed(model, ids(2, count, seed), cache).logits
        assert (ours - exact).norm() < 0.03 * exact.norm()


def test_decoding_with_gradients_enabled_keeps_no_graph_in_the_cache(pair):
    model, cache = pair.leank, pair.leank(one_row())[CACHE]
    for _ in range(3):
        model(one_row(1), cache=cache).logits.sum().backward()
    assert copy.deepcopy(cache).get_seq_length() == 24


def test_gradients_of_a_turn_reach_its_own_keys_and_values(model_pair):
    pair, found = model_pair([[16] * 3] * 2), []
    for model in (pair.leank.double(), pair.dense.double()):
        with torch.no_grad():
            cache = model(one_row())[CACHE]
        states = model.get_input_embeddings()(one_row(5)).detach().requires_grad_()
        model(inputs_embeds=states, **{CACHE: cache}).logits.sum().backward()
        found += [states.grad, model.model.layers[0].self_attn.v_proj.weight.grad]
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-4, atol=1e-5)


def test_layers_with_windows_generate_with_the_logits_of_routers(model_pair):
    pair = model_pair(WIDTHS, "GptOss", **OPTIONS["gpt_oss"])
    try:
        pair.dense.generate(one_row(), **GREEDY, output_router_logits=True)
    except RuntimeError:
        pytest.skip("the stock class of this release of transformers fails at it, too")
    model = pair.leank
    expected = model.generate(one_row(), **GREEDY)
    assert torch.equal(model.generate(one_row(), **GREEDY, output_router_logits=True), expected)
    model.config.output_router_logits = True
    assert torch.equal(model.generate(one_row(), **GREEDY), expected)


@pytest.mark.parametrize("name", ["dynamic", "hybrid"])  # the latter is what Gemma 3 publishes
@pytest.mark.parametrize("where", ["argument", "model", "both"])
def test_a_models_own_cache_in_a_generation_config_means_leanks(where, name, pair, caplog):
    model = pair.leank
    expected = model.generate(one_row(), **GREEDY)
    if where != "argument":
        model.generation_config.cache_implementation = name
    if where == "model":
        assert torch.equal(model.generate(one_row(), **GREEDY), expected)
        return
    config = GenerationConfig(cache_implementation=name, **GREEDY)
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        type(transformers_logging.get_logger()).warning_once.cache_clear()
        assert torch.equal(model.generate(one_row(), config), expected)
    assert config.cache_implementation == name
    if where == "argument":
        assert "deprecated" not in caplog.text


def test_custom_masks_need_no_cache(model_pair):
    pair = model_pair(everything())
    given = {"input_ids": one_row(4), "attention_mask": torch.ones(4, 4, dtype=torch.bool).tril()[None, None]}
    with pytest.raises(ValueError, match="2-D padding mask"):
        pair.leank(**given)
    with torch.no_grad():
        ours, dense = (each(**given, use_cache=False).logits for each in (pair.leank, pair.dense))
    assert torch.equal(ours, dense)


@pytest.mark.parametrize("request_", [None, "leank", "sdpa", "eager"])
def test_usual_attention_requests_mean_leank(request_, model_pair):
    config = copy.deepcopy(model_pair(everything()).leank.config)
    config._attn_implementation = request_
    model = LeanKLlamaForCausalLM(config)
    assert model.config._attn_implementation == "leank"
    model.set_attn_implementation(request_ or "sdpa")
    assert model.config._attn_implementation == model.model.config._attn_implementation == "leank"


def test_a_model_saves_what_the_stock_model_does_and_loads_with_its_masks(pair, tmp_path):
    assert pair.leank.state_dict().keys() == pair.dense.state_dict().keys()
    pair.leank.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = LeanKLlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for layer, mask in zip(model.build_cache().layers, pair.masks, strict=True):
            assert layer.channel_mask.dtype == torch.bool
            assert torch.equal(layer.channel_mask[0], mask)
    again = LeanKLlamaForCausalLM.from_pretrained(tmp_path)
    assert again.generate(one_row(), **GREEDY).tolist() == pair.leank.generate(one_row(), **GREEDY).tolist()


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_a_cpu_without_bfloat16_is_told_of_float32(has_bfloat16, model_pair, tmp_path, monkeypatch):
    model_pair(everything()).leank.save_pretrained(tmp_path)
    monkeypatch.setattr(modeling_leank, "_cpu_has_bfloat16", lambda: has_bfloat16)
    told = []
    monkeypatch.setattr(modeling_leank.logger, "warning", told.append)
    LeanKLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not told
    LeanKLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert ['dtype="float32"' in line for line in told] == [True] * (not has_bfloat16)


@pytest.mark.parametrize("how", ["model", "forward"])
def test_a_compiled_model_generates_the_same_without_compiling_again(how, pair):
    settings = {**GREEDY, "max_new_tokens": 40, "min_new_tokens": 40}
    expected = pair.leank.generate(**padded_batch(), **settings)
    if how == "model":
        pair.leank.compile(backend="eager")
    else:
        pair.leank.forward = torch.compile(pair.leank.forward, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert pair.leank.generate(**padded_batch(), **settings).tolist() == expected.tolist()
    # Two functions, each once for the prompt and once for a token, and the way into them.
    assert torch._dynamo.utils.counters["frames"]["total"] <= 6


def test_without_a_cache_a_compiled_model_is_one_graph(pair):
    compiled = torch.compile(pair.leank, backend="eager", fullgraph=True)
    with torch.no_grad():
        ours = compiled(one_row(), use_cache=False).logits
        assert_close(pair.leank, ours, pair.dense(one_row(), use_cache=False).logits)


def test_an_inner_model_called_directly_cannot_decode_densely(model_pair):
    model = model_pair(everything()).leank
    with torch.no_grad():
        dense = model.model(one_row(), use_cache=True)
        with pytest.raises(ValueError, match=r"22 keys for 1 queries: .* `model.build_cache\(\)`"):
            model.model(one_row(1), **{CACHE: dense[CACHE]})
        cache = model.build_cache()
        model.model(**padded_batch(), **{CACHE: cache})
    assert cache.rows.lengths.tolist() == [21, 12, 1]


def two_turns(model, cache, turn, hidden):
    """A turn of two rows, and another one, by `generate`, whose mask hides some of one row's columns."""
    first, second = ids(2, 12), ids(2, turn, 4)
    mask = torch.ones(2, 15, dtype=torch.long)
    past = torch.cat([first, ids(2, 3, 3)], dim=1)
    if cache is not None:
        feed(model, first, cache)
        for column in range(12, 15):
            feed(model, past[:, column : column + 1], cache, attention_mask=mask[:, : column + 1])
    mask[0, hidden] = 0
    mask = torch.cat([mask, torch.ones_like(second)], dim=1)
    found = model.generate(torch.cat([past, second], dim=1), attention_mask=mask, cache=cache, **GREEDY)
    return found[:, -24:]


@pytest.mark.parametrize("turn", [1, 5, 40])
def test_a_row_that_ended_before_others_goes_on_without_what_was_fed_to_it_since(turn, model_pair):
    pair = model_pair(everything())
    cache, ended = pair.leank.build_cache(), slice(12, 15)
    assert torch.equal(two_turns(pair.leank, cache, turn, ended), two_turns(pair.dense, None, turn, ended))
    assert cache.rows.lengths.tolist() == [12 + turn + 23, 15 + turn + 23]
    cache.crop(-4)
    assert cache.rows.lengths.tolist() == [12 + turn + 19, 15 + turn + 19]


OTHER_MASK = "attention_mask differs in earlier columns from what they were run"


@pytest.mark.parametrize(
    ("family", "hidden", "message"),
    [
        ("llama", slice(3, 5), OTHER_MASK),
        ("llama", slice(0, 1), OTHER_MASK),
        ("qwen3_next", slice(12, 15), "a mask of earlier tokens of a cache with layers of linear attention"),
    ],
    ids=["in the middle", "the first", "the last of layers whose state cannot forget"],
)
def test_a_mask_that_hides_other_tokens_than_can_be_forgotten_is_refused(family, hidden, message, model_pair):
    model = model_pair(everything(), ARCHITECTURES[family].stem, **OPTIONS.get(family, {})).leank
    with pytest.raises(ValueError, match=message):
        two_turns(model, model.build_cache(), 5, hidden)


def test_a_turn_is_not_to_show_what_was_padding_nor_to_have_other_rows(model_pair):
    model = model_pair(everything()).leank
    cache, mask = model.build_cache(), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    feed(model, ids(2, 12), cache, attention_mask=mask)
    with pytest.raises(ValueError, match=OTHER_MASK):
        model.generate(ids(2, 15), cache=cache, **GREEDY)  # transformers takes all columns for real
    mask = torch.cat([mask, mask[:, -3:]], dim=1)
    with pytest.raises(ValueError, match="the input has 4 rows, the cache holds 2"):
        model.generate(ids(2, 15), attention_mask=mask, cache=cache, num_beams=2, **GREEDY)


@pytest.mark.parametrize("prune", ["eager", "deferred"])
@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        (20, {}, "the cache holds 20 tokens, and the prompt has 20: pass the whole conversation"),
        (9, {}, "the cache holds 20 tokens, and the prompt has 9: pass"),
        (30, {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: drafts begin with an empty cache"),
        (30, {"generation_config": LOOKUP}, "drafts begin with an empty"),
    ],
)
def test_a_prompt_that_would_be_run_again_behind_a_cache_is_refused(prompt, options, said, prune, model_pair):
    model = model_pair(everything()).leank
    cache = model.build_cache(prune)
    feed(model, one_row(20), cache)
    with pytest.raises(ValueError, match=said):
        model.generate(one_row(prompt), cache=cache, **GREEDY, **options)
    assert (cache.get_seq_length(), cache.prefill_length) == (20, None)
