"""Problems of a recipe: all of them at once, each in a sentence, found without a model.

Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any

from pydantic import ValidationError

from leank_convert.errors import RecipeError, cut, shorten
from leank_convert.files import user_path
from leank_convert.recipe import (
    HAYSTACK_SUFFIXES,
    ONE,
    SEVERAL,
    UNCHECKED,
    Problem,
    Recipe,
    find_contradictions,
    known_keys,
)

_MOST = 20  # problems in a message
_PATTERN_FILES = ("full_attention_heads.tsv", "config.json")  # DuoAttention's


def judge(
    document: Mapping[str, Any], origins: Mapping[str, str], *, training: bool
) -> tuple[Recipe, list[Problem]]:
    """Read a recipe's keys.

    Args:
        document: The keys as YAML has them.
        origins: What set a key, by its dotted name, where that was not the file.
        training: Whether to find what only training asks for, too.

    Returns:
        The recipe, and its problems; where there are some, keys that cannot be read have their defaults.
    """
    problems: list[Problem] = []
    try:
        recipe = Recipe.model_validate(document, context=UNCHECKED)
    except ValidationError as error:
        items = error.errors(include_url=False)
        problems = list(islice(_describe(items, origins), _MOST + 1))
        recipe = Recipe.model_validate(_without(document, items), context=UNCHECKED)
    # What depends on a key that could not be read is not known.
    unknown = [key for problem in problems for key in problem.keys]
    found = [*find_contradictions(recipe), *(_find_obstacles(recipe) if training else ())]
    problems += (
        each for each in found if not any(_overlap(key, other) for key in each.keys for other in unknown)
    )
    return recipe, problems


def refuse(name: str, problems: Sequence[Problem]) -> RecipeError:
    """One error for one or more problems: a single one's hint beside it, those of several in brackets."""
    if len(problems) == 1:
        return RecipeError(name, [problems[0].text], problems[0].hint)
    told = [f"{each.text} ({each.hint})" if each.hint else each.text for each in problems[:_MOST]]
    return RecipeError(name, [*told, *(["… and more"] if len(problems) > _MOST else [])])


def check_training(recipe: Recipe) -> None:
    """Refuse what a model is not needed for to see that a recipe cannot be trained by.

    Raises:
        RecipeError: If it brings its mask, or a file or a package that it names is missing.
    """
    if problems := list(_find_obstacles(recipe)):
        raise refuse("made in Python", problems)


def _find_obstacles(recipe: Recipe) -> Iterator[Problem]:
    """What training does not find that it needs."""
    if recipe.mask is not None:
        yield Problem(
            f"`mask` is {cut(recipe.mask)}: nothing is to be trained",
            ("mask",),
            "use `leank-convert export`, or remove the key",
        )
    if "wandb" in recipe.trackers and find_spec("wandb") is None:
        yield Problem(
            "`trackers` names `wandb`, which is not installed",
            ("trackers",),
            "`pip install wandb`, or leave it out",
        )
    source = recipe.data.haystack.source
    if source is not None and source.endswith(HAYSTACK_SUFFIXES) and not user_path(source).is_file():
        yield Problem(
            f"`data.haystack.source` is {cut(source)}, and there is no such file", ("data.haystack.source",)
        )
    pattern = recipe.heads.pattern
    if pattern is not None and recipe.method_row.has_gates:
        missing = [f"`{name}`" for name in _PATTERN_FILES if not (user_path(pattern) / name).is_file()]
        if missing:
            yield Problem(
                f"`heads.pattern` is {cut(pattern)}, and there is no {' and no '.join(missing)} in it",
                ("heads.pattern", "method"),
                "a folder of DuoAttention's `attn_patterns/` is needed",
            )


def _describe(items: Sequence[Any], origins: Mapping[str, str]) -> Iterator[Problem]:
    """One problem for each of pydantic's errors, in its words but for what YAML calls otherwise."""
    in_yaml = {
        "model_type": "a mapping of keys is needed",
        "tuple_type": "a list is needed",
        "too_short": "a list of one or more is needed",
    }
    wrong = {item["loc"][:-1] for item in items}
    for item in items:
        place, kind = item["loc"], item["type"]
        if kind == "too_short" and place in wrong:
            continue  # pydantic counts what is left of a list without its wrong items
        key = ".".join(_names(place))
        # The last of several is the one whose value is judged. An item of a list came with the whole list.
        sources = [origin for name, origin in origins.items() if _overlap(name, key)]
        origin = f" (from `{shorten(sources[-1])}`)" if sources else ""
        if kind == "extra_forbidden":
            close = _closest_key(key)
            hint = f"did you mean `{close}`?" if close else None
            yield Problem(f"unknown key `{shorten(key)}`{origin}", (key, *filter(None, [close])), hint)
            continue
        message = in_yaml.get(kind) or item["msg"].removeprefix("Value error, ")
        problem = f"{cut(item['input'])}: {message[:1].lower()}{message[1:]}"
        yield Problem(f"`{shorten(key)}` is {problem}{origin}", (key,))


def _without(document: Mapping[str, Any], items: Sequence[Any]) -> dict[str, Any]:
    """The keys that can be read."""
    found = _copy(document)
    for item in items:
        section: Any = found
        *above, last = _names(item["loc"])
        for part in above:
            if not isinstance(section.get(part), dict):
                last = part  # a wrong item of a list: without the whole list
                break
            section = section[part]
        section.pop(last, None)
    return found


def _copy(section: Mapping[Any, Any]) -> dict[str, Any]:
    """A section and those in it, without keys that are no text: pydantic refuses them, too."""
    texts = {key: value for key, value in section.items() if isinstance(key, str)}
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in texts.items()}


def _names(place: Sequence[str | int]) -> list[str]:
    return [str(part) for part in place if part not in (ONE, SEVERAL)]


def _overlap(key: str, other: str) -> bool:
    """Whether they are one key, or one is a section that holds the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


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
