"""Recipes as files: one YAML, checked whole before anything runs.

Precedence: defaults < the recipe's file < `--set key=value` < flags. An unknown key is an error with a
suggestion, and all problems come in one message.
Importing this module does not import torch.
"""

from __future__ import annotations

import difflib
import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from leank_convert.checkpoint_io import TRAINING_FOLDER
from leank_convert.errors import LeanKError, RecipeError
from leank_convert.recipe import ONE, SEVERAL, Recipe

if TYPE_CHECKING:
    from importlib.abc import Traversable

RUN_RECIPE_NAME = "recipe.yaml"  # what a training run was made by, in its folder


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
) -> Recipe:
    """Read and check a recipe.

    Args:
        path_or_name: A YAML file, or the bare name of a packaged recipe such as `quickstart`.
        overrides: `key=value` strings; keys are dotted (`stage1.steps`), values YAML; later ones win.
        flags: Values by dotted key, applied last. Messages name them as command-line options of the key's
            last part: `windows.flush_size` as `--flush-size`.

    Raises:
        RecipeError: Everything that is wrong with the recipe, the overrides and the flags, at once.
        LeanKError: There is no such recipe.
    """
    name = str(path_or_name)
    text = _read_text(path_or_name)
    document = _parse(name, text)
    changes = [f"--set {override}" for override in overrides]
    origins: dict[str, str] = {}
    problems: list[str] = []
    for override in overrides:
        problem = _apply_override(document, override, origins)
        if problem is not None:
            problems.append(problem)
    for key, value in flags.items():
        option = f"--{key.rpartition('.')[2].replace('_', '-')}"
        _write_key(document, key, value)
        origins[key] = option
        changes.append(f"{option} {value}")
    hint = None
    recipe = None
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        found, hint = _describe_errors(error, origins)
        problems += found
    if recipe is None or problems:
        raise RecipeError(name, problems, hint)
    if changes and not text.endswith("\n"):
        text += "\n"
    recipe.remember_text(text + "".join(f"# {line}\n" for change in changes for line in change.splitlines()))
    return recipe


def list_recipes() -> list[PackagedRecipe]:
    """The packaged recipes by name, each with the first line of its opening comment."""
    return [
        PackagedRecipe(
            name=entry.name.removesuffix(".yaml"),
            summary=text.partition("\n")[0].lstrip("# ").strip(),
            model=(yaml.safe_load(text).get("model") or {}).get("id"),
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
    names = [recipe.name for recipe in list_recipes() if recipe.model == model]
    if not names:
        raise LeanKError(
            f"there is no packaged recipe for `{model}`",
            hint="name one with `--recipe NAME|FILE`; `leank-convert recipes` lists what is packaged",
        )
    return min(names, key=len)


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
    path = Path(path_or_name)
    packaged = {entry.name.removesuffix(".yaml"): entry for entry in _packaged_files()}
    if not path.is_file() and name in packaged:
        return packaged[name].read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        close = difflib.get_close_matches(path.name.removesuffix(".yaml"), packaged, n=1)
        raise LeanKError(
            f"recipe `{name}` is neither a file nor a packaged recipe",
            hint=f"did you mean `{close[0]}`?"
            if close
            else f"packaged recipes: {', '.join(sorted(packaged))}",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise LeanKError(f"recipe `{name}` cannot be read: {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself lets the last of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key}` is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        document = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise RecipeError(name, [f"{place}{getattr(error, 'problem', None) or error}"]) from None
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
    if not equals or not key:
        return f"`--set {override}` is not of the form `key=value`"
    try:
        parsed = yaml.load(value, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        return f"`--set {override}`: the value is not YAML: {getattr(error, 'problem', None) or error}"
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


def _describe_errors(error: ValidationError, origins: Mapping[str, str]) -> tuple[list[str], str | None]:
    """One sentence per problem, and the hint: beside the problem where there are several."""
    problems: list[str] = []
    hints: list[str | None] = []
    items = error.errors(include_url=False)
    for item in items:
        place = item["loc"]
        within = [other for other in items if other["loc"][: len(place)] == place != other["loc"]]
        if item["type"] == "too_short" and within:
            continue  # pydantic counts what is left of a list without its wrong items
        key = ".".join(str(part) for part in place if part not in (ONE, SEVERAL))
        # The last of several is the one whose value is judged. An item of a list came with the whole list.
        sources = [
            origins[name]
            for name in origins
            if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")
        ]
        origin = f" (from `{sources[-1]}`)" if sources else ""
        hint = None
        if item["type"] == "extra_forbidden":
            problem = f"unknown key `{key}`{origin}"
            close = _closest_key(key)
            hint = f"did you mean `{close}`?" if close else None
        elif item["type"] == "model_type":
            problem = f"`{key}` is `{item['input']!r}`, not a mapping of keys{origin}"
        elif item["type"] == "tuple_type":
            problem = f"`{key}` is `{item['input']}`, not a list{origin}"
        elif item["type"] == "too_short":
            problem = f"`{key}` is `[]`, an empty list{origin}"
        elif item["type"] == "value_error" and isinstance(item["input"], dict | BaseModel):
            # A check over several keys names them itself, relative to its section.
            problem = (f"`{key}`: " if key else "") + str(item["ctx"]["error"])
        else:
            message = item["msg"].removeprefix("Value error, ")
            problem = f"`{key}` is `{item['input']}`: {message[:1].lower()}{message[1:]}{origin}"
        problems.append(problem)
        hints.append(hint)
    if len(problems) == 1:
        return problems, hints[0]
    return [
        f"{problem} ({hint})" if hint else problem for problem, hint in zip(problems, hints, strict=True)
    ], None


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


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a section, dotted, those of its own sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        annotations = (field.annotation, *get_args(field.annotation))
        for annotation in annotations:
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from known_keys(annotation, f"{prefix}{name}.")
