"""The whole of it: masks, validation, test, report. Killed at any time, it goes on where it was."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from leank_convert.architectures import read_model_facts
from leank_convert.checkpoint_io import read_config
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.evaluate.subject import EvaluatedModel, load_evaluated
from leank_convert.export import export_checkpoint
from leank_convert.hub import model_name, resolve_model
from leank_convert.mask import all_channels_mask, package_versions
from leank_convert.recipe import Recipe
from leank_convert.reproduce.findings import choose_entries, collect_findings
from leank_convert.reproduce.masks import load_main_recipe, make_run
from leank_convert.reproduce.measure import Bench
from leank_convert.reproduce.plan import Sizes, make_plan
from leank_convert.reproduce.report import write_report

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
    recipe = load_main_recipe(sizes)
    plan = make_plan(sizes, recipe)
    console = Console(stderr=True)
    masks = {}
    for place, run in enumerate(plan.runs, start=1):
        console.print(f"mask {place} of {len(plan.runs)}: {run.name}", highlight=False)
        masks[run.name] = make_run(run, sizes, out / "masks" / run.name, chosen_device)

    evaluated = _load_dense(recipe, out / "checkpoint", chosen_device)

    def bench(name: str, num_prompts: int, seed: int) -> Bench:
        return Bench(
            evaluated,
            masks,
            recipe.data,
            lengths=sizes.lengths,
            num_prompts=num_prompts,
            seed=seed,
            folder=out / name,
            batch_size=sizes.batch_size,
        )

    rows = plan.rows()
    validation = bench("validation", sizes.num_validation, VALIDATION_SEED)
    competing = [entry for row in rows if len(row.candidates) > 1 for entry in row.candidates]
    validation.measure(competing, "choosing settings")
    chosen = choose_entries(rows, validation)
    test = bench("test", sizes.num_prompts, TEST_SEED)
    test.measure([entry for entry, _ in chosen.values()], "testing")
    findings = collect_findings(plan, chosen, test, masks, _describe_environment(recipe, chosen_device))
    return write_report(findings, out)


def _load_dense(recipe: Recipe, folder: Path, device: torch.device) -> EvaluatedModel:
    """The model with all of its channels, as a checkpoint that any mask can be tried on."""
    model = recipe.model.id
    if model is None:
        raise LeanKError("the recipe names no model", hint="add `model.id` to it")
    if not folder.exists():
        config = read_config(resolve_model(model))
        windows = recipe.windows.model_dump()
        export_checkpoint(model, all_channels_mask(read_model_facts(config, origin=model)), folder, **windows)
    evaluated = load_evaluated(folder, device)
    if recipe.windows.model_dump() != {key: evaluated.leank[key] for key in recipe.windows.model_dump()}:
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
