"""Resolve an export: mask, windows and config changes, by arguments, training run, recipe or package."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leank_convert.architectures import ModelFacts, read_model_facts
from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    TRAINING_FOLDER,
    Checkpoint,
    open_checkpoint,
    ratios_hint,
    read_config,
)
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.errors import LeanKError
from leank_convert.export.foreign import is_export
from leank_convert.export.packaged import describe_packaged, find_packaged, identify_model
from leank_convert.export.plan import plan_export
from leank_convert.export.publish import check_replaceable, recover
from leank_convert.fields import Fields
from leank_convert.folders import check_folder
from leank_convert.hub import check_base_model, is_hub_id, model_name, resolve_model
from leank_convert.mask import (
    MASK_FILE_NAME,
    ChannelMask,
    all_channels_mask,
    check_mask_fits,
    load_mask,
    resolve_mask,
)
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.masks import is_packaged
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import find_recipe, require_recipe
from leank_convert.text_part import warn_of_images
from leank_convert.value_weights import check_values_belong
from leank_convert.windows import Windows

MaskLike = ChannelMask | str | Path | None
RecipeLike = Recipe | str | Path | None

_logger = logging.getLogger("leank_convert")


@dataclass(frozen=True)
class ExportRequest:
    """An export as it is asked for: parameters of `export_checkpoint`, and `export_model`'s ratio of V."""

    model: str | Path
    mask: MaskLike
    out: Path
    pruning_ratio: float | None = None
    value_pruning_ratio: float | None = None
    recipe: RecipeLike = None
    overrides: Sequence[str] = ()
    all_channels: bool = False
    sink_size: int | None = None
    recent_size: int | None = None
    flush_size: int | None = None
    prune: str = "eager"
    config_overrides: Mapping[str, Any] | None = None
    base_model: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Choice:
    """The mask, windows and config changes of an export."""

    mask: ChannelMask
    mask_origin: str  # the mask's file, its packaged name or the option, for messages
    windows: Windows
    config_overrides: Mapping[str, Any]  # keys of config.json to replace


@dataclass(frozen=True)
class Export:
    """An export that has been resolved and checked; nothing is written yet."""

    request: ExportRequest
    checkpoint: Checkpoint  # the model's folder, its headers read
    config: Mapping[str, Any]  # the model's config.json, overrides applied
    facts: ModelFacts  # of that
    choice: Choice

    @property
    def provenance(self) -> MaskProvenance:
        """Where the mask comes from, as far as that is known."""
        return self.choice.mask.provenance or MaskProvenance.for_model(
            model_name(self.request.model),
            self.facts,
            method="all-channels" if self.choice.mask.channel_mask.all() else "imported",
            **self.choice.windows.sizes,
        )


def resolve_export(request: ExportRequest) -> Export:
    """Resolve an export, and refuse what can be refused by headers alone.

    Raises:
        LeanKError: If anything about the source, the mask, the recipe or the target is wrong.
    """
    check_base_model(request.base_model)
    recover(request.out)  # a training's mask may be among what is left to move
    choice = choose(request)
    checkpoint, config, facts = open_source(request.model, request.out, choice.config_overrides)
    check_mask_fits(choice.mask, facts, mask_origin=choice.mask_origin, model_origin=str(request.model))
    plan_export(checkpoint, choice.mask, facts)
    known = choice.mask.provenance
    if choice.mask.value_basis is not None and known is not None:
        origins = {"mask_origin": choice.mask_origin, "model_origin": str(request.model)}
        check_values_belong(known, checkpoint, facts, name=identify_model(request.model), **origins)
    refuse_to_lose_mask(request.out, choice.mask, overwrite=request.overwrite)
    return Export(request, checkpoint, config, facts, choice)


def open_source(
    model: str | Path, out: Path, config_overrides: Mapping[str, Any] | None
) -> tuple[Checkpoint, dict[str, Any], ModelFacts]:
    """Open a model's folder; return it, its config with the overrides applied, and the facts of that.

    Raises:
        LeanKError: If it is no complete model, or overlaps the folder to write.
    """
    folder = resolve_model(model)
    refuse_overlap(folder, out)
    checkpoint = open_checkpoint(folder)
    warn_of_images(folder)
    config = apply_config_overrides(checkpoint.config, config_overrides or {})
    return checkpoint, config, read_model_facts(config, origin=str(folder / CONFIG_NAME))


def refuse_overlap(folder: Path, out: Path) -> None:
    """Refuse, by a LeanKError, to write into a model's own folder, or around it."""
    source, target = folder.resolve(), check_folder(out)
    if source == target or source in target.parents or target in source.parents:
        raise LeanKError(
            f"`{out}` overlaps the source `{folder}`", hint="name a folder outside the model's own"
        )


def refuse_to_lose_mask(out: Path, mask: ChannelMask, *, overwrite: bool) -> None:
    """Refuse, by a LeanKError, to replace what is there unless asked to, and a training's mask by another.

    A mean of keys or a pruned V may be added to one that has none: nothing of it is lost.
    """
    check_replaceable(out, overwrite=overwrite)
    kept = out / MASK_FILE_NAME
    if kept.exists() and not overwrite and not mask.holds(load_mask(kept)):
        raise LeanKError(
            f"`{kept}` is another mask than the one to export; it would be lost",
            hint="name another folder, or pass `--overwrite`",
        )


