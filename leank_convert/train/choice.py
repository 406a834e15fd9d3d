"""Resolve a recipe: the one named, that of a run, the packaged one, or a derived one.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from leank_convert.recipe import Recipe
from leank_convert.recipe_choice import find_recipe

if TYPE_CHECKING:
    import torch


def choose_recipe(
    recipe: Recipe | str | Path | None,
    model: str | Path,
    *,
    run: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] = MappingProxyType({}),
    training: bool = False,
    device: str | torch.device | None = None,
) -> Recipe:
    """Find a recipe as `find_recipe` does, with its arguments, or derive one for a model and a device.

    Raises:
        LeanKError: As `find_recipe` and `derive_recipe`.
    """
    folder = None if run is None else Path(run)
    found = find_recipe(recipe, model, run=folder, overrides=overrides, flags=flags, training=training)
    if found is not None:
        return found
    from leank_convert.train.derive import derive_recipe

    return derive_recipe(model, overrides, flags=flags, device=device)
