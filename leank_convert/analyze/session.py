"""Loads a mask's model and measures it on prompts of a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

from leank_convert.analyze.impact import count_passes, measure_impact
from leank_convert.analyze.measurement import Measurement, measure_model
from leank_convert.analyze.prompts import draw_prompts
from leank_convert.device import choose_device
from leank_convert.mask import ChannelMask, check_mask_fits
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import find_recipe, load_recipe
from leank_convert.train.subject import find_model, load_subject


def choose_recipe(artifact: str, model: str, name: str | None, overrides: tuple[str, ...]) -> Recipe:
    """The recipe whose tasks and lengths are taken: by name, of the run in a folder, or the model's.

    Raises:
        LeanKError: If there is none, or it cannot be read.
    """
    trained = Path(artifact).expanduser() / "leank" / "recipe.yaml"
    if name is None and trained.exists():
        name = str(trained)
    return load_recipe(name or find_recipe(model), overrides)


def measure(
    mask: ChannelMask,
    mask_origin: str,
    recipe: Recipe,
    model: str,
    *,
    num_samples: int,
    seed: int,
    device: str | None,
    impact: bool,
) -> Measurement:
    """Measure a mask's model.

    Args:
        mask: The mask.
        mask_origin: What the user called it.
        recipe: Tasks, lengths, dtype and overrides of the model's config.
        model: What the user called the model.
        num_samples: Prompts of each task at each length.
        seed: Of the prompts.
        device: Where to compute, None for CUDA if there is any.
        impact: Whether to remove channels, too.

    Raises:
        LeanKError: If the mask is not the model's, or anything cannot be loaded, drawn or measured.
    """
    chosen = choose_device(device)
    check_mask_fits(mask, find_model(recipe, model).facts, mask_origin=mask_origin, model_origin=model)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    subject = load_subject(recipe, chosen, model)
    prompts = draw_prompts(subject.tokenizer, recipe.data, num_samples=num_samples, seed=seed)
    passes = len(prompts) + (count_passes(subject.facts.head_dim, len(prompts)) if impact else 0)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring", total=passes)

        def advance() -> None:
            progress.advance(bar)

        measured = measure_model(subject.model, mask, prompts, advance=advance)
        if impact:
            groups = measure_impact(subject.model, measured.channel_norms, prompts, advance=advance)
            measured = dataclasses.replace(measured, impact=groups)
    return measured
