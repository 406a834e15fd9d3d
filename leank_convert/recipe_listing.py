"""Listing of recipes: the packaged ones as a table, one of them, or every key there is.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from leank_convert.errors import LeanKError
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import PackagedRecipe, list_recipes, load_recipe

_COMMENT_COLUMN = 36
_LINE_LENGTH = 110

_EXPLANATION = """
context: tokens of the shortest and the longest sample, template and answer included.
pruned: the fraction of the model's K channels that is removed.

`leank-convert recipes NAME` prints a recipe, with what to expect of it and whether it was run on the real
weights here; `leank-convert recipes --keys` prints every key that a recipe may have, with its default.
"""


@dataclass(frozen=True)
class ListedRecipe:
    """A packaged recipe in brief.

    Attributes:
        name: What `--recipe` takes.
        model: Hub id, or `testbed`.
        summary: The first line of its opening comment.
        min_length: Tokens of the shortest sample.
        max_length: Tokens of the longest sample.
        pruning_ratios: Every ratio it asks for.
    """

    name: str
    model: str | None
    summary: str
    min_length: int
    max_length: int
    pruning_ratios: tuple[float, ...]


def render(name: str | None = None, *, keys: bool = False, as_json: bool = False) -> str:
    """What is asked for: a recipe, every key, or else the listing.

    Raises:
        LeanKError: If both a recipe and the keys are asked for, or there is no such recipe.
    """
    if name is not None and keys:
        raise LeanKError("`--keys` goes without a recipe's name: it prints what any recipe may hold")
    if name is not None:
        return render_recipe(name, as_json=as_json)
    return render_keys(as_json=as_json) if keys else render_recipes(as_json=as_json)


def describe_recipe(packaged: PackagedRecipe) -> ListedRecipe:
    """Read what the listing shows of a packaged recipe."""
    recipe = load_recipe(packaged.name)
    return ListedRecipe(
        name=packaged.name,
        model=packaged.model,
        summary=packaged.summary,
        min_length=recipe.data.min_length,
        max_length=recipe.data.max_length,
        pruning_ratios=recipe.pruning_ratios,
    )


def render_recipes(*, as_json: bool = False) -> str:
    """The packaged recipes: a table for people, or a JSON list."""
    listed = [describe_recipe(packaged) for packaged in list_recipes()]
    if as_json:
        return json.dumps([asdict(recipe) for recipe in listed])
    rows = [("recipe", "model", "context", "pruned")]
    rows += [
        (
            recipe.name,
            recipe.model or "any",
            f"{_render_length(recipe.min_length)} to {_render_length(recipe.max_length)}",
            ", ".join(f"{100 * ratio:g}%" for ratio in recipe.pruning_ratios),
        )
        for recipe in listed
    ]
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{size}}" for cell, size in zip(row, sizes, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines) + "\n" + _EXPLANATION


def render_recipe(name: str, *, as_json: bool = False) -> str:
    """A recipe as its author wrote it, or every key of it in JSON."""
    recipe = load_recipe(name)
    return json.dumps(recipe.model_dump(mode="json")) if as_json else recipe.text


def render_keys(*, as_json: bool = False) -> str:
    """A recipe of all defaults whose comments explain every key, or the JSON schema of recipes."""
    if as_json:
        return json.dumps(Recipe.model_json_schema())
    return "\n".join(_render_section(Recipe, 0)) + "\n"


def _render_length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _render_section(section: type[BaseModel], depth: int) -> Iterator[str]:
    yield from _comment("", section.__doc__ or "", depth)
    schema = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield f"{'  ' * depth}{name}:"
            yield from _render_section(field.annotation, depth + 1)
        else:
            default = field.get_default(call_default_factory=True)
            value = json.dumps(list(default) if isinstance(default, tuple) else default)
            shown = yaml.safe_dump(yaml.safe_load(value), default_flow_style=True).removesuffix("...\n")
            choices = _find_choices(schema[name])
            taken = f"choices: {', '.join(choices)}" if choices else ""
            text = "; ".join(filter(None, (field.description, taken)))
            yield from _comment(f"{'  ' * depth}{name}: {shown.strip()}", text, depth)


def _find_choices(schema: Mapping[str, Any]) -> list[str]:
    """The words that a key takes, alone or in a list."""
    parts = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())]
    return [*schema.get("enum", ()), *(choice for part in parts for choice in _find_choices(part))]


def _comment(text: str, comment: str, depth: int) -> Iterator[str]:
    """A line of YAML with its comment, which goes on below itself where the line ends."""
    indent = "  " * depth if not text else " " * _COMMENT_COLUMN
    wrapped = textwrap.wrap(comment, _LINE_LENGTH - len(indent) - 2, break_on_hyphens=False)
    if text and wrapped:
        yield f"{text:<{_COMMENT_COLUMN - 1}} # {wrapped.pop(0)}"
    elif text:
        yield text
    yield from (f"{indent}# {line}" for line in wrapped)
