"""Answers of a plan's entries: all of them answer the prompts of a cell, from one prefill a batch.

A cell is a task at a length. Its answers are written down as each entry gives them, and asked for once; its
scores are written when all of a round are there. They go by the entry's name: whoever removes a mask removes
the folders of its answers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bin.reproduction.bench import Bench
from bin.reproduction.plan import DENSE_NAME, Cell, Entry, Part
from bin.reproduction.units import keep_result, read_result
from leank_convert.evaluate.answer_log import AnswerLog
from leank_convert.evaluate.answering import answer_prompts
from leank_convert.evaluate.comparison import Difference, compare
from leank_convert.evaluate.prompt import Prompt, held_out_prompts
from leank_convert.evaluate.ruler import RULER_TASKS, draw_prompts

Scores = dict[Cell, list[float]]
"""From 0 to 1, of the first prompts of each cell."""


@dataclass(frozen=True)
class Answers:
    """Prompts of a part, and what was found on them."""

    bench: Bench  # the model, the masks and the plan
    folder: Path  # where answers are kept
    part: Part

    def is_done(self, cell: Cell, count: int, entries: Sequence[Entry]) -> bool:
        """Whether all have answered what they are asked, or need not, as the dense model cannot."""
        kept = self.read(cell)
        asked = {entry.name: self.bench.plan.num_asked(entry, cell, count) for entry in entries}
        return self._is_weak(kept) or all(len(kept.get(name, ())) >= number for name, number in asked.items())

    def ask(self, cell: Cell, count: int, entries: Sequence[Entry]) -> None:
        """Let entries answer what they have not answered yet, and write their scores down."""
        prompts = self.draw(cell, count)
        log = AnswerLog(self.folder / cell.name, self._settings(cell))
        asked = [
            (self.bench.variant(entry), prompts[: self.bench.plan.num_asked(entry, cell, count)])
            for entry in entries
        ]
        size = max(1, self.bench.plan.batch_tokens // cell.length)
        for start in range(0, count, size):
            here = slice(start, start + size)
            # Where a plan has grown, its new entries answer alone.
            waiting = [variant for variant, own in asked if log.missing(own[here], [variant.name])]
            batch = log.missing(prompts[here], [variant.name for variant in waiting])
            for answers in answer_prompts(self.bench.evaluated, batch, waiting, batch_size=size):
                log.add(answers)
        scores = {
            variant.name: [log.outcome(prompt, [variant.name]).scores[variant.name] for prompt in own]
            for variant, own in asked
        }
        keep_result(self._path(cell), {**self.read(cell), **scores})

    def draw(self, cell: Cell, num_prompts: int) -> Sequence[Prompt]:
        """Prompts of a cell, independent of the other cells, so that more of them change nothing."""
        tokenizer, seed = self.bench.evaluated.tokenizer, self.part.seed + cell.length
        if cell.task in RULER_TASKS:
            prompts = draw_prompts(tokenizer, [cell.task], [cell.length], num_prompts, seed)
        else:
            only = {"tasks": (cell.task,), "min_length": cell.length, "max_length": cell.length}
            data = self.bench.recipe.data.model_copy(update=only)
            prompts = held_out_prompts(tokenizer, data, num_samples=num_prompts, seed=seed)
        if cell.most_tokens is None:
            return prompts
        return [replace(p, max_new_tokens=min(p.max_new_tokens, cell.most_tokens)) for p in prompts]

    def read(self, cell: Cell) -> dict[str, list[float]]:
        """Scores that were written down, by entry's name."""
        return read_result(self._path(cell))

    def scores(self, name: str) -> Scores:
        """What an entry was found to score in cells that the dense model can answer."""
        found = {cell: self.read(cell) for cell in self.part.cells}
        return {
            cell: kept[name] for cell, kept in found.items() if kept.get(name) and not self._is_weak(kept)
        }

    def weak_cells(self) -> dict[Cell, float]:
        """Cells that are left out, and the dense model's score there."""
        found = {cell: self.read(cell) for cell in self.part.cells}
        return {cell: fmean(kept[DENSE_NAME]) for cell, kept in found.items() if self._is_weak(kept)}

    def _is_weak(self, kept: dict[str, list[float]]) -> bool:
        return bool(kept.get(DENSE_NAME)) and fmean(kept[DENSE_NAME]) <= self.part.floor

    def _path(self, cell: Cell) -> Path:
        return self.folder / cell.name / "scores.json"

    def _settings(self, cell: Cell) -> dict[str, Any]:
        """What answers depend on beside the cell's name."""
        recipe = self.bench.recipe
        settings: dict[str, Any] = {"seed": self.part.seed, "windows": recipe.windows.model_dump()}
        if cell.task not in RULER_TASKS:
            excluded = {"tasks", "min_length", "max_length"}
            settings["data"] = recipe.data.model_dump(mode="json", exclude=excluded)
        if cell.most_tokens is not None:
            settings["most_tokens"] = cell.most_tokens
        return settings


def take(scores: Scores) -> list[float]:
    """The scores of all cells, one after the other."""
    return [score for found in scores.values() for score in found]


def subtract(scores: Scores, others: Scores) -> Difference | None:
    """The paired difference on the prompts that both answered; None if there are none."""
    pairs = [
        own - other
        for cell, found in scores.items()
        if cell in others
        for own, other in zip(found, others[cell], strict=False)
    ]
    return compare(pairs) if pairs else None
