"""Conversion of a model into pruned checkpoints: refusals first, then masks, then exports."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from leank_convert.device import is_first_process
from leank_convert.export import check_exportable, export_checkpoint, recover
from leank_convert.folders import lock_training
from leank_convert.hub import check_base_model
from leank_convert.methods.make import train_masks
from leank_convert.recipe import Recipe
from leank_convert.train.state import TrainingDirectory


def convert_model(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    mask_only: bool = False,
    base_model: str | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> list[Path]:
    """Make a model's masks by a recipe, and write a checkpoint of each.

    Args:
        model: A local folder, a hub id, or `testbed`.
        out: The folder to write; with several pruning ratios, that of the checkpoints' folders.
        recipe: What to make, by which method.
        resume: Go on with the run in `out`; its checkpoints are replaced.
        mask_only: Stop at the masks.
        base_model: What `model` is called on the hub, for the model cards; by default what is known of it.
        device: Default: CUDA if there is any, else the CPU.
        progress: Whether to draw a progress bar to stderr.

    Returns:
        The checkpoints, or the masks' files; nothing on processes but the first.

    Raises:
        LeanKError: As `train_masks` and `export_checkpoint`; what an export would refuse whatever the mask,
            before anything is trained.
    """
    check_base_model(base_model)
    directory = TrainingDirectory(Path(out))
    results = directory.results(recipe).values()
    overrides = recipe.model.config_overrides
    replaces = False
    with ExitStack() as stack:
        if is_first_process():
            for result in results:
                recover(result.out)
            stack.enter_context(lock_training(directory.out))
            replaces = resume and directory.state.exists()
            directory.check_usable(recipe, resume=resume)
            for result in results:
                check_exportable(model, result.out, config_overrides=overrides, overwrite=replaces)
        masks = train_masks(model, out, recipe=recipe, resume=resume, device=device, progress=progress)
        if not is_first_process():
            return []
        if mask_only:
            return [result.mask for result in results]
        return [
            export_checkpoint(
                model,
                mask,
                folder,
                config_overrides=overrides,
                base_model=base_model,
                overwrite=replaces,
            )
            for folder, mask in masks.items()
        ]
