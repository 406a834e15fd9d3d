"""Masks of a plan: made once each, kept in a folder each, taken from there the next time."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from leank_convert.errors import LeanKError
from leank_convert.mask import ChannelMask, load_mask
from leank_convert.methods import make_masks
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import load_recipe
from leank_convert.reproduce.plan import MaskRun, Sizes
from leank_convert.train import TrainingDirectory

_UNWATCHED = "trackers=[]"  # a run's log says enough of it


def load_main_recipe(sizes: Sizes) -> Recipe:
    """The main setting."""
    return load_recipe(sizes.recipe, sizes.overrides)


def make_run(run: MaskRun, sizes: Sizes, folder: Path, device: torch.device) -> dict[float, ChannelMask]:
    """Make a run's masks, go on with making them, or read them.

    Args:
        run: Which.
        sizes: Names the recipe that it changes.
        folder: Where it is kept.
        device: To train or measure on.

    Returns:
        By the pruning ratio that was asked for.

    Raises:
        LeanKError: As `make_masks`; also if the folder holds masks of another recipe.
    """
    ratios = f"pruning_ratio=[{', '.join(map(str, run.ratios))}]"
    recipe = load_recipe(sizes.recipe, [*sizes.overrides, *run.overrides, ratios, _UNWATCHED])
    directory = TrainingDirectory(folder)
    results = directory.results(recipe)
    # Where a kill came between the two, nothing says what the mask was made by.
    if all(result.mask.exists() and result.recipe.exists() for result in results.values()):
        for result in results.values():
            _check_recipe(result.recipe, recipe, folder)
        return {ratio: load_mask(result.mask) for ratio, result in results.items()}
    if not recipe.is_trained:
        # Killed while it wrote its masks. It has no state to go on from, and takes seconds.
        shutil.rmtree(folder, ignore_errors=True)
    resume = directory.folder.exists()
    if resume:
        _check_recipe(directory.recipe, recipe, folder)
    made = make_masks(recipe, folder, resume=resume, device=device)
    return {ratio: made[result.out] for ratio, result in results.items()}


def _check_recipe(kept: Path, recipe: Recipe, folder: Path) -> None:
    if kept.exists() and kept.read_text() != recipe.to_yaml():
        raise LeanKError(
            f"`{folder}` was made by another recipe (`{kept}`)",
            hint="remove this folder, or name another output folder",
        )
