"""Recipes as files: one YAML, checked whole before anything runs.

Precedence: defaults < the recipe's file < `--set key=value` < flags. An unknown key is an error with a
suggestion, and all problems come in one message.
Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
import importlib.resources
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from leank_convert.checkpoint_io import TRAINING_FOLDER
from leank_convert.errors import LeanKError, RecipeError, shorten
from leank_convert.files import open_file
from leank_convert.recipe import Recipe
from leank_convert.recipe_problems import Problem, judge, refuse
from leank_convert.recipe_yaml import MAX_BYTES, MAX_DEPTH, parse_yaml

if TYPE_CHECKING:
    from importlib.abc import Traversable

RUN_RECIPE_NAME = "recipe.yaml"  # what a training run was made by, in its folder
DERIVED = "# Derived for "  # how a recipe begins that nobody wrote, and whose opening comment is to be kept


@dataclass(frozen=True)
class PackagedRecipe:
    """A recipe that ships with the package."""

    name: str
    summary: str
    model: str | None
    text: str


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
        RecipeError: Everything that is wrong with the recipe, the overrides and the flags, at once.
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
    """Check a recipe whose text is at hand.

    Args:
        name: What messages call it.
        text: YAML.
        overrides: As `load_recipe` takes them.
        flags: As `load_recipe` takes them.
        training: As `load_recipe` takes it.

    Raises:
        RecipeError: As `load_recipe`.
    """
    document = _parse(name, text)
    changes = [f"--set {override}" for override in overrides]
    origins: dict[str, str] = {}
    problems: list[Problem] = []
    for override in overrides:
        problem = _apply_override(document, override, origins)
        if problem is not None:
            problems.append(Problem(problem))
    for key, value in flags.items():
        option = f"--{key.rpartition('.')[2].replace('_', '-')}"
        _write_key(document, key, value)
        origins[key] = option
        changes.append(f"{option} {value}")
    recipe, found = judge(document, origins, training=training)
    problems += found
    if problems:
        raise refuse(name, problems)
    if changes and not text.endswith("\n"):
        text += "\n"
    kept = text + "".join(f"# {line}\n" for change in changes for line in change.splitlines())
    recipe.remember_text(kept, _read_opening(text) if text.startswith(DERIVED) else "")
    return recipe


def list_recipes() -> list[PackagedRecipe]:
    """The packaged recipes by name, each with the first line of its opening comment."""
    return [
        PackagedRecipe(
            name=entry.name.removesuffix(".yaml"),
            summary=text.partition("\n")[0].lstrip("# ").strip(),
            model=(_parse(entry.name, text).get("model") or {}).get("id"),
            text=text,
        )
        for entry in sorted(_packaged_files(), key=lambda entry: entry.name.removesuffix(".yaml"))
        for text in [entry.read_text(encoding="utf-8")]
    ]


def find_recipe(model: str) -> str:
    """Find the packaged recipe of a model; of several, the one with the plainest name.

    Args:
        model: Hub id, or `testbed`.

    Raises:
        LeanKError: No packaged recipe is for `model`.
    """
    name = packaged_recipe(model)
    if name is None:
        raise LeanKError(
            f"there is no packaged recipe for `{model}`",
            hint="name one with `--recipe NAME|FILE`; `leank-convert recipes` lists what is packaged",
        )
    return name


def packaged_recipe(model: str) -> str | None:
    """As `find_recipe`; None where no packaged recipe is for `model`."""
    names = [recipe.name for recipe in list_recipes() if recipe.model == model]
    return min(names, key=len, default=None)


def choose_recipe(
    name: str | Path | None, run: Path, model: str | None, overrides: Sequence[str] = ()
) -> Recipe:
    """Load the recipe of a name, else that of the training run in a folder, else the packaged one of a model.

    Args:
        name: Packaged recipe or YAML file.
        run: A folder that may hold a training run, such as a checkpoint that `train` left.
        model: Hub id, or `testbed`; None if it is not known.
        overrides: As `load_recipe` takes them.

    Raises:
        LeanKError: If there is none, or it cannot be read.
    """
    trained = run / TRAINING_FOLDER / RUN_RECIPE_NAME
    if name is None and trained.exists():
        name = trained
    if name is None and model is None:
        raise LeanKError(
            f"`{run}` does not say what model it was made for, so it has no recipe",
            hint="name one with `--recipe NAME|FILE`; `leank-convert recipes` lists what is packaged",
        )
    return load_recipe(name if name is not None else find_recipe(str(model)), overrides)


def _packaged_files() -> Iterator[Traversable]:
    folder = importlib.resources.files("leank_convert._recipes")
    return (entry for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _read_text(path_or_name: str | Path) -> str:
    name = str(path_or_name)
    packaged = {entry.name.removesuffix(".yaml"): entry for entry in _packaged_files()}
    path = Path(path_or_name)
    try:
        is_file, exists = path.is_file(), path.exists()
    except OSError:  # a name longer than files have
        is_file = exists = False
    if name in packaged and not is_file:
        return packaged[name].read_text(encoding="utf-8")
    if not exists:
        close = difflib.get_close_matches(path.name.removesuffix(".yaml"), packaged, n=1)
        raise LeanKError(
            f"recipe `{shorten(name)}` is neither a file nor a packaged recipe",
            hint=f"did you mean `{close[0]}`?"
            if close
            else f"packaged recipes: {', '.join(sorted(packaged))}",
        )
    with open_file(path) as file:
        content = file.read(MAX_BYTES + 1)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise LeanKError(f"recipe `{name}` is not UTF-8 text: line {line}: {error.reason}") from None


def _read_opening(text: str) -> str:
    """The comment that a file begins with."""
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        document = parse_yaml(text)
    except ValueError as error:
        raise RecipeError(name, [str(error)]) from None
    if document is None or document == {}:
        # The defaults alone are nobody's recipe; a file cut short is more likely.
        raise RecipeError(name, ["the file holds no key"], "write at least one key, such as `seed: 0`")
    if not isinstance(document, dict):
        raise RecipeError(name, [f"the file holds a {type(document).__name__}, not a mapping of keys"])
    return document


def _apply_override(document: dict[str, Any], override: str, origins: dict[str, str]) -> str | None:
    """Write one `key=value` into `document`; returns what is wrong with it, if anything."""
    key, equals, value = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        return f"`--set {shorten(override)}` is not of the form `key=value`"
    if key.count(".") >= MAX_DEPTH:
        return f"`--set {shorten(override)}`: the key is nested deeper than {MAX_DEPTH} levels"
    try:
        parsed = parse_yaml(value)
    except ValueError as error:
        return f"`--set {shorten(override)}`: the value is not YAML: {error}"
    _write_key(document, key, parsed)
    origins[key] = f"--set {override}"
    return None


def _write_key(document: dict[str, Any], key: str, value: object) -> None:
    *parents, leaf = key.split(".")
    section = document
    for parent in parents:
        child = section.get(parent)
        # What is not a mapping is replaced: the override goes first, and validation judges the result.
        section[parent] = dict(child) if isinstance(child, Mapping) else {}
        section = section[parent]
    section[leaf] = value
