"""The card of a checkpoint: what it says of mask and source, whose licence and name it takes."""

import html
import json
import os
import re

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown import markdown

from leank_convert.export.config_json import encode_json
from leank_convert.export.model_card import build_model_card, escaped
from leank_convert.export.source_card import Source, find_base_model, read_licence
from leank_convert.held_out import HeldOut, TokenShares
from leank_convert.mask import ChannelMask
from leank_convert.windows import Windows
from tests.checks import llama_facts, provenance_for

FACTS = llama_facts(2, 2, 8, model_type="qwen2")
ASKED = {"tasks": ("retrieval",), "min_length": 200, "max_length": 280, "seed": 1_000_000}
FOUND = {"num_contexts": 4, "num_answers": 16, "dense": 1.0, "pruned": 0.6875, "distillation": 0.02}
TOLD = {"warnings": ("the dense model answers 16 | 16",), "tokens": TokenShares(64, 1.0, 0.875)}
HELD_OUT = HeldOut(**ASKED, **FOUND, **TOLD)


def card(name="owner/model", *, mask_model=None, about=None, leank=None, **known):
    mask = torch.zeros(2, 2, 8, dtype=torch.bool)
    mask[0, 0] = mask[1, 1, :4] = True
    provenance = provenance_for(FACTS, mask_model or name, **{"method": "imported", **known})
    known_mask = ChannelMask(mask, provenance=provenance)
    about = Source(name, **about or {})
    return build_model_card(about, known_mask, FACTS, Windows(4, 16, 2), element_bytes=2, leank=leank or {})


def test_the_card_says_what_was_pruned_and_what_it_saves():
    text = card()
    assert "# model, K cache pruned by 62.5% (LeanK)" in text
    assert "| dense model | all | 64 | 64 | |" in text
    assert "| window | first 4, last 16 to 18 | 64 | 64 | 0% |" in text
    assert "| pruned | all between | 24 | 32 | 56.2% |" in text
    assert "0: 2, 4: 1, 8: 1" in text and "2 of 4" in text
    assert "`Qwen2ForCausalLM.from_pretrained(path)`" in text
    assert "trust_remote_code=True" in text and "Not measured" in text
    assert "| not known / 0.6250 |" in text and "`imported`" in text
    assert "## Recipe" not in text


def test_the_card_warns_of_adapters_where_heads_moved():
    text = card("owner/it's | <b>")  # the first layer's heads keep all and no channels
    assert "KV heads are in another order than in it's \\| &lt;b>, so an adapter" in text
    assert "`PeftModel.from_pretrained(model, adapter)` does not" in text
    assert "`leank-convert adapter LORA --checkpoint path/to/this/checkpoint -o NEW`" in text
    ordered = ChannelMask(torch.ones(2, 2, 8, dtype=torch.bool), provenance=provenance_for(FACTS, "m"))
    text = build_model_card(Source("m"), ordered, FACTS, Windows(4, 16, 2), element_bytes=2)
    assert "adapter" not in text and "The weights are the original ones. The cache" in text


RECIPE = "a: |\n  ```\n  # Not the recipe {braces}\nsource: /home/me/story.txt\n"


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"method": "random"}, ["| mask | `random`, made for owner/model |"]),
        ({"method": "leank", "pruning_ratio_asked": 0.6}, ["0.6 / 0.6250", "`leank`"]),
        (
            {"made_by": "its authors", "source": "their page, MIT", "evaluation": "in their paper"},
            [
                "| mask | `imported`, made for owner/model by its authors (their page, MIT) |",
                "Not measured when this checkpoint was written. The mask was evaluated in their paper.",
            ],
        ),
        # In a fence of its own, without local paths.
        ({"recipe": RECIPE}, [f"\n````yaml\n{RECIPE.replace('/home/me', '...')}````\n"]),
    ],
    ids=["method", "ratio", "origin", "recipe"],
)
def test_the_card_tells_what_is_known_of_the_mask(known, told):
    text = card(**known)
    assert all(part in text for part in told) and "learned" not in text


def test_the_card_is_titled_after_its_model_and_shows_the_recipe_that_ran_and_how_to_cite_the_method():
    text = card("my-folder", about={"base_model": "owner/base", "licence": {"license": "mit"}})
    assert "# base, K cache pruned" in text and "my-folder" not in text.partition("| mask |")[0]
    assert ModelCard(text).data.base_model == "owner/base"
    assert "Licence of the original: mit." in text and "names no licence" in card()
    text = card(recipe="# Expect: much\nseed: 7\n# --set stage1.steps=5\n", pruning_ratio_asked=0.6)
    _, _, shown = text.partition("```yaml\n")
    ran = yaml.safe_load(shown.partition("```")[0])
    assert (ran["seed"], ran["stage1"]["steps"], ran["pruning_ratio"]) == (7, 5, 0.6)
    assert "Expect" not in text and "eprint = {2508.02215}" in text


@pytest.mark.parametrize("chats", [False, True])
def test_the_example_of_the_card_asks_more_than_the_window_holds(chats):
    _, _, code = card(about={"chats": chats}).partition("```python\n")
    code = code.partition("```")[0]
    assert ("apply_chat_template" in code) == chats
    names = {}
    exec("\n".join(code.splitlines()[5:7]), names)  # the notes, in words of at least one token
    assert len(names["notes"].split()) > 4 + 16
    compile(code, "card", "exec")


