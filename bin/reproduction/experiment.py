"""The driver of every plan: masks, answers, text, report. Killed at any time, it goes on where it was."""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from bin.reproduction.answers import Answers, take
from bin.reproduction.bench import Bench
from bin.reproduction.fetch_texts import LEARNING
from bin.reproduction.plan import MAIN, VALIDATION, Cell, Entry, Part, Plan, Round, Row, singles
from bin.reproduction.texts import Texts, find_kinds
from bin.reproduction.units import Unit, find_waiting, keep_result, read_result, work_off
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError
from leank_convert.evaluate.answering import fill_caches
from leank_convert.evaluate.comparison import used_bytes
from leank_convert.files import write_atomically
from leank_convert.folders import check_folder
from leank_convert.hub import model_name
from leank_convert.mask_provenance import package_versions

_MARKS = {"values": "with V pruned", "packaged": "by packaged masks", "trained": "by trained masks"}


class Experiment:
    """All units of a plan and their results; masks and answers stay in `out`, and nothing is made twice.

    One of an earlier run is gone on with. The model is a folder, a hub id, or `testbed`, by default the
    recipe's; `texts` the folder that `bin/fetch-texts` wrote, if any; the device by default CUDA if there is
    one. After so many `minutes` no piece of work is begun. LeanKError if a packaged mask is asked for that
    there is not, or `out` holds masks or answers of other settings.
    """

    def __init__(
        self,
        out: Path,
        plan: Plan,
        model: str | None = None,
        texts: Path | None = None,
        device: str | torch.device | None = None,
        minutes: float = math.inf,
    ) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        check_folder(out)
        self.out, self.plan, self.bytes_file = out, plan, out / "bytes.json"
        # Answers go by names that these share.
        self._mark = "values" if plan.has_basis else "packaged" if plan.packaged else "trained"
        found = next((mark for mark in _MARKS if (out / mark).exists()), self._mark)
        if found != self._mark:
            raise LeanKError(f"`{out}` holds answers {_MARKS[found]}", hint="name another output folder")
        self._deadline = time.time() + 60 * minutes
        text = None if texts is None else texts / LEARNING
        if plan.has_basis and text is not None and not text.is_file():
            raise LeanKError(f"`{texts}` holds no `{LEARNING}`", hint="`bin/fetch-texts FOLDER` writes it")
        self.bench = Bench(plan, model, out, choose_device(device), text)
        self.parts = {part.name: Answers(self.bench, out / part.name, part) for part in plan.parts}
        kinds = [] if plan.text is None else find_kinds(texts)
        self.texts = [Texts(self.bench, kind, texts, out / "text", plan.text) for kind in kinds if plan.text]
        self._chosen: dict[Row, Entry] = {}

    def count_left(self) -> str:
        """How many units are not done, in one line."""
        units = self.list_units()
        return f"{len(find_waiting(units, set()))} of {len(units)} units left"

    def work(self, prefix: str = "") -> None:
        """Do what no other process does, until all is done or time is up."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / self._mark).touch()
        note = partial(Console(stderr=True).print, prefix, sep="", highlight=False, soft_wrap=True)
        work_off(self.list_units(), self.out, note, self._deadline)

    def run(self) -> Path:
        """Do it all, or as much as there is time for, and write the report."""
        from bin.reproduction.tables import render

        self.work()
        path = self.out / "tables.md"
        write_atomically(path, render(self).encode())
        return path

    def choose(self, row: Row) -> Entry | None:
        """A row's entry: of several the best on validation prompts, of equal ones the first.

        None where not all have answered these yet.
        """
        if len(row) > 1 and row not in self._chosen:
            scores = {entry: take(self.parts[VALIDATION].scores(entry.name)) for entry in row}
            if not all(scores.values()):
                return None
            self._chosen[row] = max(row, key=lambda entry: fmean(scores[entry]))
        return self._chosen.get(row, row[0])

    def list_units(self) -> list[Unit]:
        """All units, in the order in which they are begun."""
        plan, masks = self.plan, self.bench.masks
        units = [
            Unit(f"masks/{run}", partial(masks.are_made, run), partial(masks.make, run)) for run in plan.runs
        ]
        if plan.has_basis:
            units.append(Unit("basis", self.bench.basis_file.exists, self.bench.measure_basis))
        if plan.has_scales:
            needs = (f"masks/{MAIN}", *(["basis"] if plan.has_basis else []))
            units.append(Unit("constants", self.bench.scales_file.exists, self.bench.measure_scales, needs))
        units += self._list_text_units()
        last: dict[str, tuple[str, ...]] = {}  # the round of a cell that comes before, by the folder of both
        for part in plan.parts:
            for each, cell in itertools.product(part.rounds, part.cells):
                answers, folder = self.parts[part.name], f"{part.name}/{cell.name}"
                name = _name_unit(part, cell, each)
                is_done = partial(answers.is_done, cell, each.num_prompts)
                ask = partial(answers.ask, cell, each.num_prompts)
                units.append(self._list_unit(name, each.rows, is_done, ask, last.get(folder, ())))
                last[folder] = (name,)
        if plan.weighed:
            is_done = partial(_has, self.bytes_file)
            units.append(self._list_unit("bytes", singles(plan.weighed), is_done, self._weigh))
        return units

    def _list_unit(
        self,
        name: str,
        rows: Sequence[Row],
        is_done: Callable[[list[Entry]], bool],
        make: Callable[[list[Entry]], None],
        needs: Iterable[str] = (),
    ) -> Unit:
        """A unit of rows' entries, which are known once validation is done."""
        return Unit(
            name,
            lambda: is_done(self._pick(rows)),
            lambda: make(self._pick(rows)),
            (*self._needs(rows), *needs),
        )

    def _list_text_units(self) -> Iterator[Unit]:
        for texts in self.texts:
            for length in texts.plan.lengths:
                is_done, feed = partial(_has, texts.path(length)), partial(texts.feed, length)
                yield self._list_unit(f"text/{texts.kind}-{length}", texts.plan.rows, is_done, feed)
        for texts in self.texts:
            if rows := texts.plan.answering:
                is_done = partial(_has, texts.path("answers"))
                yield self._list_unit(f"text/{texts.kind}-answers", rows, is_done, texts.answer)

    def _needs(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """Units that make what these rows answer by."""
        runs = {entry.run for row in rows for entry in row}
        needs = [f"masks/{run}" for run in self.plan.runs if run in runs]
        needs += ["basis"] if self.plan.has_basis else []
        needs += ["constants"] if self.plan.has_scales else []
        if any(len(row) > 1 for row in rows):
            (part,) = (part for part in self.plan.parts if part.name == VALIDATION)
            needs += [_name_unit(part, cell, each) for each in part.rounds for cell in part.cells]
        return tuple(needs)

    def _pick(self, rows: Sequence[Row]) -> list[Entry]:
        """Each row's entry, once validation is done."""
        found = (self.choose(row) for row in rows)
        return list(dict.fromkeys(entry for entry in found if entry is not None))

    def _weigh(self, entries: list[Entry]) -> None:
        """Count the bytes of every cache after a prompt of the longest length, and the `tokens` it holds."""
        answers = self.parts[self.plan.weighed_on]
        prompt = answers.draw(max(answers.part.cells, key=lambda cell: cell.length), 1)[0]
        filled = fill_caches(self.bench.evaluated, prompt, [self.bench.variant(entry) for entry in entries])
        kept: dict[str, Any] = {name: asdict(used_bytes(cache)) for name, cache in filled}
        kept["tokens"] = len(prompt.input_ids) + 1
        keep_result(self.bytes_file, kept)

    def describe(self) -> list[str]:
        """Where it was measured, and how."""
        recipe, device = self.bench.recipe, self.bench.device
        computed_on = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        windows = recipe.windows
        seeds = ", ".join(f"{name} {answers.part.seed}" for name, answers in self.parts.items())
        packaged = [path.stem for files in self.bench.masks.packaged.values() for path in files.values()]
        return [
            f"model: {model_name(recipe.model.id or self.bench.model)}",
            f"windows: sink {windows.sink_size}, recent {windows.recent_size}, flush {windows.flush_size}",
            f"main setting: packaged masks {', '.join(packaged)}"
            if packaged
            else f"main setting: {recipe.stage1.steps} + {recipe.stage2.steps} steps, lambda "
            f"{recipe.stage1.l1_weight:g}, width multiple {recipe.width_multiple}, seed {recipe.seed}",
            f"seeds of prompts, each plus the length: {seeds}",
            f"told on: {device.type} ({computed_on})",
            "versions: " + ", ".join(f"{name} {version}" for name, version in package_versions().items()),
        ]


def _has(file: Path, entries: Sequence[Entry]) -> bool:
    """Whether what was kept has all entries."""
    return read_result(file).keys() >= {entry.name for entry in entries}


def _name_unit(part: Part, cell: Cell, each: Round) -> str:
    """Name a round of a cell; two rounds may ask as many prompts, of other caches."""
    return f"{part.name}/{cell.name}-{len(each.rows)}x{each.num_prompts}"
