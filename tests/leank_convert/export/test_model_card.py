import json
from typing import Any

import pytest
import torch
import yaml

from leank_convert.architectures import read_model_facts
from leank_convert.export.config_json import encode_json
from leank_convert.export.model_card import build_model_card
from leank_convert.head_layout import BytesPerToken, count_cache_bytes
from leank_convert.mask import ChannelMask, MaskProvenance
from leank_convert.windows import Windows

FACTS = read_model_facts(
    {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
    },
    origin="config.json",
)


def card(name: str = "owner/model", **known: Any) -> str:
    mask = torch.zeros(2, 2, 8, dtype=torch.bool)
    mask[0, 0] = True
    mask[1, 1, :4] = True
    cache = count_cache_bytes(ChannelMask(mask).widths, 8, 2)
    given = {"method": "imported", "sink_size": 1, "recent_size": 1, "flush_size": 1, **known}
    provenance = MaskProvenance.for_model(name, FACTS, **given)
    return build_model_card(
        name, ChannelMask(mask), provenance, FACTS, Windows(4, 16, 2), cache, element_bytes=2
    )


def test_bytes_of_a_token_are_counted_by_head() -> None:
    cache = count_cache_bytes([[8, 0], [0, 4]], 8, 2)
    assert cache == BytesPerToken(key_dense=64, value_dense=64, key_pruned=24, value_pruned=32)
    assert cache.saved == pytest.approx(1 - 56 / 128)
    assert count_cache_bytes([[8, 8]], 8, 4).saved == 0
    assert count_cache_bytes([[0, 0]], 8, 4).saved == 1


def test_the_card_calls_no_choice_learned_and_names_its_method() -> None:
    text = card(method="random")
    assert "learned" not in text
    assert "| mask | `random`, made for owner/model |" in text


def test_the_card_says_what_was_pruned_and_what_it_saves() -> None:
    text = card()
    assert "# owner/model, K cache pruned by 62.5% (LeanK)" in text
    assert "| dense model | all | 64 | 64 | |" in text
    assert "| window | first 4, last 16 to 18 | 64 | 64 | 0% |" in text
    assert "| pruned | all between | 24 | 32 | 56.2% |" in text
    assert "0: 2, 4: 1, 8: 1" in text and "2 of 4" in text
    assert "`Qwen2ForCausalLM.from_pretrained(path)`" in text
    assert "trust_remote_code=True" in text and "Not measured" in text
    assert "| not known / 0.6250 |" in text and "`imported`" in text
    assert "## Recipe" not in text


def test_the_recipe_and_the_asked_ratio_of_a_trained_mask_are_told() -> None:
    text = card(method="leank", pruning_ratio_asked=0.6, recipe="steps: 3 # {braces}\n")
    assert "```yaml\nsteps: 3 # {braces}\n```" in text
    assert "0.6 / 0.6250" in text and "`leank`" in text


@pytest.mark.parametrize(("name", "base"), [("owner/model", "owner/model"), ("folder", None)])
def test_the_front_matter_is_yaml_for_the_hub(name: str, base: str | None) -> None:
    _, front, _ = card(name).split("---\n", 2)
    data = yaml.safe_load(front)
    assert data.get("base_model") == base
    assert data["library_name"] == "transformers"
    assert "leank" in data["tags"] and "license" not in data


def test_json_keeps_rows_of_numbers_on_one_line() -> None:
    value = {"a": [[1, 2], [3]], "b": {}, "c": [], "d": [{"x": None}], "é": "ü", "f": 0.1, "g": True}
    text = encode_json(value).decode()
    assert json.loads(text) == value
    assert "\n    [1, 2],\n" in text and '"é": "ü"' in text and text.endswith("}\n")
