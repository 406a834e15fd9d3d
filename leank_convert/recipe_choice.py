"""Resolve a recipe: the one given, else that of a training run, else the packaged one of a model.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from leank_convert.checkpoint_io import TRAINING_FOLDER
from leank_convert.errors import LeanKError
from leank_convert.hub import known_name
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import RUN_RECIPE_NAME, load_recipe, packaged_recipe


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
            hint="name one with `--recipe NAME|FILE`; `leank-convert recipes` lists what is packaged",
        )
    return found
