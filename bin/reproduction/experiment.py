"""The experiments: masks, validation, test, report. Killed at any time, they go on where they were."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from bin.reproduction.answers import Answers
from bin.reproduction.findings import choose_entries, collect_findings
from bin.reproduction.plan import Run, Sizes, make_plan
from bin.reproduction.report import write_report
from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import read_config
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.evaluate.evaluated import EvaluatedModel, load_evaluated
from leank_convert.export import export_checkpoint
from leank_convert.hub import model_name, resolve_model
from leank_convert.mask import ChannelMask, all_channels_mask, load_mask, package_versions
from leank_convert.methods.make import train_masks
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import load_recipe
from leank_convert.train.state import TrainingDirectory

# Apart from each other and from the seeds of training, which are small.
VALIDATION_SEED, TEST_SEED = 2_000_000, 3_000_000


def reproduce(out: Path, sizes: Sizes, *, device: str | torch.device | None = None) -> Path:
    """Make every mask of the plan, measure them all on the same prompts, and write the report.

    Masks, answers and the checkpoint that they are measured on stay in `out`; nothing is made twice.

    Args:
        out: The folder; one of an earlier run is gone on with.
        sizes: How much is done.
        device: Default: CUDA if there is any, else the CPU.

    Returns:
        The report's page.

    Raises:
        LeanKError: As training and evaluation; also if `out` holds masks or answers of other settings.
    """
    chosen_device = choose_device(device)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    recipe = load_recipe(sizes.recipe, sizes.overrides)
    plan = make_plan(sizes, recipe)
    console = Console(stderr=True)
    masks = {}
    for place, (name, run) in enumerate(plan.runs.items(), start=1):
        console.print(f"mask {place} of {len(plan.runs)}: {name}", highlight=False)
        masks[name] = _make_run(run, sizes, out / "masks" / name, chosen_device)

    evaluated = _load_dense(recipe, out / "checkpoint", chosen_device)

    def part(name: str, num_prompts: int, seed: int) -> Answers:
        return Answers(
            evaluated, masks, recipe.data, sizes, num_prompts=num_prompts, seed=seed, folder=out / name
        )

    validation = part("validation", sizes.num_validation, VALIDATION_SEED)
    rows = [row for table in plan.tables.values() for row in table.rows.values()]
    validation.ask([entry for row in rows if len(row) > 1 for entry in row], "choosing settings")
    chosen = choose_entries(plan, validation)
    test = part("test", sizes.num_prompts, TEST_SEED)
    test.ask([entry for entry, _ in chosen.values()], "testing")
    findings = collect_findings(plan, chosen, test, masks, _describe_environment(recipe, chosen_device))
    return write_report(findings, out)


def _make_run(run: Run, sizes: Sizes, folder: Path, device: torch.device) -> dict[float, ChannelMask]:
    """Make a run's masks by pruning ratio, go on with making them, or read them.

    Raises:
        LeanKError: As `train_masks`; also if the folder holds masks of another recipe.
    """
    ratios = f"pruning_ratio=[{', '.join(map(str, run.ratios))}]"
    # No trackers: a run's log says enough of it.
    recipe = load_recipe(sizes.recipe, [*sizes.overrides, *run.overrides, ratios, "trackers=[]"])
    directory = TrainingDirectory(folder)
    results = directory.results(recipe)
    # Where a kill came between the two, nothing says what the mask was made by.
    if all(result.mask.exists() and result.recipe.exists() for result in results.values()):
        for result in results.values():
            _check_recipe(result.recipe, recipe, folder)
        return {ratio: load_mask(result.mask) for ratio, result in results.items()}
    if not recipe.trains:
        # Killed while it wrote its masks. It has no state to go on from, and takes seconds.
        shutil.rmtree(folder, ignore_errors=True)
    resume = directory.folder.exists()
    if resume:
        _check_recipe(directory.recipe, recipe, folder)
    made = train_masks(str(recipe.model.id), folder, recipe=recipe, resume=resume, device=device)
    return {ratio: made[result.out] for ratio, result in results.items()}


def _check_recipe(kept: Path, recipe: Recipe, folder: Path) -> None:
    if kept.exists() and kept.read_text() != recipe.to_yaml():
        raise LeanKError(
            f"`{folder}` was made by another recipe (`{kept}`)",
            hint="remove this folder, or name another output folder",
        )


def _load_dense(recipe: Recipe, folder: Path, device: torch.device) -> EvaluatedModel:
    """The model with all of its channels, as a checkpoint that any mask can be tried on."""
    model = recipe.model.id
    if model is None:
        raise LeanKError("the recipe names no model", hint="add `model.id` to it")
    windows = recipe.windows.model_dump()
    if not folder.exists():
        config = read_config(resolve_model(model))
        export_checkpoint(model, all_channels_mask(read_model_facts(config, origin=model)), folder, **windows)
    evaluated = load_evaluated(folder, device)
    if windows != {key: evaluated.leank[key] for key in windows}:
        raise LeanKError(f"`{folder}` has other window sizes than the recipe", hint="remove this folder")
    return evaluated


def _describe_environment(recipe: Recipe, device: torch.device) -> dict[str, str]:
    computed_on = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    windows = recipe.windows
    return {
        "model": model_name(recipe.model.id or ""),
        "windows": f"sink {windows.sink_size}, recent {windows.recent_size}, flush {windows.flush_size}",
        "main setting": f"{recipe.stage1.steps} + {recipe.stage2.steps} steps, lambda "
        f"{recipe.stage1.l1_weight:g}, widths in multiples of {recipe.width_multiple}, seed {recipe.seed}",
        "seeds of prompts": f"{TEST_SEED} and, where settings are chosen, {VALIDATION_SEED}, each plus the "
        "length",
        "measured on": f"{device.type} ({computed_on})",
        "versions": ", ".join(f"{name} {version}" for name, version in package_versions().items()),
    }
