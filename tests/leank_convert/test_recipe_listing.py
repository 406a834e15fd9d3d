"""What `leank-convert recipes` tells: the recipes side by side, and every key."""

import json
import re

import yaml

from leank_convert.recipe import Recipe, known_keys
from leank_convert.recipe_file import list_recipes, load_recipe
from leank_convert.recipe_listing import render_keys, render_recipes
from tests.checks import done

NAMES = [recipe.name for recipe in list_recipes()]


def test_listing_has_a_row_per_recipe_with_model_context_and_ratio():
    shown = re.sub(" {2,}", "  ", render_recipes())
    for name in NAMES:
        recipe = load_recipe(name)
        shortest, longest = recipe.data.min_length, recipe.data.max_length
        context = " to ".join(f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in (shortest, longest))
        assert f"{name}  {context}  70%\n  model: {recipe.model.id}\n" in shown


def test_json_listing_has_the_same_facts():
    listed = {recipe["name"]: recipe for recipe in json.loads(done("recipes", "--json"))}
    assert list(listed) == NAMES
    assert "stage1:" in done("recipes", "quickstart")
    assert json.loads(done("recipes", "quickstart", "--json"))["pruning_ratio"] == 0.7
    assert listed["qwen2.5-7b-instruct-yarn"] == {
        "name": "qwen2.5-7b-instruct-yarn",
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "summary": list_recipes()[NAMES.index("qwen2.5-7b-instruct-yarn")].summary,
        "min_length": 65536,
        "max_length": 98304,
        "pruning_ratios": [0.7],
    }


def test_keys_are_a_recipe_of_all_defaults(tmp_path):
    """So the page can be saved, changed and trained by."""
    printed = done("recipes", "--keys")
    path = tmp_path / "mine.yaml"
    path.write_text(printed)
    assert load_recipe(path).model_dump() == Recipe().model_dump()
    assert list(yaml.safe_load(printed)) == list(Recipe.model_fields)


def test_every_key_stands_with_its_description_and_its_choices():
    words = " ".join(render_keys().replace("#", " ").split())
    for key in known_keys(Recipe):
        assert f"{key.rpartition('.')[2]}:" in words
    for field in (*Recipe.model_fields.values(), *type(Recipe().data).model_fields.values()):
        assert (field.description or "") in words
    assert "choices: nearest, budget" in words
    assert "choices: retrieval, multi_value, passkey, variable_tracking" in words
