"""Conversion of a model into pruned checkpoints: refusals first, then masks, then exports."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from leank_convert.device import is_first_process
from leank_convert.export import MaskLike, check_exportable, choose, export_checkpoint, recover
from leank_convert.folders import lock_training
from leank_convert.hub import check_base_model
from leank_convert.methods.kv_scales import measure_kv_scales
from leank_convert.methods.make import train_masks
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import load_recipe
from leank_convert.train.state import TrainingDirectory


def convert_model(
    model: str | Path,
    out: str | Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    mask_only: bool = False,
    base_model: str | None = None,
    kv_dtype: str | None = None,
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
        kv_dtype: `fp8` stores keys and values in eight bits, `int4` in four; None as they come.
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
        # They are the model's, whatever the mask.
        scales = measure_kv_scales(model, recipe, device=device) if kv_dtype == "fp8" else None
        return [
            export_checkpoint(
                model,
                mask,
                folder,
                config_overrides=overrides,
                base_model=base_model,
                kv_dtype=kv_dtype,
                kv_scales=scales,
                overwrite=replaces,
            )
            for folder, mask in masks.items()
        ]


def export_model(
    model: str | Path,
    mask: MaskLike,
    out: str | Path,
    *,
    kv_dtype: str,
    device: str | torch.device | None = None,
    **options: Any,
) -> Path:
    """Write a checkpoint whose cache has a dtype of its own, with scales measured on the recipe's data.

    Args:
        model: A local folder, a hub id, or `testbed`.
        mask: As for `export_checkpoint`.
        out: The folder to write.
        kv_dtype: `fp8` stores keys and values in eight bits.
        device: Where scales are measured. Default: CUDA if there is any, else the CPU.
        options: As for `export_checkpoint`.

    Raises:
        LeanKError: As `export_checkpoint` and `measure_kv_scales`.
    """
    kept = {name: options.pop(name) for name in ("base_model", "overwrite") if name in options}
    choice = choose(model, mask, Path(out), **options)
    overrides = choice.config_overrides
    check_exportable(
        model, Path(out), config_overrides=overrides, overwrite=bool(kept.get("overwrite", False))
    )
    recipe = options.get("recipe")
    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe, options.get("overrides", ()))
    return export_checkpoint(
        model,
        choice.mask,
        out,
        **vars(choice.windows),
        config_overrides=overrides,
        mask_origin=choice.mask_origin,
        kv_dtype=kv_dtype,
        kv_scales=measure_kv_scales(model, recipe, out=out, device=device),
        **kept,
    )
