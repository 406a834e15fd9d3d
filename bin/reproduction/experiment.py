"""The experiments: masks, validation, test, report. Killed at any time, they go on where they were."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from bin.reproduction.answers import Asked, Part
from bin.reproduction.bench import Bench, Masks
from bin.reproduction.findings import Chosen, choose_entries, collect_findings
from bin.reproduction.plan import MAIN, Cell, Entry, Sizes, list_cells, make_plan
from bin.reproduction.real import RealModel
from bin.reproduction.report import write_report
from bin.reproduction.units import Unit, work_off
from bin.reproduction.workers import run_workers
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.folders import check_folder
from leank_convert.hub import model_name
from leank_convert.mask import package_versions
from leank_convert.recipe import Recipe
from leank_convert.recipe_file import load_recipe

# Apart from each other and from the seeds of training, which are small.
VALIDATION_SEED, TEST_SEED = 2_000_000, 3_000_000


def reproduce(
    out: Path,
    sizes: Sizes,
    *,
    model: str | None = None,
    texts: Path | None = None,
    device: str | torch.device | None = None,
    num_workers: int = 1,
) -> Path:
    """Make every mask of the plan, measure them all on the same prompts, and write the report.

    Masks and answers stay in `out`; nothing is made twice, by however many processes.

    Args:
        out: The folder; one of an earlier run is gone on with.
        sizes: How much is done.
        model: A folder, a hub id, or `testbed`; default: the recipe's.
        texts: The folder that `bin/fetch-texts` wrote, for a real model; None: one kind of text is all.
        device: Default: CUDA if there is any, else the CPU.
        num_workers: Processes that do the work, each on one GPU; 1 is this one.

    Returns:
        The report's page.

    Raises:
        LeanKError: As training and evaluation; also if `out` holds masks or answers of other settings.
    """
    check_folder(out)
    experiment = Experiment(out, sizes, model, texts, device)
    if num_workers > 1:
        run_workers(_work, (out, sizes, model, texts, device), num_workers)
    experiment.work(Console(stderr=True))
    return experiment.report()


def _work(
    out: Path, sizes: Sizes, model: str | None, texts: Path | None, device: str | None, number: int
) -> None:
    Experiment(out, sizes, model, texts, device).work(Console(stderr=True), f"worker {number}: ")


class Experiment:
    """All units of a plan and their results, for the arguments of `reproduce`."""

    def __init__(
        self,
        out: Path,
        sizes: Sizes,
        model: str | None,
        texts: Path | None,
        device: str | torch.device | None,
    ) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._out, self._sizes, self._device = out, sizes, choose_device(device)
        self._recipe = load_recipe(sizes.recipe, sizes.overrides)
        self._model = _name_model(self._recipe) if model is None else model
        self._plan = make_plan(sizes, self._recipe)
        self._masks = Masks(self._plan.runs, sizes, self._model, out / "masks", self._device)
        self._bench = Bench(self._recipe, self._model, self._masks, self._device)
        lengths = sizes.validation_lengths or sizes.lengths
        cells = list_cells(sizes, self._recipe, lengths)
        self._validation = self._part("validation", cells, VALIDATION_SEED)
        cells = list_cells(sizes, self._recipe, sizes.lengths)
        self._test = self._part("test", cells, TEST_SEED)
        self._real = None
        if sizes.real is not None:
            self._real = RealModel(self._plan, self._bench, out, texts, lambda: self._chosen)

    def work(self, console: Console, prefix: str = "") -> None:
        """Do what no other process does, until all is done."""
        self._out.mkdir(parents=True, exist_ok=True)
        units = self._list_units()

        def note(line: str) -> None:
            console.print(f"{prefix}{line}", highlight=False)

        work_off([replace(unit, make=partial(_make, unit)) for unit in units], self._out, note)

    def report(self) -> Path:
        """Write the report of what is done; returns its page."""
        environment = self._describe_environment()
        findings = collect_findings(self._plan, self._chosen, self._test, self._masks, environment)
        return write_report(findings, self._out, None if self._real is None else self._real.results())

    def _part(self, name: str, cells: tuple[Cell, ...], seed: int) -> Part:
        return Part(self._bench, self._out / name, cells, seed, self._sizes.batch_tokens)

    def _list_units(self) -> list[Unit]:
        masks = {
            name: Unit(f"masks/{name}", partial(self._masks.are_made, name), partial(self._masks.make, name))
            for name in self._plan.runs
        }
        needed = {entry.run for entry in self._asked_for_choice if entry is not None and entry.run}
        validation = _list_answers(
            self._validation, lambda: self._asked_for_choice, [masks[name] for name in needed]
        )
        test = _list_answers(self._test, lambda: self._asked_for_test, [*masks.values(), *validation])
        units = [*masks.values(), *validation, *test]
        if self._real is not None:
            units += self._real.list_units(masks[MAIN], [masks[name] for name in needed], validation)
        return units

    @cached_property
    def _asked_for_choice(self) -> Asked:
        rows = [row for table in self._plan.tables.values() for row in table.rows.values() if len(row) > 1]
        entries: list[Entry | None] = [None, *(entry for row in rows for entry in row)]
        return dict.fromkeys(entries, self._sizes.num_validation)

    @cached_property
    def _chosen(self) -> Chosen:
        return choose_entries(self._plan, self._validation)

    @cached_property
    def _asked_for_test(self) -> Asked:
        entries: list[Entry | None] = [None, *(entry for entry, _ in self._chosen.values())]
        return dict.fromkeys(entries, self._sizes.num_prompts)

    def _describe_environment(self) -> dict[str, str]:
        recipe, device = self._recipe, self._device
        computed_on = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        windows = recipe.windows
        return {
            "model": model_name(recipe.model.id or self._model),
            "windows": f"sink {windows.sink_size}, recent {windows.recent_size}, flush {windows.flush_size}",
            "main setting": f"{recipe.stage1.steps} + {recipe.stage2.steps} steps, lambda "
            f"{recipe.stage1.l1_weight:g}, widths in multiples of {recipe.width_multiple}, "
            f"seed {recipe.seed}",
            "seeds of prompts": f"{TEST_SEED} and, where settings are chosen, {VALIDATION_SEED}, each plus "
            "the length",
            "measured on": f"{device.type} ({computed_on})",
            "versions": ", ".join(f"{name} {version}" for name, version in package_versions().items()),
        }


def _name_model(recipe: Recipe) -> str:
    if recipe.model.id is None:
        raise LeanKError("the recipe names no model", hint="add `model.id` to it")
    return recipe.model.id


def _make(unit: Unit) -> None:
    unit.make()
    torch.cuda.empty_cache()  # another worker on this GPU may need it


def _list_answers(part: Part, asked: Callable[[], Asked], needed: Sequence[Unit]) -> list[Unit]:
    """A unit for each cell of a part; `asked` is called when all that is needed is done."""
    needs = tuple(unit.name for unit in needed)

    def unit(cell: Cell) -> Unit:
        name = f"{part.folder.name}/{cell.task}-{cell.length}"
        return Unit(name, lambda: part.is_done(cell, asked()), lambda: part.ask(cell, asked()), needs)

    return [unit(cell) for cell in part.cells]