@pytest.mark.parametrize("name", ["owner/model", "a: b", "---\nlicense: mit\n---", "it's | <b>`\"\u2028x\0"])
def test_the_hub_reads_the_front_matter_whatever_the_name(name):
    licence = {"license": "other", "license_name": "a: {b", "license_link": "https://a/b#c d"}
    text = card(name, held_out=HELD_OUT, about={"licence": licence})
    found = ModelCard(text).data
    assert {key: getattr(found, key) for key in licence} == licence
    assert sum(line.startswith("# ") for line in text.splitlines()) == 1
    assert "\n---\n" not in ModelCard(text).text


@pytest.mark.parametrize(
    "name", [r"\<img src=x onerror=alert(1)>", "[x](javascript:a)", "![p](https://p)", "`c`", "<b>", "\\`c`"]
)
def test_a_name_is_text_and_nothing_else_in_markdown(name):
    (line,) = markdown(escaped(name)).splitlines()
    assert re.fullmatch("<p>[^<]*</p>", line) and html.unescape(line[3:-4]) == name


def test_accuracy_is_what_was_measured_of_this_model_and_these_windows_alone():
    text = card(held_out=HELD_OUT)
    assert "16 questions on 4 held-out contexts" in text and "| 100.0% | 68.8% |" in text
    assert "| 64 answer tokens, each given those before it | 100.0% | 87.5% |" in text
    assert "> **Warning:** the dense model answers 16 \\| 16" in text and "Not measured" not in text
    for other in ({"sink_size": 5}, {"recent_size": 8}):
        text = card(**{"held_out": HELD_OUT, **other})
        assert "Not measured" in text
    text = card(held_out=HELD_OUT, leank={"kv_dtype": "int4"})
    assert "own dtype, for in int4 nothing was measured" in text
    assert "| 100.0% | 68.8% |" in text
    text = card(held_out=HELD_OUT, mask_model="owner/other")
    assert "made for owner/other, and is not evaluated on this model" in text


def test_json_keeps_rows_of_numbers_on_one_line():
    value = {"a": [[1, 2], [3]], "b": {}, "c": [], "d": [{"x": None}], "é": "ü", "f": 0.1, "g": True}
    text = encode_json(value).decode()
    assert json.loads(text) == value
    assert "\n    [1, 2],\n" in text and '"é": "ü"' in text and text.endswith("}\n")


LINK = "https://example.org/LICENSE"
LLAMA = f"""---
language: en
license: other
license_name: llama3.1
license_link: {LINK}
extra_gated_prompt: "long: text"
---
# A model
"""


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n", {"license": "apache-2.0"}),
        ("\ufeff---\r\nlicense: mit\r\n---\r\nText", {"license": "mit"}),
        (LLAMA, {"license": "other", "license_name": "llama3.1", "license_link": LINK}),
        ("---\nlicense: mit\nlicense_link: /home/me/LICENSE\n---\n", {"license": "mit"}),
        ("---\nlicense: [mit]\n---\n", {}),
        ('---\nlicense: "mit\\ntags: x"\n---\n', {}),
        ("# A model\n\n---\nlicense: mit\n---\n", {}),
        ("---\nlicense: mit\n", {}),
        (None, {}),
    ],
)
def test_the_licence_is_that_of_the_models_card(tmp_path, card, expected):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card.encode())
    assert read_licence(tmp_path) == expected


def test_a_licence_file_that_travels_stands_for_a_licence_without_a_name(tmp_path):
    (tmp_path / "LICENSE.txt").write_text("terms")
    assert read_licence(tmp_path) == {"license": "other", "license_link": "LICENSE.txt"}
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_link: LICENSE.txt\n---\n")
    assert read_licence(tmp_path)["license_link"] == "LICENSE.txt"


@pytest.mark.parametrize(
    "front", ["a: &a [x]\nb: [*a, *a]", "{" * 5000, "license: mit\nlicense: other", "a: !!python/name:os.x b"]
)
def test_a_card_that_is_no_plain_yaml_is_warned_of(tmp_path, caplog, front):
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    assert read_licence(tmp_path) == {}
    assert "cannot be read, nor its licence" in caplog.text and len(caplog.text) < 500


def test_a_card_that_is_no_file_or_far_too_long_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "README.md")
    assert read_licence(tmp_path) == {}
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").write_text("---\n" + "# a\n" * 10**5 + "license: mit\n---\n")
    assert read_licence(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "mask_model", "noted", "expected"),
    [
        ("owner/model", "owner/other", "owner/third", "owner/model"),
        ("folder", "owner/other", "owner/third", "owner/other"),
        ("folder", "other", "/home/me/model", None),
        ("folder", "other", 7, None),
        ("folder", "other", "a/" + "b" * 200, None),
    ],
)
def test_the_base_model_is_the_first_hub_id_that_is_known(tmp_path, name, mask_model, noted, expected):
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": noted}))
    assert find_base_model(tmp_path, name, mask_model) == expected
