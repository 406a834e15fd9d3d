"""Recipe files: which one is meant; YAML, overrides and flags, read and checked whole before anything runs.

Precedence: defaults < the recipe's file < `--set key=value` < flags. An unknown key is an error with a
suggestion, and all problems of a kind come in one message.
Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
import importlib.resources
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from pydantic import ValidationError

from leank_convert.checkpoint_io import TRAINING_FOLDER
from leank_convert.errors import LeanKError, RecipeError, cut, first_line, shorten
from leank_convert.files import open_file, user_path
from leank_convert.hub import known_name
from leank_convert.recipe import Recipe
from leank_convert.recipe_problems import MOST, Problem, describe, find_obstacles, refuse

if TYPE_CHECKING:
    from importlib.abc import Traversable

RUN_RECIPE_NAME = "recipe.yaml"  # what a training run was made by, in its folder
DERIVED = "# Derived for "  # how a recipe begins that nobody wrote, and whose opening comment is to be kept
CHANGE = "# --set "  # begins the comment below a recipe that notes a change of it: an override, or a flag
_MAX_BYTES = 1 << 18  # PyYAML takes a second for them


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, less two things that recipes and model cards need not have.

    Aliases, as a few of them stand for gigabytes; and a key twice, of which PyYAML takes the last.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            _refuse(event, f"`*{shorten(str(event.anchor))}`: aliases are not read here; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                _refuse(key, f"key `{shorten(key.value)}` is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# A date is text: a file may be named by one.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)  # type: ignore[type-var]


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that ships with the package; its summary is the first line of its opening comment."""

    name: str
    summary: str
    recipe: Recipe


def find_recipe(
    recipe: Recipe | str | Path | None,
    model: str | Path | None,
    *,
    run: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] = MappingProxyType({}),
    training: bool = False,
) -> Recipe | None:
    """Find a recipe: the one named, else that of a run in a folder, else the model's packaged one, else None.

    A packaged recipe is found by a model's hub id, which a local folder's config.json may name. A recipe that
    has been read stays as it is; others are read with `overrides`, `flags` and `training` as by
    `load_recipe`.

    Raises:
        LeanKError: As `load_recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe is None and run is not None:
        trained = run / TRAINING_FOLDER / RUN_RECIPE_NAME
        recipe = trained if trained.exists() else None
    if recipe is None and model is not None:
        known = known_name(model)
        recipe = None if known is None else packaged_recipe(known)
    return None if recipe is None else load_recipe(recipe, overrides, flags=flags, training=training)


def require_recipe(
    recipe: Recipe | str | Path | None, model: str | Path | None, *, run: Path, overrides: Sequence[str] = ()
) -> Recipe:
    """Find a recipe, as `find_recipe` does; raises as `load_recipe`; also if there is none."""
    found = find_recipe(recipe, model, run=run, overrides=overrides)
    if found is None:
        raise LeanKError(
            f"`{run}` does not say what model it was made for, so it has no recipe"
            if model is None
            else f"there is no packaged recipe for `{model}`",
            hint="name one of `leank-convert recipes`, or a file, by `--recipe`; or correct the model's name",
        )
    return found


def load_recipe(
    path_or_name: str | Path,
    overrides: Sequence[str] = (),
    *,
    flags: Mapping[str, object] = MappingProxyType({}),
    training: bool = False,
) -> Recipe:
    """Read and check a recipe.

    Args:
        path_or_name: A YAML file, or the bare name of a packaged recipe such as `quickstart`.
        overrides: `key=value` strings; keys are dotted (`stage1.steps`), values YAML; later ones win.
        flags: Values by dotted key, applied last. Messages name them as command-line options of the key's
            last part: `windows.flush_size` as `--flush-size`.
        training: Whether to look for the files and packages that only training needs, too.

    Raises:
        RecipeError: All keys and values of the recipe, the overrides and the flags that are wrong; if there
            are none, all that do not go together; else all files and packages that are missing.
        LeanKError: There is no such recipe.
    """
    text = _read_text(path_or_name)
    return parse_recipe(str(path_or_name), text, overrides, flags=flags, training=training)


def parse_recipe(
    name: str,
    text: str,
    overrides: Sequence[str] = (),
    *,
    flags: Mapping[str, object] = MappingProxyType({}),
    training: bool = False,
) -> Recipe:
    """Check a recipe's text, which messages call `name`; arguments and errors as of `load_recipe`."""
    texts = isinstance(overrides, Sequence) and all(isinstance(each, str) for each in overrides)
    if isinstance(overrides, str) or not texts:
        raise RecipeError(name, [f"`overrides` is {cut(overrides)}, not a list of `key=value` texts"])
    try:
        document = parse_yaml(text)
    except ValueError as error:
        raise RecipeError(name, [str(error)]) from None
    if document is None or document == {}:
        # The defaults alone are nobody's recipe; a file cut short is more likely.
        raise RecipeError(name, ["the file holds no key"], "write at least one key, such as `seed: 0`")
    if not isinstance(document, dict):
        raise RecipeError(name, [f"the file holds a {type(document).__name__}, not a mapping of keys"])
    changes = [f"--set {override}" for override in overrides]
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    for override, change in zip(overrides, changes, strict=True):
        key, equals, value = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            problems.append((f"`{shorten(change)}` is not of the form `key=value`", None))
            continue
        try:
            _write_key(document, key, parse_yaml(value))
            origins[key] = change
        except ValueError as error:
            problems.append((f"`{shorten(change)}`: the value is not YAML: {error}", None))
    for key, flag in flags.items():
        option = f"--{key.rpartition('.')[2].replace('_', '-')}"
        _write_key(document, key, flag)
        origins[key] = option
        changes.append(f"--set {key}={json.dumps(flag)}")  # which is YAML, too, and can be read again
    try:
        recipe = Recipe.model_validate(document)
        problems += find_obstacles(recipe) if training else ()
    except ValidationError as error:
        problems += itertools.islice(describe(error, origins), MOST + 1)
    if problems:
        raise refuse(name, problems)
    if changes and not text.endswith("\n"):
        text += "\n"
    kept = text + "".join(f"# {line}\n" for change in changes for line in change.splitlines())
    opening = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True))
    recipe.remember_text(kept, "".join(opening) if text.startswith(DERIVED) else "")
    return recipe


