"""Answers of a plan's entries: all of them answer the prompts of a cell, from one prefill a batch.

A cell is a task at a length. Its answers are written down as each entry gives them, and asked for once; its
scores are written when all are there. An entry's answers go by the digest of its mask: where a mask was made
anew, it is measured anew.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bin.reproduction.bench import Bench
from bin.reproduction.plan import Cell, Entry
from leank_convert.evaluate.answer_log import AnswerLog
from leank_convert.evaluate.answering import answer_prompts
from leank_convert.evaluate.comparison import Difference, compare
from leank_convert.evaluate.prompt import Prompt, held_out_prompts
from leank_convert.evaluate.ruler import RULER_TASKS, draw_prompts
from leank_convert.files import read_json, write_atomically


class Scores(NamedTuple):
    """One entry's scores on the prompts of one part, in an order that all entries share."""

    cells: tuple[tuple[str, int], ...]  # task and length of each prompt
    values: tuple[float, ...]  # from 0 to 1, of each prompt

    @property
    def mean(self) -> float:
        """Over all prompts; every task and length has as many."""
        return sum(self.values) / len(self.values)

    def where(self, tasks: Collection[str] | None = None, lengths: Collection[int] | None = None) -> Scores:
        """The prompts of some tasks and lengths alone; None is all."""
        chosen = [
            (cell, value)
            for cell, value in zip(self.cells, self.values, strict=True)
            if (tasks is None or cell[0] in tasks) and (lengths is None or cell[1] in lengths)
        ]
        return Scores(tuple(cell for cell, _ in chosen), tuple(value for _, value in chosen))

    @property
    def tasks(self) -> list[str]:
        """Each task once, in order."""
        return list(dict.fromkeys(task for task, _ in self.cells))

    @property
    def lengths(self) -> list[int]:
        """Each length once, in order."""
        return list(dict.fromkeys(length for _, length in self.cells))

    def minus(self, others: Scores) -> Difference:
        """The paired difference to another entry's scores on the same prompts."""
        return compare([own - other for own, other in zip(self.values, others.values, strict=True)])


Asked = Mapping[Entry | None, int]
"""How many prompts of every cell each entry answers, the first ones; None is the dense model."""


@dataclass(frozen=True)
class Part:
    """Prompts of one seed, and who has answered them.

    Attributes:
        bench: The model and the masks.
        folder: Where answers are kept.
        cells: Which tasks at which lengths.
        seed: Of the prompts.
        batch_tokens: Tokens of prompts that are answered together.
    """

    bench: Bench
    folder: Path
    cells: tuple[Cell, ...]
    seed: int
    batch_tokens: int

    def is_done(self, cell: Cell, asked: Asked) -> bool:
        """Whether all have answered."""
        kept = self._read(cell)
        return all(len(kept.get(self.bench.label(entry), ())) >= count for entry, count in asked.items())

    def ask(self, cell: Cell, asked: Asked) -> None:
        """Let all answer what they have not answered yet, and write their scores down."""
        bench = self.bench
        prompts = self.draw(cell, max(asked.values()))
        log = AnswerLog(
            self._folder(cell),
            {
                "data": bench.recipe.data.model_dump(
                    mode="json", exclude={"tasks", "min_length", "max_length"}
                ),
                "cell": cell._asdict(),
                "seed": self.seed,
                "windows": bench.recipe.windows.model_dump(),
                "dtype": str(bench.evaluated.model.dtype),
            },
        )
        variants = [(bench.variant(entry), count) for entry, count in asked.items()]
        size, first = max(1, self.batch_tokens // cell.length), 0
        for end in sorted(set(asked.values())):
            here = [variant for variant, count in variants if count >= end]
            left = log.missing(prompts[first:end], [variant.name for variant in here])
            for start in range(0, len(left), size):
                batch = left[start : start + size]
                # Where a plan has grown, its new entries answer alone.
                waiting = [variant for variant in here if log.missing(batch, [variant.name])]
                for answers in answer_prompts(bench.evaluated, batch, waiting, batch_size=size):
                    log.add(answers)
            first = end
        scores = {}
        for variant, count in variants:
            outcomes = [log.outcome(prompt, [variant.name]) for prompt in prompts[:count]]
            scores[variant.name] = [outcome.scores[variant.name] for outcome in outcomes]
        write_atomically(self._scores(cell), json.dumps({**self._read(cell), **scores}).encode())

    def scores(self, entry: Entry | None, num_prompts: int | None = None) -> Scores:
        """What an entry was found to score; None is the dense model.

        Args:
            entry: One that has answered.
            num_prompts: How many prompts of each cell; None for all that it has answered.
        """
        cells: list[tuple[str, int]] = []
        values: list[float] = []
        for cell in self.cells:
            kept = self._read(cell)[self.bench.label(entry)][:num_prompts]
            cells += [(cell.task, cell.length)] * len(kept)
            values += kept
        return Scores(tuple(cells), tuple(values))

    def draw(self, cell: Cell, num_prompts: int) -> Sequence[Prompt]:
        """Prompts of a cell, independent of the other cells, so that more of them change nothing."""
        tokenizer, seed = self.bench.evaluated.tokenizer, self.seed + cell.length
        if cell.task in RULER_TASKS:
            prompts = draw_prompts(tokenizer, [cell.task], [cell.length], num_prompts, seed)
        else:
            only = {"tasks": (cell.task,), "min_length": cell.length, "max_length": cell.length}
            data = self.bench.recipe.data.model_copy(update=only)
            prompts = held_out_prompts(tokenizer, data, num_samples=num_prompts, seed=seed)
        if cell.most_tokens is None:
            return prompts
        return [replace(p, max_new_tokens=min(p.max_new_tokens, cell.most_tokens)) for p in prompts]

    def _folder(self, cell: Cell) -> Path:
        return self.folder / f"{cell.task}-{cell.length}"

    def _scores(self, cell: Cell) -> Path:
        return self._folder(cell) / "scores.json"

    def _read(self, cell: Cell) -> dict[str, list[float]]:
        """Scores that were written down, by label."""
        path = self._scores(cell)
        kept: dict[str, list[float]] = read_json(path) if path.exists() else {}
        return kept
