"""Problems of a recipe: all of them at once, each in a sentence, found without a model.

Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from leank_convert.errors import RecipeError, cut, shorten
from leank_convert.recipe import (
    HAYSTACK_SUFFIXES,
    ONE,
    SEVERAL,
    UNCHECKED,
    Recipe,
    find_contradictions,
    known_keys,
)

_MOST = 20  # problems in a message
_PATTERN_FILES = ("full_attention_heads.tsv", "config.json")  # DuoAttention's


class Problem(NamedTuple):
    """What is wrong, in a sentence, and what to do about it."""

    text: str
    hint: str | None = None


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
    wrong: list[str] = []
    try:
        recipe = Recipe.model_validate(document, context=UNCHECKED)
    except ValidationError as error:
        items = error.errors(include_url=False)
        shown = list(islice(_describe(items, origins), _MOST + 1))
        problems += (problem for problem, _ in shown)
        wrong += (key for _, keys in shown for key in keys)
        recipe = Recipe.model_validate(_without(document, items), context=UNCHECKED)
    contradictions = [(keys, Problem(text)) for keys, text in find_contradictions(recipe)]
    obstacles = _find_obstacles(recipe) if training else ()
    # What depends on a key that could not be read is not known.
    problems += (
        problem
        for keys, problem in (*contradictions, *obstacles)
        if not any(_overlap(key, other) for key in keys for other in wrong)
    )
    return recipe, problems


def refuse(name: str, problems: Sequence[Problem]) -> RecipeError:
    """One error for one or more problems: a single one's hint beside it, those of several in brackets."""
    if len(problems) == 1:
        return RecipeError(name, [problems[0].text], problems[0].hint)
    told = [f"{text} ({hint})" if hint else text for text, hint in problems[:_MOST]]
    return RecipeError(name, [*told, *(["… and more"] if len(problems) > _MOST else [])])


def check_training(recipe: Recipe) -> None:
    """Refuse what a model is not needed for to see that a recipe cannot be trained by.

    Raises:
        RecipeError: If it brings its mask, or a file or a package that it names is missing.
    """
    if problems := [problem for _, problem in _find_obstacles(recipe)]:
        raise refuse("made in Python", problems)


def _find_obstacles(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """What training does not find that it needs; with the keys that ask for it."""
    if recipe.mask is not None:
        yield (
            ("mask",),
            Problem(
                f"`mask` is {cut(recipe.mask)}: nothing is to be trained",
                "use `leank-convert export`, or remove the key",
            ),
        )
    if "wandb" in recipe.trackers and find_spec("wandb") is None:
        yield (
            ("trackers",),
            Problem(
                "`trackers` names `wandb`, which is not installed", "`pip install wandb`, or leave it out"
            ),
        )
    source = recipe.data.haystack.source
    if source is not None and source.endswith(HAYSTACK_SUFFIXES) and not _is_file(source):
        yield (
            ("data.haystack.source",),
            Problem(f"`data.haystack.source` is {cut(source)}, and there is no such file"),
        )
    pattern = recipe.heads.pattern
    if pattern is not None and recipe.method_row.has_gates:
        missing = [f"`{name}`" for name in _PATTERN_FILES if not _is_file(f"{pattern}/{name}")]
        if missing:
            text = f"`heads.pattern` is {cut(pattern)}, and there is no {' and no '.join(missing)} in it"
            yield (
                ("heads.pattern", "method"),
                Problem(text, "a folder of DuoAttention's `attn_patterns/` is needed"),
            )


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError):  # a name longer than files have; nobody's home
        return False


def _describe(items: Sequence[Any], origins: Mapping[str, str]) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """One problem for each of pydantic's errors, with the keys whose values are not known for it."""
    for item in items:
        place, kind, value = item["loc"], item["type"], item["input"]
        if kind == "too_short" and any(
            other["loc"][: len(place)] == place != other["loc"] for other in items
        ):
            continue  # pydantic counts what is left of a list without its wrong items
        key = ".".join(str(part) for part in place if part not in (ONE, SEVERAL))
        # The last of several is the one whose value is judged. An item of a list came with the whole list.
        sources = [origin for name, origin in origins.items() if _overlap(name, key)]
        origin = f" (from `{shorten(sources[-1])}`)" if sources else ""
        if kind == "extra_forbidden":
            close = _closest_key(key)
            hint = f"did you mean `{close}`?" if close else None
            yield Problem(f"unknown key `{shorten(key)}`{origin}", hint), (key, *filter(None, [close]))
            continue
        if kind == "model_type":
            problem = f"{cut(value)}, not a mapping of keys"
        elif kind == "tuple_type":
            problem = f"{cut(value)}, not a list"
        elif kind == "too_short":
            problem = "`[]`, an empty list"
        else:
            message = item["msg"].removeprefix("Value error, ")
            problem = f"{cut(value)}: {message[:1].lower()}{message[1:]}"
        yield Problem(f"`{shorten(key)}` is {problem}{origin}"), (key,)


def _without(document: Mapping[str, Any], items: Sequence[Any]) -> dict[str, Any]:
    """The keys that can be read."""
    found = _copy(document)
    for item in items:
        section: Any = found
        *above, last = (part for part in item["loc"] if part not in (ONE, SEVERAL))
        for part in above:
            if not isinstance(section.get(part), dict):
                section.pop(part, None)  # a wrong item of a list: without the whole list
                break
            section = section[part]
        else:
            section.pop(last, None)
    return found


def _copy(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in section.items()}


def _overlap(key: str, other: str) -> bool:
    """Whether they are one key, or one is a section that holds the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _closest_key(key: str) -> str | None:
    """The known key an unknown one may stand for: misplaced first, then misspelt, then anything alike."""
    known = list(known_keys(Recipe))
    section, _, leaf = key.rpartition(".")
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return same_leaf[0]
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    close = difflib.get_close_matches(leaf, siblings, n=1)
    if close:
        return siblings[close[0]]
    close = difflib.get_close_matches(key, known, n=1)
    return close[0] if close else None
