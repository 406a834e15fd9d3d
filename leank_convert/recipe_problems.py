"""Problems of a recipe: all of a kind at once, each in a sentence, found without a model.

Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from pydantic import ValidationError

from leank_convert.errors import RecipeError, cut, shorten
from leank_convert.files import user_path
from leank_convert.recipe import HAYSTACK_SUFFIXES, ONE, SEVERAL, Recipe, known_keys

MOST = 20  # problems in a message
_PATTERN_FILES = ("full_attention_heads.tsv", "config.json")  # DuoAttention's
# What pydantic says of a type, where YAML calls it otherwise.
_IN_YAML = {
    "model_type": "a mapping of keys is needed",
    "tuple_type": "a list is needed",
    "too_short": "a list of one or more is needed",
}

Problem = tuple[str, str | None]
"""What is wrong with a recipe, in a sentence, and what to do about it."""


def refuse(name: str, problems: Sequence[Problem]) -> RecipeError:
    """One error for one or more problems: a single one's hint beside it, those of several in brackets."""
    if len(problems) == 1:
        return RecipeError(name, [problems[0][0]], problems[0][1])
    told = [f"{text} ({hint})" if hint else text for text, hint in problems[:MOST]]
    return RecipeError(name, [*told, *(["… and more"] if len(problems) > MOST else [])])


def check_training(recipe: Recipe) -> None:
    """Refuse, by a RecipeError, a recipe that cannot be trained by, as can be seen without a model."""
    if problems := list(find_obstacles(recipe)):
        raise refuse("made in Python", problems)


def find_obstacles(recipe: Recipe) -> Iterator[Problem]:
    """What training does not find that it needs."""
    if recipe.mask is not None and not recipe.trains:
        key = "values.steps" if recipe.value_pruning_ratio else "value_pruning_ratio"
        hint = f"use `leank-convert export`, remove the key, or set `{key}` to learn V beside it"
        yield f"`mask` is {cut(recipe.mask)}: nothing is to be trained", hint
    if "wandb" in recipe.trackers and find_spec("wandb") is None:
        yield "`trackers` names `wandb`, which is not installed", "`pip install wandb`, or leave it out"
    source = recipe.data.haystack.source
    if source is not None and source.endswith(HAYSTACK_SUFFIXES) and not user_path(source).is_file():
        yield f"`data.haystack.source` is {cut(source)}, and there is no such file", None
    pattern = recipe.heads.pattern
    if pattern is not None and recipe.method_row.has_gates:
        missing = [f"`{name}`" for name in _PATTERN_FILES if not (user_path(pattern) / name).is_file()]
        if missing:
            yield (
                f"`heads.pattern` is {cut(pattern)}, and there is no {' and no '.join(missing)} in it",
                "a folder of DuoAttention's `attn_patterns/` is needed",
            )


def describe(error: ValidationError, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Put each of pydantic's errors into a sentence; `origins` say what set a key where the file did not."""
    items = error.errors(include_url=False)
    wrong = {item["loc"][:-1] for item in items if item["loc"]}
    for item in items:
        place, kind = item["loc"], item["type"]
        message = _IN_YAML.get(kind) or item["msg"].removeprefix("Value error, ")
        if not place:  # keys that do not go together
            yield from ((line, None) for line in message.splitlines())
            continue
        if kind == "too_short" and place in wrong:
            continue  # pydantic counts what is left of a list without its wrong items
        key = ".".join(str(part) for part in place if part not in (ONE, SEVERAL))
        # The last of several is the one whose value is judged. An item of a list came with the whole list.
        sources = [
            origin
            for name, origin in origins.items()
            if f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")
        ]
        origin = f" (from `{shorten(sources[-1])}`)" if sources else ""
        if kind == "extra_forbidden":
            close = _closest_key(key)
            hint = f"did you mean `{close}`?" if close else None
            yield f"unknown key `{shorten(key)}`{origin}", hint
        else:
            problem = f"{cut(item['input'])}: {message[:1].lower()}{message[1:]}"
            yield f"`{shorten(key)}` is {problem}{origin}", None


def _closest_key(key: str) -> str | None:
    """The known key an unknown one may stand for: misplaced first, then misspelt, then anything alike."""
    known = list(known_keys(Recipe))
    section, _, leaf = key.rpartition(".")
    for name in known:
        if name.rpartition(".")[2] == leaf:
            return name
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    if close := difflib.get_close_matches(leaf, siblings, n=1):
        return siblings[close[0]]
    return next(iter(difflib.get_close_matches(key, known, n=1)), None)
