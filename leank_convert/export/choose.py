"""Resolve an export: mask, windows and config changes, by arguments, training run, recipe or package."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import CONFIG_NAME, TRAINING_FOLDER, read_config
from leank_convert.config_overrides import apply_config_overrides
from leank_convert.errors import LeanKError
from leank_convert.export.packaged import describe_packaged, find_packaged, suggest_packaged
from leank_convert.hub import resolve_model
from leank_convert.mask import MASK_FILE_NAME, ChannelMask, all_channels_mask, load_mask, resolve_mask
from leank_convert.masks import is_packaged
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import find_recipe, load_recipe
from leank_convert.windows import Windows

MaskLike = ChannelMask | str | Path | None
RecipeLike = Recipe | str | Path | None

_logger = logging.getLogger("leank_convert")


@dataclass(frozen=True)
class Choice:
    """What is exported of a model.

    Attributes:
        mask: Which channels are kept.
        mask_origin: The mask's file, its packaged name or the option, for messages.
        windows: Window sizes, and when to prune.
        config_overrides: Keys of config.json to replace.
    """

    mask: ChannelMask
    mask_origin: str
    windows: Windows
    config_overrides: Mapping[str, Any]


def choose(
    model: str | Path,
    mask: MaskLike,
    out: Path,
    *,
    pruning_ratio: float | None = None,
    recipe: RecipeLike = None,
    overrides: Sequence[str] = (),
    all_channels: bool = False,
    sink_size: int | None = None,
    recent_size: int | None = None,
    flush_size: int | None = None,
    prune: str = "eager",
    config_overrides: Mapping[str, Any] | None = None,
    mask_origin: str | Path = "mask",
) -> Choice:
    """Choose what to export; arguments are `export_checkpoint`'s.

    Raises:
        LeanKError: If there is no mask, one that cannot be read or is excluded by `all_channels`, a ratio is
            asked for and the mask is not a packaged one, the recipe is wrong, or a size makes no sense.
    """
    if all_channels and mask is not None:
        raise LeanKError("`mask` and `all_channels` exclude each other", hint="pass one of them")
    if pruning_ratio is not None and (all_channels or isinstance(mask, ChannelMask)):
        raise LeanKError(
            f"a pruning ratio of {pruning_ratio:g} picks among packaged masks", hint="leave it out"
        )
    chosen = _choose_recipe(model, out, recipe, overrides)
    if config_overrides is None:
        config_overrides = chosen.model.config_overrides if chosen else {}
    if isinstance(mask, ChannelMask):
        taken, origin = mask, str(mask_origin)
    elif all_channels:
        folder = resolve_model(model)
        config = apply_config_overrides(read_config(folder), config_overrides)
        facts = read_model_facts(config, origin=str(folder / CONFIG_NAME))
        taken, origin = all_channels_mask(facts), "--all-channels"
    else:
        path = _find_mask(model, mask, out, chosen, pruning_ratio)
        taken, origin = load_mask(path), str(path)
        if is_packaged(path):
            origin = path.stem
            _logger.info("%s", describe_packaged(path.stem, taken, model))
        elif mask is None:
            _logger.info("mask `%s`, which prunes %.1f%%", path, 100 * taken.pruning_ratio)
    given = {"sink_size": sink_size, "recent_size": recent_size, "flush_size": flush_size}
    set_keys = [override.partition("=")[0].strip() for override in overrides]
    sizes = _choose_sizes(given, set_keys, taken, chosen)
    return Choice(taken, origin, Windows(**sizes, prune=prune), config_overrides)


def _choose_recipe(
    model: str | Path, out: Path, recipe: RecipeLike, overrides: Sequence[str]
) -> Recipe | None:
    """The recipe given, else that of the training run in `out`, else the model's packaged one, if any."""
    if isinstance(recipe, Recipe):
        return recipe
    trained = out / TRAINING_FOLDER / "recipe.yaml"
    if recipe is None and trained.exists():
        recipe = trained
    if recipe is None:
        try:
            recipe = find_recipe(str(model))
        except LeanKError:
            if overrides:
                raise
            return None
    return load_recipe(recipe, overrides)


def _find_mask(
    model: str | Path, mask: str | Path | None, out: Path, recipe: Recipe | None, pruning_ratio: float | None
) -> Path:
    """The mask given, else the one that training left in `out`, else the recipe's, else the packaged one."""
    trained = out / MASK_FILE_NAME
    if mask is None and trained.exists():
        mask = trained
    if mask is None and recipe is not None:
        mask = recipe.mask
    if mask is None and (out / TRAINING_FOLDER).exists():
        raise LeanKError(
            f"`{out}` holds a training run, but not its mask",
            hint="pass `--mask`, name another folder, or go on with a run that was stopped by `leank-convert "
            "train … --resume`",
        )
    path = find_packaged(model, pruning_ratio) if mask is None else resolve_mask(mask, pruning_ratio)
    if path is None:
        raise LeanKError(
            f"no mask for `{model}`: none given, none in `{out}`, none in its recipe, none packaged for it",
            hint=f"learn one with `leank-convert train {model} -o {out}`, or pass `--mask FILE`"
            + suggest_packaged(model),
        )
    if pruning_ratio is not None and not is_packaged(path):
        raise LeanKError(
            f"a pruning ratio of {pruning_ratio:g} is asked for, and mask `{path}` is what it is: the ratio "
            "picks among packaged masks",
            hint="leave out `--pruning-ratio`, or name a packaged mask by `--mask NAME`",
        )
    return path


def _choose_sizes(
    given: Mapping[str, int | None], set_keys: Sequence[str], mask: ChannelMask, recipe: Recipe | None
) -> dict[str, int]:
    """Each size as given, else by an override, else the mask's training, the recipe's, or the default."""
    sizes: dict[str, int] = {}
    for name, value in given.items():
        is_set = "windows" in set_keys or f"windows.{name}" in set_keys
        in_recipe = recipe is not None and name in recipe.windows.model_fields_set
        if value is not None:
            sizes[name] = value
        elif recipe is not None and (is_set or (in_recipe and mask.provenance is None)):
            sizes[name] = getattr(recipe.windows, name)
        elif mask.provenance is not None:
            sizes[name] = getattr(mask.provenance, name)
    return sizes
