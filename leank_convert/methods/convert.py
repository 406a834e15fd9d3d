"""Masks by any method; without training: score channels on a few prompts, keep the best, write the mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError, first_line
from leank_convert.mask import ChannelMask
from leank_convert.methods.scores import MEASURED, random
from leank_convert.methods.statistics import AttentionStatistics, mean_statistics, measure_attention
from leank_convert.recipe import Recipe
from leank_convert.train.directory import TrainingDirectory
from leank_convert.train.head_pattern import load_pattern
from leank_convert.train.loop import train_masks
from leank_convert.train.ranks import Ranks, join_ranks
from leank_convert.train.results import (
    describe_origin,
    refuse_foreign_masks,
    refuse_given_mask,
    write_result,
)
from leank_convert.train.selection import select_channels
from leank_convert.train.subject import find_model, load_subject


def make_masks(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool = True,
    model_override: str | None = None,
) -> dict[Path, ChannelMask]:
    """Make a model's channel masks by the recipe's method, and write each beside its future checkpoint.

    A method that trains is `train_masks`, with its log and state. Of the others, `static-norm` and
    `double-sparsity` average over the prompts of the first `calibration_prompts` samples,
    `high-frequency-ratio` takes the first alone, and `random`, like `duo-attention` of an imported pattern,
    does not load the model.

    Args:
        recipe: What to make, by which method.
        out: The output folder; created if need be.
        resume: Go on with training.
        device: Default: CUDA if there is any, else the CPU.
        progress: Whether to draw a progress bar to stderr.
        model_override: A model to take instead of the recipe's: local folder or hub id.

    Returns:
        By folder, the masks with their provenance; nothing on processes but the first.

    Raises:
        LeanKError: As `train_masks`. Also if a method that trains nothing is to be resumed or shared by
            several processes.
    """
    if recipe.is_trained:
        return train_masks(
            recipe, out, resume=resume, device=device, progress=progress, model_override=model_override
        )
    directory = TrainingDirectory(Path(out))
    with join_ranks(device) as ranks:
        ranks.on_first(lambda: _check(recipe, ranks, directory, resume))
        facts, name = _find_model(recipe, model_override)
        # Refuses a recipe that no channels can be selected by, before a prompt is run.
        _select_all(recipe, torch.zeros(facts.num_hidden_layers, facts.num_key_value_heads, facts.head_dim))
        gates = None
        if recipe.heads.pattern is not None and recipe.has_gates:
            gates = load_pattern(recipe, facts)
            scores = gates.expand(-1, -1, facts.head_dim)
        elif recipe.method in MEASURED:
            scores = MEASURED[recipe.method](_measure(recipe, ranks.device, progress, model_override))
        else:
            scores = random(facts, recipe.seed)
    chosen = _select_all(recipe, scores)
    return {
        result.out: write_result(
            ChannelMask(
                chosen[ratio],
                provenance=describe_origin(recipe, ratio, name, facts),
            ),
            result,
            recipe,
            gates=gates,
        )
        for ratio, result in directory.results(recipe).items()
    }


def _check(recipe: Recipe, ranks: Ranks, directory: TrainingDirectory, resume: bool) -> None:
    if ranks.num_ranks > 1:
        raise LeanKError(
            f"`method: {recipe.method}` trains nothing that {ranks.num_ranks} processes could share",
            hint="start one process; `--set model.device_map=auto` spreads a large model over all GPUs",
        )
    refuse_given_mask(recipe)
    directory.check_usable(recipe, resume=resume)
    refuse_foreign_masks(recipe, directory)


def _find_model(recipe: Recipe, model_override: str | None) -> tuple[ModelFacts, str]:
    files = find_model(recipe, model_override)
    return files.facts, files.name


def _measure(
    recipe: Recipe, device: torch.device, progress: bool, model_override: str | None
) -> AttentionStatistics:
    """The mean over the recipe's calibration prompts."""
    num_prompts = 1 if recipe.method == "high-frequency-ratio" else recipe.calibration_prompts
    measured: list[AttentionStatistics] = []
    try:
        subject = load_subject(recipe, device, model_override)
        samples = SampleSource(subject.tokenizer, recipe.data, recipe.seed)
        samples.check()
        places: Sequence[int] = range(num_prompts)
        console = Console(stderr=True)
        for place in track(places, "measuring prompts", console=console, disable=not progress):
            measured.append(measure_attention(subject.model, samples.draw(place).prompt_ids()))
    except torch.OutOfMemoryError as error:
        raise LeanKError(
            f"memory does not suffice to run prompts of up to {recipe.data.max_length} tokens through model "
            f"`{model_override or recipe.model.id}`: {first_line(error)}",
            hint="lower `data.max_length`, or spread the weights over all GPUs by "
            "`--set model.device_map=auto`",
            exit_code=1,
        ) from error
    return mean_statistics(measured)


def _select_all(recipe: Recipe, scores: Tensor) -> dict[float, Tensor]:
    """The channels of every asked ratio, bool [L, H_kv, D]."""
    return {
        ratio: select_channels(
            scores,
            pruning_ratio=ratio,
            width_multiple=recipe.width_unit(scores.shape[-1]),
            rounding=recipe.rounding,
            max_width=recipe.max_width,
            budget=recipe.resolved_budget,
        )
        for ratio in recipe.pruning_ratios
    }
