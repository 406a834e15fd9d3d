"""Resolve the training recipe: the one named, else the packaged one, else a derived one.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from leank_convert.checkpoint_io import TRAINING_FOLDER
from leank_convert.hub import known_name
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import RUN_RECIPE_NAME, load_recipe, packaged_recipe

if TYPE_CHECKING:
    import torch


def choose_training_recipe(
    model: str | Path,
    name: str | Path | None,
    out: Path | None,
    overrides: Sequence[str] = (),
    *,
    flags: Mapping[str, object] = MappingProxyType({}),
    resume: bool = False,
    device: str | torch.device | None = None,
) -> Recipe:
    """Load the recipe of a name, else the packaged one of a model, else derive one.

    A packaged recipe is found by a model's hub id, which a local folder's config.json may name. Where a run
    is resumed that was made by a derived recipe, that recipe is taken: the device's memory may be another
    today.

    Args:
        model: A local folder, a hub id, or `testbed`.
        name: Packaged recipe or YAML file; None to choose.
        out: Where the run goes, or is.
        overrides: As `load_recipe` takes them.
        flags: As `load_recipe` takes them.
        resume: Whether the run in `out` is resumed.
        device: What is trained on. Default: CUDA if there is any, else the CPU.

    Raises:
        LeanKError: As `load_recipe` and `derive_recipe`.
    """
    if name is None:
        known = known_name(model)
        name = None if known is None else packaged_recipe(known)
    if name is None and out is not None and resume:
        before = out / TRAINING_FOLDER / RUN_RECIPE_NAME
        name = before if before.exists() else None
    if name is not None:
        return load_recipe(name, overrides, flags=flags, training=True)
    from leank_convert.train.derive import derive_recipe

    return derive_recipe(model, overrides, flags=flags, device=device)
