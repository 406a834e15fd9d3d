import re

import pytest
import transformers
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from leank_convert.architectures import read_model_facts
from leank_convert.config_class import refused_by_transformers
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.export.config_json import build_config
from leank_convert.families import ARCHITECTURES
from leank_convert.rope import ROPE_TYPES, read_rope_parameters
from tests.checks import refusal
from tests.tiny_families import FAMILIES

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}
SLIDING = "of 2 layers attend within a sliding window only"
MIXED = {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}
WINDOWED = {"model_type": "qwen2", "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("row", FAMILIES)
@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 24},
        {"hidden_size": 4096, "num_attention_heads": 32},
    ],
    ids=["explicit-head-dim", "defaults"],
)
def test_facts_are_those_of_the_config_class(row, keys):
    family = row.model_type
    window = 64 if "sliding_attention" in row.other_layers else None
    keys = {**keys, "num_hidden_layers": 6, "sliding_window": window, "max_position_embeddings": 300}
    config = AutoConfig.for_model(family, **keys)
    facts = read_model_facts({**keys, "model_type": family}, origin="config.json")
    assert facts.num_key_value_heads == config.num_key_value_heads
    assert facts.num_key_value_groups == config.num_attention_heads // config.num_key_value_heads
    stated = getattr(config, "head_dim", None)
    assert facts.head_dim == (stated or config.hidden_size // config.num_attention_heads)
    # That of layers with full attention, where kinds of layers have one each.
    rope = {"rope_parameters": config.rope_parameters.get("full_attention", config.rope_parameters)}
    kinds = getattr(config, "layer_types", ["full_attention"] * 6)
    assert facts.layers == tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    assert facts.rope_parameters == read_rope_parameters(rope, origin="config.json")


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 1000000.0, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
    ],
    ids=["none", "null-scaling", "old-linear", "old-yarn", "new-yarn", "llama3"],
)
def test_rope_parameters_are_those_that_transformers_reads(keys):
    keys = {"max_position_embeddings": 32768, **keys}
    read = read_rope_parameters(keys, origin="config.json")
    given = transformers.LlamaConfig.from_dict({**LLAMA, **keys}).rope_parameters
    assert read == {key: value for key, value in given.items() if key != "type"}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("Llama", "llama"),
        ("qwen-2", "qwen2"),
        ("mistral4", None),
        ("qwen2_moe", None),
        (None, None),
        (["llama"] * 10**6, None),
    ],
)
def test_another_spelling_of_a_family_is_suggested_never_another_family(given, meant):
    with refusal("`x`: unknown architecture: `model_type` is ", "supported: `llama`") as caught:
        read_model_facts({**LLAMA, "model_type": given}, origin="x")
    assert ("did you mean" in str(caught.value.hint)) == (meant is not None)
    assert meant is None or f"did you mean `{meant}`?" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000, not a whole number from 1"),
        ({"num_hidden_layers": 4096, "num_key_value_heads": 8, "head_dim": 4096}, "more than 16777216 chann"),
        ({"hidden_size": 65}, "The hidden size (65) is not a multiple"),
        ({"max_position_embeddings": 10**400}, "`max_position_embeddings` is an integer of 1329 bits"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` is 0, not a number from"),
        ({"dtype": "bfloat99"}, "`dtype` is 'bfloat99'"),
        ({"layer_types": ["full_attention"]}, "`layer_types` is ['full_attention'], not a list of 2"),
        ({"compression_config": {"quant_method": "gptq"}}, "the model is quantized"),
        ({"per_layer_config": {"0": {}}}, "has layers of several shapes"),
        ({"rope_scaling": "yarn"}, "`rope_scaling` is 'yarn', not an object"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "`rope_type` is 'spiral', not one of default,"),
        ({"rope_scaling": {"type": "linear"}}, "rope of type `linear` has no `factor`"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0]}}, "`short_factor` is [1.0], not one positive"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "`high_freq_factor` is 1.0, not above"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "of one kind of layer"),
        ({"partial_rotary_factor": 0.5}, "rotated whole"),
        ({"to_dict": 1}, "is refused by transformers: "),
        ({"model_type": "mistral", "sliding_window": 4096}, SLIDING),
        ({**WINDOWED, "max_window_layers": 0, "sliding_window": 64}, SLIDING),
        ({"vocab_size": None}, "`vocab_size` is None, not a whole number"),
        ({**MIXED, "sliding_window": None}, "`sliding_window` is None, not a whole number"),
        ({**MIXED, "layer_types": ["full_attention", "linear_attention"]}, "1 of 2 layers have no full"),
    ],
)
def test_senseless_configs_are_refused(changes, message):
    with refusal(rf"^`config\.json`.*{re.escape(message)}") as caught:
        read_model_facts({**LLAMA, **changes}, origin="config.json")
    if "no full" in message:
        assert caught.value.hint == "kinds known of this family: full_attention, sliding_attention"


@pytest.mark.parametrize("rope", [YARN, LLAMA3, LONGROPE, {"type": "linear", "factor": 2}])
def test_kinds_of_rope_that_transformers_computes_are_read(rope):
    assert ROPE_TYPES.keys() == ROPE_INIT_FUNCTIONS.keys() | {"default"}
    facts = read_model_facts({**LLAMA, "rope_scaling": rope, "max_position_embeddings": 131072}, origin="x")
    config = transformers.LlamaConfig(**{**LLAMA, "rope_parameters": {**facts.rope_parameters}})
    compute = ROPE_INIT_FUNCTIONS[facts.rope_parameters["rope_type"]]
    assert compute(config)[0].shape == (4,)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"use_sliding_window": True, "max_window_layers": 1}, (0,)),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, (0,)),
        ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64}, (0, 1)),
        ({"use_sliding_window": False, "sliding_window": 131072}, (0, 1)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 1)),
    ],
)
def test_layers_with_full_attention_are_pruned_and_windows_that_none_uses_are_no_obstacle(changes, layers):
    facts = read_model_facts({**LLAMA, "model_type": "qwen2", **changes}, origin="config.json")
    assert facts.layers == layers and facts.is_mixed == (len(layers) == 1)
    assert facts.mask_shape == (len(layers), 2, 8)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "source",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
    ],
    ids=["old", "new"],
)
def test_overridden_rope_keeps_theta_and_drops_the_models_own_scaling(key, source):
    config = {**LLAMA, **source}
    result = apply_config_overrides(config, {key: YARN, "max_position_embeddings": 131072})
    assert result["rope_parameters"] == {**YARN, "rope_theta": 1e6}
    assert result["max_position_embeddings"] == 131072
    assert not {"rope_theta", "rope_scaling"} & result.keys()
    loaded = transformers.LlamaConfig.from_dict(result).rope_parameters
    assert loaded == read_model_facts(result, origin="x").rope_parameters


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        # Theta alone keeps the scaling; a scaling may be taken away; a trained length is the model's.
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": YARN}, {"rope_scaling": None}, {"rope_type": "default"}),
        (
            {"max_position_embeddings": 4096},
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 16384},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
    ],
)
def test_what_overrides_leave_of_rope(config, overrides, expected):
    given = {**LLAMA, "rope_theta": 1e4, **config}
    found = apply_config_overrides(given, {"rope_theta": 5e6, **overrides})["rope_parameters"]
    assert found == {**expected, "rope_theta": 5e6}


def test_a_window_that_no_sequence_outgrows_may_be_left_out():
    config = {**LLAMA, "model_type": "phi3", "sliding_window": 262144, "max_position_embeddings": 131072}
    with refusal("sliding window only", "config_overrides={sliding_window: null}"):
        read_model_facts(config, origin="x")
    read_model_facts(apply_config_overrides(config, {"sliding_window": None}), origin="x")


@pytest.mark.parametrize("nested", [False, True])
def test_another_rope_leaves_as_much_of_a_head_rotated(nested):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    given = {"rope_parameters": rope} if nested else {"partial_rotary_factor": 0.75}
    changed = apply_config_overrides({**LLAMA, "model_type": "phi3", **given}, {"rope_theta": 1e6})
    assert read_model_facts(changed, origin="x").rope_parameters["partial_rotary_factor"] == 0.75
    changed = apply_config_overrides({**LLAMA, "model_type": "glm4", **given}, {"rope_parameters": YARN})
    assert changed["rope_parameters"]["partial_rotary_factor"] == 0.75


def test_rotated_channels_that_a_config_counts_are_exported_as_the_share_that_every_transformers_reads():
    config = {**LLAMA, "model_type": "minimax_m2", "head_dim": 16, "rotary_dim": 8}
    assert read_model_facts(config, origin="x").rope_parameters["partial_rotary_factor"] == 0.5
    written = build_config(config, ARCHITECTURES["minimax_m2"], {}, {})
    assert (written["rotary_dim"], written["partial_rotary_factor"]) == (8, 0.5)


WEIGHTS = "the weights fix this key; it cannot be overridden"


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ({"rope_theta": "fast"}, "config_overrides`: `rope_theta` is 'fast'", ""),
        ({"layer_types": "full_attention"}, "`config_overrides.layer_types`: ", ""),
        ({"note": float("nan")}, "`config_overrides` cannot be written as JSON", ""),
        ({"num_hidden_layers": 3}, f"`config_overrides.num_hidden_layers`: {WEIGHTS}", "such as"),
        ({"leank": 3}, f"`config_overrides.leank`: {WEIGHTS}", ""),
        ({"rope_thetaa": 1e6}, "`config_overrides.rope_thetaa`: ", "did you mean `rope_theta`?"),
        ({"rope_parameters": {**YARN, "factr": 2}}, "rope_parameters.factr`: ", "`rope_parameters.factor`?"),
        ({"mine": 1}, "`config_overrides.mine`: ", "leave it out"),
    ],
    ids=str,
)
def test_overrides_that_make_no_sense_or_change_the_model_are_refused(overrides, message, hint):
    with refusal(re.escape(message), hint):
        apply_config_overrides(LLAMA, overrides)


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyError("x"), "unknown value or missing key: 'x'"), (TypeError(), "TypeError")]
)
def test_a_refusal_without_words_is_put_into_some(error, reason):
    told = f"`c` is refused by transformers: {reason}"
    with refusal(told), refused_by_transformers("c"):
        raise error


def test_rope_parameters_of_one_kind_of_layers_cannot_be_overridden():
    gemma = {**LLAMA, "model_type": "gemma3_text", "sliding_window_pattern": 2}
    with refusal(r"`config_overrides.rope_theta`: kinds of layers of `gemma3_text`"):
        apply_config_overrides(gemma, {"rope_theta": 1e7})


def test_overrides_of_known_keys_are_taken():
    known = {"torch_dtype": "float32", "id2label": {"0": "a"}, "use_cache": False, "bos_token_id": 1}
    assert apply_config_overrides(LLAMA, known) == {**LLAMA, **known}
    assert apply_config_overrides({**LLAMA, "mine": 1}, {"mine": 2})["mine"] == 2
