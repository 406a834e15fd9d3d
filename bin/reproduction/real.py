"""What a real model is asked besides the tables: RULER's tasks, natural text, long answers, staticity."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bin.reproduction.answers import Asked, Part, Scores
from bin.reproduction.bench import Bench
from bin.reproduction.findings import Chosen
from bin.reproduction.plan import MAIN, Cell, Entry, Plan, RealSizes, list_cells
from bin.reproduction.texts import Texts, compare_answers, find_kinds
from bin.reproduction.units import Unit
from leank_convert.analyze.measurement import measure
from leank_convert.evaluate.answering import measure_bytes
from leank_convert.evaluate.used_bytes import UsedBytes
from leank_convert.files import read_json, write_atomically
from leank_convert.mask import ChannelMask

FLOOR_SEED, RULER_SEED, COMPARED_SEED = 4_000_000, 5_000_000, 6_000_000
_STATIC_METHODS = ("static-norm", "double-sparsity")


class RealModel:
    """Units and results of everything that only a model of natural language can be asked.

    Args:
        plan: Of the tables; its sizes say how much is done here.
        bench: The model and the masks.
        out: Where results are kept.
        texts: The folder that `bin/fetch-texts` wrote, if any.
        chosen: Gives each row's entry, once validation is done.
    """

    def __init__(
        self, plan: Plan, bench: Bench, out: Path, texts: Path | None, chosen: Callable[[], Chosen]
    ) -> None:
        assert plan.sizes.real is not None
        self._plan, self._bench, self._out, self._choose = plan, bench, out, chosen
        self._sizes = sizes = plan.sizes.real
        cells = tuple(Cell(task, length) for length in sizes.ruler_lengths for task in sizes.ruler_tasks)
        batch_tokens = plan.sizes.batch_tokens
        self._floor = Part(bench, out / "ruler-floor", cells, FLOOR_SEED, batch_tokens)
        self._ruler = Part(bench, out / "ruler", cells, RULER_SEED, batch_tokens)
        cells = list_cells(plan.sizes, bench.recipe, sizes.compared_lengths)
        self._beside = Part(bench, out / "compared", cells, COMPARED_SEED, batch_tokens)
        self._texts = [Texts(bench, kind, texts, out / "text", sizes) for kind in find_kinds(texts)]

    def list_units(self, main: Unit, masks: Sequence[Unit], validation: Sequence[Unit]) -> list[Unit]:
        """All units.

        Args:
            main: Makes the main run's masks.
            masks: Make the masks of all entries that may be chosen.
            validation: Choose them.
        """
        needs = tuple(unit.name for unit in (main, *masks, *validation))
        dense: Asked = {None: self._sizes.num_floor}
        units: list[Unit] = []
        for cell in self._ruler.cells:
            name = f"{cell.task}-{cell.length}"
            units.append(
                Unit(
                    f"ruler-floor/{name}",
                    partial(self._floor.is_done, cell, dense),
                    partial(self._floor.ask, cell, dense),
                )
            )
            units.append(
                Unit(
                    f"ruler/{name}",
                    partial(self._is_answered, cell),
                    partial(self._answer, cell),
                    (units[-1].name, *needs),
                )
            )
        compared = self._asked_beside
        for cell in self._beside.cells:
            units.append(
                Unit(
                    f"compared/{cell.task}-{cell.length}",
                    partial(self._beside.is_done, cell, compared),
                    partial(self._beside.ask, cell, compared),
                    (main.name,),
                )
            )
        for texts in self._texts:
            units += self._list_text_units(texts, needs)
        return [
            *units,
            Unit("staticity", self._staticity.exists, self._measure, (main.name,)),
            Unit("bytes", self._is_weighed, self._weigh, (main.name,)),
        ]

    def results(self) -> RealResults:
        """Everything, once all units are done."""
        strong = [cell for cell in self._ruler.cells if self._is_strong(cell)]
        floors = {cell: replace(self._floor, cells=(cell,)).scores(None).mean for cell in self._floor.cells}
        ruler = replace(self._ruler, cells=tuple(strong))
        fed = {
            texts.kind: {entry: texts.fed(entry) for entry in (*self._entries, *self._compared)}
            for texts in self._texts
        }
        used = read_json(self._bytes)
        answers = {
            texts.kind: {
                entry: compare_answers(texts.answered(entry), texts.answered(None))
                for entry in (None, *self._entries)
            }
            for texts in self._texts
        }
        return RealResults(
            sizes=self._sizes,
            main=self._main,
            entries=self._entries,
            floors=floors,
            strong=ruler.cells,
            ruler={entry: ruler.scores(entry) for entry in (None, *self._entries)},
            compared={entry: self._beside.scores(entry) for entry in self._weighed},
            used={entry: UsedBytes(**used[self._bench.label(entry)]) for entry in self._weighed},
            num_tokens=used["tokens"],
            fed=fed,
            answers=answers,
            staticity=read_json(self._staticity),
            mask=self._bench.masks[MAIN][self._plan.sizes.main_ratio],
        )

    @property
    def _main(self) -> Entry:
        return Entry(MAIN, self._plan.sizes.main_ratio, run=MAIN)

    @cached_property
    def _entries(self) -> tuple[Entry, ...]:
        """LeanK at every ratio; at the main one the best static method and ThinK."""
        main_ratio, chosen = self._plan.sizes.main_ratio, self._choose()
        rows = self._plan.tables["comparison"].rows
        static = [chosen[rows[method, main_ratio]] for method in _STATIC_METHODS]
        best, _ = max(static, key=lambda choice: max(choice[1].values()))
        think, _ = chosen[rows["think", main_ratio]]
        return (*self._curve, best, think)

    @property
    def _curve(self) -> tuple[Entry, ...]:
        """LeanK at every ratio."""
        return tuple(Entry(MAIN, ratio, run=MAIN) for ratio in self._plan.sizes.ratios)

    @property
    def _compared(self) -> tuple[Entry, ...]:
        """Methods beside LeanK, alone and on the main mask."""
        sizes = self._sizes
        alone = tuple(Entry(name, 0.0, compared=True) for name in sizes.alone)
        return (*alone, *(self._main._replace(method=name, compared=True) for name in sizes.products))

    @property
    def _weighed(self) -> tuple[Entry | None, ...]:
        """The dense model, LeanK at every ratio, and methods beside it."""
        return (None, *self._curve, *self._compared)

    @property
    def _asked(self) -> Asked:
        sizes = self._sizes
        others: dict[Entry | None, int] = dict.fromkeys(self._entries, sizes.num_others)
        return {**others, None: sizes.num_main, self._main: sizes.num_main}

    @property
    def _asked_beside(self) -> Asked:
        return dict.fromkeys(self._weighed, self._sizes.num_compared)

    @property
    def _staticity(self) -> Path:
        return self._out / "staticity.json"

    @property
    def _bytes(self) -> Path:
        return self._out / "bytes.json"

    def _is_strong(self, cell: Cell) -> bool:
        return replace(self._floor, cells=(cell,)).scores(None).mean > self._sizes.floor

    def _is_answered(self, cell: Cell) -> bool:
        return not self._is_strong(cell) or self._ruler.is_done(cell, self._asked)

    def _answer(self, cell: Cell) -> None:
        self._ruler.ask(cell, self._asked)

    def _list_text_units(self, texts: Texts, needs: tuple[str, ...]) -> list[Unit]:
        return [
            Unit(
                f"text/{texts.kind}-predictions",
                lambda: texts.is_fed((*self._entries, *self._compared)),
                lambda: texts.feed((*self._entries, *self._compared)),
                needs,
            ),
            Unit(
                f"text/{texts.kind}-answers",
                lambda: texts.has_answered(self._entries),
                lambda: texts.answer(self._entries),
                needs,
            ),
        ]

    def _is_weighed(self) -> bool:
        kept = read_json(self._bytes) if self._bytes.exists() else {}
        return all(self._bench.label(entry) in kept for entry in self._weighed)

    def _weigh(self) -> None:
        """Count the bytes of every cache after a prompt of the longest length."""
        cell = max(self._beside.cells, key=lambda cell: cell.length)
        prompt = self._beside.draw(cell, 1)[0]
        variants = [self._bench.variant(entry) for entry in self._weighed]
        used = measure_bytes(self._bench.evaluated, prompt, variants)
        kept: dict[str, Any] = {name: asdict(found) for name, found in used.items()}
        kept["tokens"] = len(prompt.input_ids) + 1
        write_atomically(self._bytes, json.dumps(kept).encode())

    def _measure(self) -> None:
        sizes, bench = self._plan.sizes, self._bench
        mask = bench.masks[MAIN][sizes.main_ratio]
        # One task more than it was trained on, of another kind.
        tasks = ", ".join(dict.fromkeys((*bench.recipe.data.tasks, "passkey")))
        measured = measure(
            mask,
            MAIN,
            bench.model,
            recipe=sizes.recipe,
            overrides=[*sizes.overrides, f"data.tasks=[{tasks}]"],
            num_samples=self._sizes.num_measured,
            device=bench.device,
        )
        write_atomically(self._staticity, json.dumps(measured.to_dict()).encode())


@dataclass(frozen=True)
class RealResults:
    """What was measured.

    Attributes:
        sizes: How much of it.
        main: The mask that all is about.
        entries: All that was measured, it among them.
        floors: By task and length, the dense model's score where it was found out what it can do.
        strong: Those that it can.
        ruler: Scores on them, by entry, the dense model's under None; the main mask's and the dense model's
            are of more prompts of each.
        compared: Scores of LeanK at every ratio and of methods beside it on prompts of their own, the dense
            model's under None.
        used: Bytes of their caches after one of the longest of these prompts.
        num_tokens: Tokens in that cache.
        fed: By kind of text and entry, means of each text, as `Texts.fed` gives them.
        answers: By kind of text and entry, as `compare_answers` gives them; the dense model's under None.
        staticity: As `Measurement.to_dict` gives it.
        mask: The main one.
    """

    sizes: RealSizes
    main: Entry
    entries: tuple[Entry, ...]
    floors: Mapping[Cell, float]
    strong: tuple[Cell, ...]
    ruler: Mapping[Entry | None, Scores]
    compared: Mapping[Entry | None, Scores]
    used: Mapping[Entry | None, UsedBytes]
    num_tokens: int
    fed: Mapping[str, Mapping[Entry, dict[str, list[float]]]]
    answers: Mapping[str, Mapping[Entry | None, dict[str, float]]]
    staticity: Mapping[str, Any]
    mask: ChannelMask

    def paired(self, entry: Entry) -> tuple[Scores, Scores]:
        """An entry's scores on RULER and the dense model's on the same prompts."""
        scores = self.ruler[entry]
        return scores, self._first(self.ruler[None], len(scores.values) // max(1, len(set(scores.cells))))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "floors": [{**cell._asdict(), "dense": score} for cell, score in self.floors.items()],
            "ruler": self._list_scores(self.ruler),
            "compared": self._list_scores(self.compared),
            "predictions": [
                {"text": kind, "entry": entry._asdict(), **means}
                for kind, found in self.fed.items()
                for entry, means in found.items()
            ],
            "answers": [
                {"text": kind, "entry": None if entry is None else entry._asdict(), **found}
                for kind, by_entry in self.answers.items()
                for entry, found in by_entry.items()
            ],
            "staticity": self.staticity,
            "bytes": [
                {
                    "entry": None if entry is None else entry._asdict(),
                    "tokens": self.num_tokens,
                    **asdict(used),
                }
                for entry, used in self.used.items()
            ],
        }

    @staticmethod
    def _list_scores(found: Mapping[Entry | None, Scores]) -> list[dict[str, Any]]:
        return [
            {
                "entry": None if entry is None else entry._asdict(),
                "task": task,
                "length": length,
                "scores": list(scores.where([task], [length]).values),
            }
            for entry, scores in found.items()
            for task, length in dict.fromkeys(scores.cells)
        ]

    @staticmethod
    def _first(scores: Scores, count: int) -> Scores:
        """The first so many prompts of each task and length."""
        seen: Counter[tuple[str, int]] = Counter()
        cells, values = [], []
        for cell, value in zip(scores.cells, scores.values, strict=True):
            if seen[cell] < count:
                seen[cell] += 1
                cells.append(cell)
                values.append(value)
        return Scores(tuple(cells), tuple(values))
