"""What is left beside a future checkpoint: mask, recipe, report."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.checkpoint_io import CONFIG_NAME
from leank_convert.errors import LeanKError
from leank_convert.files import write_atomically
from leank_convert.hub import model_name
from leank_convert.mask import ChannelMask, MaskProvenance, save_mask
from leank_convert.recipe import Recipe
from leank_convert.report.mask_report import REPORT_NAME, write_report
from leank_convert.train.directory import TrainingDirectory
from leank_convert.train.journal import read_log

_logger = logging.getLogger("leank_convert")


def describe_origin(recipe: Recipe, pruning_ratio: float, model: str, facts: ModelFacts) -> MaskProvenance:
    """Say where a mask comes from.

    Args:
        recipe: What it was made by.
        pruning_ratio: Which of the recipe's ratios it is for.
        model: What the user called the model.
        facts: The model's facts.
    """
    windows = recipe.windows
    return MaskProvenance.for_model(
        model_name(model),
        facts,
        method=recipe.method,
        sink_size=windows.sink_size,
        recent_size=windows.recent_size,
        flush_size=windows.flush_size,
        pruning_ratio_asked=pruning_ratio,
        width_multiple=recipe.width_unit(facts.head_dim),
        recipe=recipe.text,
        seed=recipe.seed,
    )


def write_result(
    mask: ChannelMask,
    result: TrainingDirectory,
    recipe: Recipe,
    log_path: Path | None = None,
    gates: Tensor | None = None,
) -> ChannelMask:
    """Write a mask with its recipe and report, and give it back.

    Whoever finds the checkpoint alone finds out what it was made by. A mask is not written beside a
    checkpoint, whose `config.json` holds the digest of the one there: that is for an export to replace.

    Args:
        mask: The mask.
        result: Where it goes.
        recipe: The recipe.
        log_path: The log of its training, if it had one.
        gates: Of the heads, learned or imported [L, H_kv, 1], if the method has them.
    """
    result.folder.mkdir(parents=True, exist_ok=True)
    if not (result.out / CONFIG_NAME).exists():
        save_mask(mask, result.mask)
    write_atomically(result.recipe, recipe.to_yaml().encode())
    _warn_of_ties(mask, recipe, gates)
    write_report(mask, read_log(log_path) if log_path else [], result.folder / REPORT_NAME, gates)
    return mask


def count_tied(mask: ChannelMask) -> int:
    """How many channels share the largest scaling factor; 0 of a mask without factors."""
    factors = mask.scaling_factors
    return 0 if factors is None else int((factors == factors.max()).sum())


def _warn_of_ties(mask: ChannelMask, recipe: Recipe, gates: Tensor | None) -> None:
    kept = int(mask.channel_mask.sum())
    if not kept:
        _logger.warning(
            "no head keeps a channel: only sink and recent window are seen; lower `pruning_ratio`"
        )
        return
    if gates is not None and recipe.learns_gates:
        heads = int(mask.channel_mask.any(-1).sum())
        if not recipe.keeps_whole_heads:
            heads = round((1 - recipe.heads.pruning_ratio) * gates.numel())
        _tell_ties("heads", "gate", gates, heads, "heads.l1_weight", recipe.heads.l1_weight)
    if mask.scaling_factors is not None:
        weight = recipe.stage1.l1_weight
        _tell_ties("channels", "factor", mask.scaling_factors, kept, "stage1.l1_weight", weight)


def _tell_ties(what: str, name: str, learned: Tensor, kept: int, key: str, weight: float) -> None:
    """Warn if more end with the largest value than are kept."""
    largest = learned.max()
    tied = int((learned == largest).sum())
    if tied > kept:
        _logger.warning(
            "%d %s ended with the largest %s and the mask keeps %d: which of them is left to their order; "
            "`%s` %s %g tells them apart",
            tied,
            what,
            name,
            kept,
            key,
            "above" if largest > 0 else "below",
            weight,
        )


def refuse_given_mask(recipe: Recipe) -> None:
    """Refuse a recipe that brings its mask.

    Raises:
        LeanKError: If it does.
    """
    if recipe.mask is not None:
        raise LeanKError(
            f"the recipe has `mask: {recipe.mask}`: nothing is to be trained",
            hint="use `leank-convert export`, or remove the key",
        )


def refuse_foreign_masks(recipe: Recipe, directory: TrainingDirectory) -> None:
    """Refuse to write masks where there are some before.

    Raises:
        LeanKError: If there is one: a run writes its masks when it is done, so it is of another origin.
    """
    for result in directory.results(recipe).values():
        if result.mask.exists():
            raise LeanKError(
                f"`{result.mask}` exists and is not of a run in `{directory.out}`: training would replace it",
                hint="train into another folder, or move the mask away",
            )