def list_recipes() -> list[PackagedRecipe]:
    """The packaged recipes by name."""
    texts = {name: entry.read_text(encoding="utf-8") for name, entry in sorted(_packaged_files().items())}
    return [
        PackagedRecipe(name, text.partition("\n")[0].lstrip("# ").strip(), parse_recipe(name, text))
        for name, text in texts.items()
    ]


def packaged_recipe(model: str) -> str | None:
    """Find the name of a hub id's or `testbed`'s packaged recipe, of several the plainest; None without."""
    names = [packaged.name for packaged in list_recipes() if packaged.recipe.model.id == model]
    return min(names, key=len, default=None)


def parse_yaml(text: str) -> object:
    """Read YAML of one document; else ValueError, in one sentence, with the line where it is known."""
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 10} KB, which no recipe is")
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{place}{shorten(problem, 200)}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except Exception as error:  # PyYAML lets out whatever fails where it makes a number or a date of a text
        problem = f"a value cannot be read: {first_line(error)}; put it in quotes if it is text"
        raise ValueError(problem) from error


def _refuse(place: Any, problem: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def _packaged_files() -> dict[str, Traversable]:
    folder = importlib.resources.files("leank_convert._recipes")
    return {
        entry.name.removesuffix(".yaml"): entry for entry in folder.iterdir() if entry.name.endswith(".yaml")
    }


def _read_text(path_or_name: str | Path) -> str:
    path = Path(name := str(path_or_name))
    packaged = _packaged_files()
    try:
        path = user_path(path_or_name)
        is_file, exists = path.is_file(), path.exists()
    except LeanKError:  # a name longer than files have; nobody's home
        is_file = exists = False
    if name in packaged and not is_file:
        return packaged[name].read_text(encoding="utf-8")
    if not exists:
        close = difflib.get_close_matches(path.name.removesuffix(".yaml"), packaged, n=1)
        listed = f"packaged recipes: {', '.join(sorted(packaged))}"
        raise LeanKError(
            f"recipe `{shorten(name)}` is neither a file nor a packaged recipe",
            hint=f"did you mean `{close[0]}`?" if close else listed,
        )
    with open_file(path) as file:
        content = file.read(_MAX_BYTES + 1)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise LeanKError(f"recipe `{name}` is not UTF-8 text: line {line}: {error.reason}") from None


def _write_key(document: dict[str, Any], key: str, value: object) -> None:
    *parents, leaf = key.split(".")
    section = document
    for parent in parents:
        child = section.get(parent)
        # What is not a mapping is replaced: the override goes first, and validation judges the result.
        section[parent] = dict(child) if isinstance(child, Mapping) else {}
        section = section[parent]
    section[leaf] = value
