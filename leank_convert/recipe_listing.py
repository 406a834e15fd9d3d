"""Listing of recipes: the packaged ones as a table, one of them, or every key there is.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from leank_convert.errors import LeanKError
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import list_recipes, load_recipe
from leank_convert.tables import WIDTH, listing

_COMMENT_COLUMN = 36

_EXPLANATION = """
context: tokens of the shortest and the longest sample, template and answer
included.
pruned: the fraction of the model's K channels that is removed.

`leank-convert recipes NAME` prints a recipe, with what to expect of it and
whether it was run on the real weights here.
`leank-convert recipes --keys` prints every key of recipes, with its default.
"""


def render(name: str | None = None, *, keys: bool = False, as_json: bool = False) -> str:
    """Render a recipe, every key, or else the listing; LeanKError for both a recipe and the keys."""
    if name is not None and keys:
        raise LeanKError("`--keys` goes without a recipe's name: it prints what any recipe may hold")
    if name is not None:
        recipe = load_recipe(name)
        return json.dumps(recipe.model_dump(mode="json")) if as_json else recipe.text
    return render_keys(as_json=as_json) if keys else render_recipes(as_json=as_json)


def render_recipes(*, as_json: bool = False) -> str:
    """Render the packaged recipes: a table for people, or a JSON list."""
    listed = list_recipes()
    if as_json:
        facts = [
            {
                "name": packaged.name,
                "model": packaged.recipe.model.id,
                "summary": packaged.summary,
                "min_length": packaged.recipe.data.min_length,
                "max_length": packaged.recipe.data.max_length,
                "pruning_ratios": packaged.recipe.pruning_ratios,
            }
            for packaged in listed
        ]
        return json.dumps(facts)
    rows: list[tuple[str, ...]] = [("recipe", "context", "pruned")]
    for packaged in listed:
        recipe, data = packaged.recipe, packaged.recipe.data
        context = f"{_render_length(data.min_length)} to {_render_length(data.max_length)}"
        pruned = ", ".join(f"{100 * ratio:g}%" for ratio in recipe.pruning_ratios)
        rows += [(packaged.name, context, pruned), (f"model: {recipe.model.id or 'any'}",)]
    return "\n".join(listing(rows)) + "\n" + _EXPLANATION


def render_keys(*, as_json: bool = False) -> str:
    """Render a recipe of all defaults whose comments explain every key, or the JSON schema of recipes."""
    schema = Recipe.model_json_schema()
    return json.dumps(schema) if as_json else "\n".join(_render_section(schema, schema["$defs"], "")) + "\n"


def _render_length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _render_section(schema: Mapping[str, Any], sections: Mapping[str, Any], indent: str) -> Iterator[str]:
    yield from _comment("", schema["description"], indent)
    for name, key in schema["properties"].items():
        if "$ref" in key:
            yield f"{indent}{name}:"
            yield from _render_section(sections[key["$ref"].rpartition("/")[2]], sections, f"{indent}  ")
            continue
        value = yaml.safe_dump(key.get("default", {}), default_flow_style=True).removesuffix("...\n").strip()
        choices = _find_choices(key)
        taken = f"; choices: {', '.join(choices)}" if choices else ""
        yield from _comment(f"{indent}{name}: {value}", key["description"] + taken, indent)


def _find_choices(schema: Mapping[str, Any]) -> list[str]:
    parts = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())]
    return [*schema.get("enum", ()), *(choice for part in parts for choice in _find_choices(part))]


def _comment(text: str, comment: str, indent: str) -> Iterator[str]:
    """A line of YAML with its comment, which goes on below itself where the line ends."""
    margin = " " * _COMMENT_COLUMN if text else indent
    words = " ".join(comment.split())
    first, *rest = textwrap.wrap(words, WIDTH - len(margin) - 2, break_on_hyphens=False)
    yield f"{text:<{_COMMENT_COLUMN - 1}} # {first}" if text else f"{margin}# {first}"
    yield from (f"{margin}# {line}" for line in rest)
