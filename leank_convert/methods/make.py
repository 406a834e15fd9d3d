"""Masks by any method: train or measure, select, write."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import Tensor

from leank_convert.checkpoint_io import CONFIG_NAME, read_config
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.fields import Fields
from leank_convert.files import user_path
from leank_convert.folders import check_folder, lock_training
from leank_convert.held_out import HeldOut
from leank_convert.mask import ChannelMask
from leank_convert.methods.calibration import Calibration
from leank_convert.recipe import Recipe
from leank_convert.train.choice import choose_recipe
from leank_convert.train.gates import load_pattern, save_pattern
from leank_convert.train.held_out import check_held_out
from leank_convert.train.log import LOG_NAME, append_held_out, read_log
from leank_convert.train.loop import prepare, train, write_result
from leank_convert.train.model import find_trainable
from leank_convert.train.ranks import Ranks, join_ranks
from leank_convert.train.selection import note_origin, select_for
from leank_convert.train.state import TrainingDirectory

_logger = logging.getLogger("leank_convert")


def train_mask(
    model: str | Path,
    out: str | Path,
    *,
    recipe: Recipe | str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> ChannelMask:
    """Make a model's channel mask, by a recipe of one pruning ratio; everything else as `train_masks`.

    Raises:
        LeanKError: As `train_masks`; also if the recipe asks for several ratios.
    """
    chosen = choose_recipe(recipe, model, run=out if resume else None, training=True, device=device)
    if len(chosen.pruning_ratios) > 1:
        raise LeanKError(
            f"the recipe asks for {len(chosen.pruning_ratios)} masks, by `pruning_ratio` "
            f"{list(chosen.pruning_ratios)}",
            hint="call `train_masks`, or set one ratio",
        )
    masks = train_masks(model, out, recipe=chosen, resume=resume, device=device, progress=progress)
    return next(iter(masks.values()))


def train_masks(
    model: str | Path,
    out: str | Path,
    *,
    recipe: Recipe | str | Path | None = None,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> dict[Path, ChannelMask]:
    """Make a model's channel masks by a recipe's method, and write each beside its future checkpoint.

    A recipe of one pruning ratio leaves `out/channel_mask.safetensors`; one of several leaves
    `out/ratio-0.5/channel_mask.safetensors` and its like, from one stage 1. The run's log, events and
    resumable state go to `out/leank/`, and gates of heads, if the method has them, to `out/leank/heads/` in
    DuoAttention's format; a report goes to the folder `leank/` beside each mask. In the end a few held-out
    samples are answered dense and pruned: the result stands in the mask's provenance, log and report, and
    what is far off in a warning. Started by `torchrun` or
    `accelerate launch`, all processes share the samples of a training step, and the first of them writes.

    Args:
        model: A local folder, a hub id, or `testbed`, the small model that ships with leank-convert.
        out: The output folder; created if need be.
        recipe: A recipe, or its name or file; None for the model's packaged one, or else
            one that is derived from its shape and from what fits the device.
        resume: Go on from the state in `out/leank/`, with a warning from the beginning if none was saved
            yet. A finished run just gives its masks again.
        device: Default: CUDA if there is any, else the CPU.
        progress: Whether to draw a progress bar to stderr.

    Returns:
        By folder, the masks with their provenance, and with scaling factors where some were learned. A mask
        is not written beside a checkpoint, whose `config.json` holds the digest of the one there: that is for
        an export to replace.

    Raises:
        LeanKError: If the recipe names a mask and learns no V beside it, `out/leank/` exists and `resume` is
            not given, a folder holds a mask of another origin, the saved state belongs to another recipe,
            model or data, the model cannot be trained on, the device cannot be used, memory does not suffice,
            or the loss is not finite; if a method that trains nothing is to be resumed or shared by several
            processes. Also when Ctrl-C or SIGTERM ends a training run, after the step under way and with its
            state saved (exit code 130 or 143). Processes but the first exit where that one raises.
    """
    chosen = choose_recipe(recipe, model, run=out if resume else None, training=True, device=device)
    Fields({"resume": resume}, "training").flag("resume")
    directory = TrainingDirectory(user_path(out))
    results = directory.results(chosen)
    with ExitStack() as stack:
        with join_ranks(device) as ranks:
            ranks.on_first(lambda: _enter(stack, directory, results.values()))
            saved = ranks.on_first(lambda: prepare(chosen, directory, ranks.num_ranks, resume=resume))
            if chosen.trains:
                run = train(model, chosen, directory, ranks, saved, progress=progress)
                masks, gates, loaded = run.masks(), run.gates, run.loaded
                del run  # and what it holds for contexts and graphs: samples need that memory
                gc.collect()
                records = ranks.on_first(lambda: read_log(directory.folder / LOG_NAME))
                checked = check_held_out(loaded, chosen, masks, ranks, records, progress=progress)
            else:
                masks, gates, checked = _measure(model, chosen, ranks, progress)
            is_first = ranks.is_first
        masks = {ratio: mask.noting(held_out=checked.get(ratio)) for ratio, mask in masks.items()}
        if is_first:
            _warn(checked)
            if chosen.trains:
                append_held_out(directory.folder / LOG_NAME, checked)
            if gates is not None and chosen.trains:
                save_pattern(gates, chosen.windows, directory.pattern)
            for ratio, result in results.items():
                write_result(masks[ratio], result, chosen, directory.folder, gates)
    return {result.out: masks[ratio] for ratio, result in results.items()}


def _enter(stack: ExitStack, directory: TrainingDirectory, results: Iterable[TrainingDirectory]) -> None:
    """Keep other runs out of the folder until the stack is left; LeanKError if a model lies there."""
    check_folder(directory.out)
    for result in results:
        if (result.out / CONFIG_NAME).exists() and "leank" not in read_config(result.out):
            raise LeanKError(
                f"`{result.out}` holds a model, beside which no mask is written",
                hint="train into another folder",
            )
    stack.enter_context(lock_training(directory.out))


def _warn(checked: Mapping[float, HeldOut]) -> None:
    for warning in dict.fromkeys(text for held_out in checked.values() for text in held_out.warnings):
        ratios = [ratio for ratio, held_out in checked.items() if warning in held_out.warnings]
        concerned = "" if len(ratios) == len(checked) else f"`pruning_ratio` {ratios}: "
        _logger.warning("%s%s", concerned, warning)


def _measure(
    model: str | Path, recipe: Recipe, ranks: Ranks, progress: bool
) -> tuple[dict[float, ChannelMask], Tensor | None, dict[float, HeldOut]]:
    """Masks of every ratio by a method that trains nothing; gates [L, H_kv, 1], if it imports some."""
    files = find_trainable(model, recipe)
    calibration = Calibration(files, recipe, ranks.device, progress=progress)
    for ratio in recipe.pruning_ratios:
        # Refuses a recipe that no channels can be selected by, before a prompt is run.
        select_for(recipe, torch.zeros(calibration.shape), ratio)
    gates = None
    if recipe.method_row.score is None:
        gates = load_pattern(recipe, files.facts)
        scores = gates.expand(calibration.shape)
    else:
        with out_of_memory(
            f"prompts of up to {recipe.data.max_length} tokens in model `{files.name}`",
            "lower `data.max_length`, or spread the weights over all GPUs by `--set model.device_map=auto`",
        ):
            scores = resolve_name(recipe.method_row.score)(calibration).cpu()
        if scores.shape != calibration.shape:
            raise LeanKError(
                f"`method: {recipe.method}` gives scores of shape {list(scores.shape)}; the model needs "
                f"{list(calibration.shape)} (layers, KV heads, channels)"
            )
    keys, values, masks = calibration.keys, calibration.values, {}
    for ratio in recipe.pruning_ratios:
        mask = ChannelMask(select_for(recipe, scores, ratio), key_mean=None if keys is None else keys.mean)
        mask = note_origin(mask, recipe, ratio, files, None if keys is None else keys.num_tokens)
        masks[ratio] = mask if values is None else values.prune(mask, recipe.value_pruning_ratio)
    if not recipe.held_out_samples:  # some methods do without the weights
        return masks, gates, {}
    return masks, gates, check_held_out(calibration.loaded, recipe, masks, ranks, (), progress=progress)
