"""Resolve a recipe: the one named, that of a run, the packaged one, or a derived one.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from leank_convert.errors import LeanKError, cut
from leank_convert.files import user_path
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import find_recipe
from leank_convert.recipe_problems import describe, refuse

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
    folder = None if run is None else user_path(run)
    found = find_recipe(recipe, model, run=folder, overrides=overrides, flags=flags, training=training)
    if found is None:
        from leank_convert.train.derive import derive_recipe

        found = derive_recipe(model, overrides, flags=flags, device=device)
    if training and found.mask is not None and found.trains:
        given = {*flags, *(override.partition("=")[0].strip() for override in overrides)}
        return _take_from_mask(found, given)
    return found


# Keys of a recipe that say how channels of K are chosen.
_OF_KEYS = {"method", "rounding", "budget", "width_multiple", "max_width", "key_mean"}
_OF_KEYS |= {"stage1", "stage2", "heads"}  # sections


def _take_from_mask(recipe: Recipe, given: Set[str]) -> Recipe:
    """A recipe that learns V beside a mask, by the ratio and the windows that the mask was made with.

    Raises:
        LeanKError: If the mask cannot be read, `given` keys are its own, or they do not go with the others.
    """
    from leank_convert.mask import load_mask, resolve_mask

    assert recipe.mask is not None
    mask = load_mask(resolve_mask(recipe.mask))
    known = mask.provenance
    asked = None if known is None else known.pruning_ratio_asked  # an imported mask reaches some ratio
    own = {"pruning_ratio": round(mask.pruning_ratio, 4) if asked is None else asked}
    if known is not None:
        own |= {f"windows.{name}": getattr(known, name) for name in type(recipe.windows).model_fields}
    if taken := sorted(key for key in given if key.partition(".")[0] in _OF_KEYS):
        raise LeanKError(
            f"`{taken[0]}` is given beside mask {cut(recipe.mask)}, whose channels of K stay as they are",
            hint="leave it out, or learn another mask without `--mask`",
        )
    if clash := sorted({key for key in own if key in given or key.partition(".")[0] in given}):
        raise LeanKError(
            f"`{clash[0]}` is given beside mask {cut(recipe.mask)}, whose own is {own[clash[0]]}",
            hint="leave it out, or name another mask",
        )
    document = recipe.model_dump()
    for key, value in own.items():
        section, _, name = key.rpartition(".")
        (document[section] if section else document)[name] = value
    try:
        found = Recipe.model_validate(document)
    except ValidationError as error:
        raise refuse(f"with mask {recipe.mask}", [*describe(error, {})]) from error
    found.remember_text(found.to_yaml(), recipe.derivation)
    return found
