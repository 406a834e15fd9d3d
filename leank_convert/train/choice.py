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
        LeanKError: As `find_recipe` and `derive_recipe`; if a mask to train beside cannot be read.
    """
    folder = None if run is None else Path(run)
    found = find_recipe(recipe, model, run=folder, overrides=overrides, flags=flags, training=training)
    if found is None:
        from leank_convert.train.derive import derive_recipe

        found = derive_recipe(model, overrides, flags=flags, device=device)
    return _take_from_mask(found) if training and found.mask is not None and found.trains else found


def _take_from_mask(recipe: Recipe) -> Recipe:
    """A recipe that learns V beside a mask, by the ratio and the windows that the mask was made with."""
    from leank_convert.mask import load_mask, resolve_mask

    assert recipe.mask is not None
    mask = load_mask(resolve_mask(recipe.mask))
    known = mask.provenance
    if known is None:
        return recipe.model_copy(update={"pruning_ratio": round(mask.pruning_ratio, 4)})
    sizes = {name: getattr(known, name) for name in type(recipe.windows).model_fields}
    asked = known.pruning_ratio_asked
    ratio = round(mask.pruning_ratio, 4) if asked is None else asked
    windows = recipe.windows.model_copy(update=sizes)
    return recipe.model_copy(update={"pruning_ratio": ratio, "windows": windows})