def choose(request: ExportRequest) -> Choice:
    """Choose mask, windows and config changes.

    Raises:
        LeanKError: If there is no mask, one that cannot be read or is excluded by `all_channels`, a ratio is
            asked for and the mask is not a packaged one, the recipe is wrong, or a size makes no sense.
    """
    asked = Fields(vars(request), "export")
    asked.flag("overwrite")
    asked.flag("all_channels")
    model, mask, ratio = request.model, request.mask, request.pruning_ratio
    if ratio is not None:
        asked.number("pruning_ratio", 0, 1, below=True)
    if request.all_channels and mask is not None:
        raise LeanKError("`mask` and `all_channels` exclude each other", hint="pass one of them")
    if ratio is not None and (request.all_channels or isinstance(mask, ChannelMask)):
        raise LeanKError(f"a pruning ratio of {ratio:g} picks among packaged masks", hint="leave it out")
    find = require_recipe if request.overrides else find_recipe
    chosen = find(request.recipe, model, run=request.out, overrides=request.overrides)
    config_overrides = request.config_overrides
    if config_overrides is None:
        config_overrides = chosen.model.config_overrides if chosen else {}
    if isinstance(mask, ChannelMask):
        taken, origin = mask, "mask"
    elif request.all_channels:
        folder = resolve_model(model)
        config = apply_config_overrides(read_config(folder), config_overrides)
        facts = read_model_facts(config, origin=str(folder / CONFIG_NAME))
        taken, origin = all_channels_mask(facts), "--all-channels"
    else:
        path = _find_mask(request, chosen)
        taken, origin = load_mask(path), str(path)
        if is_packaged(path):
            origin = path.stem
            _logger.info("%s", describe_packaged(path.stem, taken, model))
        elif mask is None:
            _logger.info("mask `%s`, which prunes %.1f%%", path, 100 * taken.pruning_ratio)
    windows = Windows(**_choose_sizes(request, taken, chosen), prune=request.prune)
    return Choice(taken, origin, windows, config_overrides)


def _find_mask(request: ExportRequest, recipe: Recipe | None) -> Path:
    """The mask given, else the one that training left in `out`, else the recipe's, else the packaged one.

    That of an earlier export in `out` is not taken: who exports anew asks for what a new folder would get.
    With a ratio for V a packaged one that prunes V is taken before one of K alone, unless the recipe names a
    text to measure V on.
    """
    model, mask, out, pruning_ratio = request.model, request.mask, request.out, request.pruning_ratio
    assert not isinstance(mask, ChannelMask)
    trained = out / MASK_FILE_NAME
    is_trained = (out / TRAINING_FOLDER).exists()
    if mask is None and trained.exists() and (is_trained or not is_export(out)):
        mask = trained
    if mask is None and recipe is not None:
        mask = recipe.mask
    if mask is None and is_trained:
        raise LeanKError(
            f"`{out}` holds a training run, but not its mask",
            hint=ratios_hint(out)
            or "pass `--mask`, name another folder, or go on with a run that was stopped by `leank-convert "
            "train … --resume`",
        )
    path = None if mask is None else resolve_mask(mask, pruning_ratio)
    names_text = recipe is not None and recipe.data.haystack.source is not None
    if mask is None and request.value_pruning_ratio and not names_text:
        path = find_packaged(model, pruning_ratio, request.value_pruning_ratio)
    if mask is None and path is None:
        path = find_packaged(model, pruning_ratio)
    if path is None:
        if not is_hub_id(str(model)):  # that it is no model is told first
            open_source(model, out, None)
        raise LeanKError(
            f"no mask for `{model}`: none given, none of a training run in `{out}`, none in its recipe, "
            "none packaged for it",
            hint=f"learn one with `leank-convert train {model} -o {out}`, or pass `--mask FILE` or a "
            "name of those that `leank-convert masks` lists",
        )
    if pruning_ratio is not None and not is_packaged(path):
        raise LeanKError(
            f"a pruning ratio of {pruning_ratio:g} is asked for, and mask `{path}` is what it is: the ratio "
            "picks among packaged masks",
            hint="leave out `--pruning-ratio`, or name a packaged mask by `--mask NAME`",
        )
    return path


def _choose_sizes(request: ExportRequest, mask: ChannelMask, recipe: Recipe | None) -> dict[str, int]:
    """Each size as given, else by an override, else the mask's training, the recipe's, or the default."""
    set_keys = [override.partition("=")[0].strip() for override in request.overrides]
    sizes: dict[str, int] = {}
    for name in ("sink_size", "recent_size", "flush_size"):
        value = getattr(request, name)
        is_set = "windows" in set_keys or f"windows.{name}" in set_keys
        in_recipe = recipe is not None and name in recipe.windows.model_fields_set
        if value is not None:
            sizes[name] = value
        elif recipe is not None and (is_set or (in_recipe and mask.provenance is None)):
            sizes[name] = getattr(recipe.windows, name)
        elif mask.provenance is not None:
            sizes[name] = getattr(mask.provenance, name)
    return sizes
