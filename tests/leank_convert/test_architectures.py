import re
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from leank_convert.architectures import (
    ARCHITECTURES,
    apply_config_overrides,
    read_model_facts,
    read_rope_parameters,
)
from leank_convert.errors import LeanKError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("row", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_rows_name_what_transformers_has(row: Any) -> None:
    for name in (row.config_class, row.base_class, row.causal_lm_class):
        assert hasattr(transformers, name)
    config = getattr(transformers, row.config_class)()
    assert config.model_type == row.model_type
    for key, value in row.config_defaults.items():
        assert getattr(config, key) == value


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
        {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 24},
        {"hidden_size": 4096, "num_attention_heads": 32},
    ],
    ids=["plain", "explicit-head-dim", "defaults"],
)
def test_facts_are_those_of_the_config_class(family: str, keys: dict[str, Any]) -> None:
    keys = {**keys, "num_hidden_layers": 3, "sliding_window": None, "max_position_embeddings": 300}
    config = AutoConfig.for_model(family, **keys)
    facts = read_model_facts({**keys, "model_type": family}, origin="config.json")
    assert facts.num_key_value_heads == config.num_key_value_heads
    assert facts.num_key_value_groups == config.num_attention_heads // config.num_key_value_heads
    assert facts.head_dim == getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    assert facts.rope_parameters == config.rope_parameters


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_theta": 1000000.0, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ],
    ids=["none", "theta", "null-scaling", "old-linear", "old-yarn", "new-yarn", "llama3"],
)
def test_rope_parameters_are_those_that_transformers_reads(keys: dict[str, Any]) -> None:
    keys = {"max_position_embeddings": 32768, **keys}
    read = read_rope_parameters(keys, origin="config.json")
    given = transformers.LlamaConfig.from_dict({**LLAMA, **keys}).rope_parameters
    assert read == {key: value for key, value in given.items() if key != "type"}


def test_unknown_architecture_names_the_closest_one() -> None:
    with pytest.raises(LeanKError, match="`x`: unknown architecture: `model_type` is `mistal`") as caught:
        read_model_facts({**LLAMA, "model_type": "mistal"}, origin="x")
    assert "did you mean `mistral`?" in str(caught.value.hint)
    with pytest.raises(LeanKError, match="`model_type` is `None`"):
        read_model_facts({}, origin="x")


def test_a_converted_checkpoint_is_no_source() -> None:
    with pytest.raises(LeanKError, match="already is a LeanK checkpoint") as caught:
        read_model_facts({**LLAMA, "model_type": "leank_llama"}, origin="x")
    assert "original" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is `0`"),
        ({"num_attention_heads": "8"}, "`num_attention_heads` is `'8'`"),
        ({"num_key_value_heads": True}, "`num_key_value_heads` is `True`"),
        ({"num_key_value_heads": 3}, "8 is not a multiple of `num_key_value_heads` 3"),
        ({"hidden_size": 65}, "`hidden_size` 65 is not a multiple"),
        ({"hidden_size": None}, "`hidden_size` is `None`"),
        ({"head_dim": -1}, "`head_dim` is `-1`"),
        ({"rope_scaling": "yarn"}, "`rope_scaling` is `'yarn'`, not an object"),
    ],
)
def test_senseless_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LeanKError, match=re.escape(message)):
        read_model_facts({**LLAMA, **changes}, origin="config.json")


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "model_type": "mistral"},
        {**LLAMA, "model_type": "mistral", "sliding_window": 4096},
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 1},
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 64},
        {**QWEN2, "layer_types": ["full_attention", "sliding_attention"]},
    ],
    ids=["mistral-default", "mistral", "qwen2-default-window", "qwen2", "layer-types"],
)
def test_sliding_window_layers_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(LeanKError, match="of 2 layers attend within a sliding window only"):
        read_model_facts(config, origin="config.json")


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "model_type": "mistral", "sliding_window": None},
        {**QWEN2, "use_sliding_window": False, "sliding_window": 131072},
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64},
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
        {**QWEN2, "layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_window_that_no_layer_uses_is_no_obstacle(config: dict[str, Any]) -> None:
    assert read_model_facts(config, origin="config.json").num_hidden_layers == 2


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "source",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
    ],
    ids=["old", "new"],
)
def test_overridden_rope_keeps_theta_and_drops_the_models_own_scaling(
    key: str, source: dict[str, Any]
) -> None:
    config = {**LLAMA, **source}
    result = apply_config_overrides(config, {key: YARN, "max_position_embeddings": 131072})
    assert result["rope_parameters"] == {**YARN, "rope_theta": 1e6}
    assert result["max_position_embeddings"] == 131072
    assert not {"rope_theta", "rope_scaling"} & result.keys()
    loaded = transformers.LlamaConfig.from_dict(result).rope_parameters
    assert loaded == read_model_facts(result, origin="x").rope_parameters


def test_a_trained_length_that_is_not_given_is_the_models_not_the_overridden_one() -> None:
    config = {**LLAMA, "max_position_embeddings": 4096}
    overrides = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 16384}
    rope: Any = apply_config_overrides(config, overrides)["rope_parameters"]
    assert rope["original_max_position_embeddings"] == 4096


def test_theta_alone_keeps_the_scaling() -> None:
    config = {**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert apply_config_overrides(config, {"rope_theta": 5e6})["rope_parameters"] == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 5e6,
    }


def test_scaling_can_be_taken_away() -> None:
    config = {**LLAMA, "rope_theta": 1e6, "rope_scaling": YARN}
    assert apply_config_overrides(config, {"rope_scaling": None})["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 1e6,
    }


def test_without_overrides_the_config_stays() -> None:
    config = {**LLAMA, "rope_theta": 1e6, "rope_scaling": YARN}
    assert apply_config_overrides(config, {}) == config


@pytest.mark.parametrize("key", ["num_hidden_layers", "model_type", "leank", "tie_word_embeddings"])
def test_what_the_weights_fix_cannot_be_overridden(key: str) -> None:
    with pytest.raises(LeanKError, match=f"`config_overrides.{key}`"):
        apply_config_overrides(LLAMA, {key: 3})
