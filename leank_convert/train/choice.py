"""Resolve the training recipe: the one named, the run's, the packaged one, or a derived one.

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


def choose_training_recipe(
    model: str | Path,
    recipe: Recipe | str | Path | None,
    out: Path | None,
    overrides: Sequence[str] = (),
    *,
    flags: Mapping[str, object] = MappingProxyType({}),
    resume: bool = False,
    device: str | torch.device | None = None,
) -> Recipe:
    """Load the recipe of a name, else that of the run to resume, else the packaged one, else derive one.

    Args:
        model: A local folder, a hub id, or `testbed`.
        recipe: A recipe, the name of a packaged one or a YAML file; None to choose.
        out: Where the run goes, or is.
        overrides: As `load_recipe` takes them.
        flags: As `load_recipe` takes them.
        resume: Whether the run in `out` is resumed.
        device: What is trained on. Default: CUDA if there is any, else the CPU.

    Raises:
        LeanKError: As `load_recipe` and `derive_recipe`.
    """
    run = out if resume else None
    found = find_recipe(recipe, model, run=run, overrides=overrides, flags=flags, training=True)
    if found is not None:
        return found
    from leank_convert.train.derive import derive_recipe

    return derive_recipe(model, overrides, flags=flags, device=device)
