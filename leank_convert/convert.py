"""Conversion of a model into pruned checkpoints: refusals first, then masks, then exports."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from leank_convert.device import choose_device, is_first_process
from leank_convert.errors import LeanKError, LeanKMemoryError
from leank_convert.evaluate.rounding import answer_rounded
from leank_convert.export import CacheTrial, check_exportable, export_checkpoint, write_export
from leank_convert.export.publish import recover
from leank_convert.export.request import ExportRequest, MaskLike, resolve_export
from leank_convert.fields import Fields
from leank_convert.files import user_path
from leank_convert.folders import lock_training
from leank_convert.hub import check_base_model, model_name
from leank_convert.mask import ChannelMask, check_of_keys, load_mask
from leank_convert.methods.make import train_masks
from leank_convert.methods.measured_cache import measure_cache
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import find_recipe
from leank_convert.train.choice import choose_recipe
from leank_convert.train.state import TrainingDirectory
from leank_convert.value_weights import check_measurable

_logger = logging.getLogger("leank_convert")


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
    """Make a model's masks by a recipe, and write a checkpoint of each, or if asked the masks alone.

    With several pruning ratios `out` is that of the checkpoints' folders; `resume` goes on with the run in
    it, and replaces its checkpoints. Model cards call the model `base_model`, by default what is known of it.
    A `kv_dtype` of `fp8` stores keys and values in eight bits, `int4` in four, None as they come. The device
    is by default CUDA if there is any, else the CPU; `progress` draws a bar to stderr. Returned are the
    checkpoints, or the masks' files; on processes but the first, nothing.

    Raises:
        LeanKError: As `train_masks` and `export_checkpoint`; what an export would refuse whatever the mask,
            before anything is trained.
    """
    check_base_model(base_model)
    recipe = choose_recipe(recipe, model, training=True)
    directory = TrainingDirectory(user_path(out))
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
            for result in results:
                if not torch.equal(load_mask(result.mask).channel_mask, masks[result.out].channel_mask):
                    raise LeanKError(
                        f"`{result.out}` holds a checkpoint of another mask, which was left as it is",
                        hint="leave out `--mask-only`, or train into another folder",
                    )
            return [result.mask for result in results]
        # Means of keys are the model's; scales alone depend on a mask, by the basis of its V.
        measure = cache(lambda basis: measure_cache(model, recipe, device=device, value_basis=basis))
        measured = {
            folder: measure(mask.value_basis if kv_dtype == "fp8" else None)
            for folder, mask in masks.items()
            if kv_dtype is not None and _has_to_measure(mask, kv_dtype)
        }
        written, refused = [], []
        for folder, mask in masks.items():
            found = measured.get(folder)
            centred = mask if found is None else found.centre(mask)
            try:
                exported = export_checkpoint(
                    model,
                    centred,
                    folder,
                    config_overrides=overrides,
                    base_model=base_model,
                    kv_dtype=kv_dtype,
                    kv_scales=found.scales(centred) if found and kv_dtype == "fp8" else None,
                    try_cache=_trial(model, recipe, kv_dtype, device),
                    overwrite=replaces,
                )
            except LeanKError as error:  # the other ratios' are written all the same
                if len(masks) == 1:
                    raise
                _logger.warning("no checkpoint in `%s`: %s", folder, error.message)
                refused.append(error)
                continue
            written.append(exported)
        if refused:
            raise refused[0]
        return written


def export_model(
    model: str | Path,
    mask: MaskLike,
    out: str | Path,
    *,
    kv_dtype: str | None = None,
    key_mean: bool = True,
    value_pruning_ratio: float | None = None,
    device: str | torch.device | None = None,
    force: bool = False,
    **options: Any,
) -> Path:
    """Write a checkpoint whose keys are centred, whose V is pruned, or whose cache has a dtype of its own.

    What the mask lacks for it, the mean of keys and the basis of V, is measured on the recipe's data, and so
    are scales. A cache of a dtype of its own is tried before the checkpoint is there.

    Args:
        model: A local folder, a hub id, or `testbed`.
        mask: As for `export_checkpoint`.
        out: The folder to write.
        kv_dtype: `fp8` stores keys and values in eight bits, `int4` in four; None as they come.
        key_mean: Whether to centre keys; a cache of a dtype of its own does.
        value_pruning_ratio: Fraction of V's channels that pruned tokens lose; None: as the mask says.
        device: Where it is measured and tried. Default: CUDA if there is any, else the CPU.
        force: Write it whatever the trial says.
        options: As for `export_checkpoint`.

    Raises:
        LeanKError: As `export_checkpoint` and `measure_cache`; if the mask prunes V already, and is to prune
            it by a ratio; if a cache of this dtype loses answers.
    """
    flags = {} if value_pruning_ratio is None else {"value_pruning_ratio": value_pruning_ratio}
    if flags:
        Fields(flags, "export").number("value_pruning_ratio", 0, 1, below=True)
    out, overrides = user_path(out), options.get("overrides", ())
    named = find_recipe(options.get("recipe"), model, run=out, overrides=overrides, flags=flags)
    value_pruning_ratio = value_pruning_ratio or None  # 0, as a recipe's, leaves V as it is
    options |= {"recipe": named, "value_pruning_ratio": value_pruning_ratio}
    export = resolve_export(ExportRequest(model, mask, out, **options))
    choice, known = export.choice, export.provenance
    if flags and value_pruning_ratio is None:
        check_of_keys(choice.mask, choice.mask_origin)
    wanted = replace(choice.mask, provenance=known)
    if wanted.value_basis is not None and known.value_pruning_ratio_asked == value_pruning_ratio:
        value_pruning_ratio = None  # nothing is left to measure
    if value_pruning_ratio is not None:
        check_of_keys(choice.mask, choice.mask_origin)
        check_measurable(export.checkpoint, export.facts)
    recipe = choose_recipe(named, model, run=out, device=device)
    # Keys are measured as the checkpoint will turn them, whoever says so.
    section = recipe.model.model_copy(update={"config_overrides": dict(choice.config_overrides)})
    recipe = recipe.model_copy(update={"model": section})
    centres = key_mean or kv_dtype is not None
    keys = centres and _has_to_measure(wanted, kv_dtype)
    if keys or value_pruning_ratio is not None:
        windows = None if value_pruning_ratio is None else choice.windows
        measured = measure_cache(
            model, recipe, device=device, keys=keys, value_basis=wanted.value_basis, value_windows=windows
        )
        wanted = measured.centre(wanted) if centres else wanted
        if value_pruning_ratio is not None:
            wanted = measured.prune_values(wanted, value_pruning_ratio)
            _logger.info("directions of V were taken by their energy; `train --mask` learns which")
    return write_export(
        replace(export, choice=replace(choice, mask=wanted)),
        kv_dtype=kv_dtype,
        kv_scales=measured.scales(wanted) if kv_dtype == "fp8" else None,
        try_cache=_trial(model, recipe, kv_dtype, device, force=force),
    )


def _has_to_measure(mask: ChannelMask, kv_dtype: str | None) -> bool:
    """Whether a mask lacks its mean of keys, or a cache its scales, which are the model's."""
    return mask.key_mean is None or kv_dtype == "fp8"


def _trial(
    model: str | Path,
    recipe: Recipe,
    kv_dtype: str | None,
    device: str | torch.device | None,
    *,
    force: bool = False,
) -> CacheTrial | None:
    """What a checkpoint's cache goes through before it is there; None for one as it comes."""
    if kv_dtype is None:
        return None

    def try_cache(folder: Path) -> str | None:
        try:
            found = answer_rounded(folder, recipe, kv_dtype, choose_device(device))
        except LeanKMemoryError as error:
            if not force:
                raise
            _logger.warning("the cache was not tried: %s", error.message)
            return None
        if not force:
            found.check(model_name(model))
        return found.render()

    return try_cache
