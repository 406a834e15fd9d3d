"""What an experiment is made of: masks, caches that answer, prompts, tables. Data alone; nothing runs here.

A way to prune that has several settings (budget, windows) enters a table as the one of them that did best on
validation prompts, so that none of them is shown below its best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAIN, DENSE_NAME, VALIDATION = "leank", "dense", "validation"
MAIN_RATIO = 0.7  # the pruning ratio that all tables show
MAIN_VALUES = 0.5  # that of V beside it, where V is pruned
EVERY_CHANNEL = 0.0
"""The pruning ratio of caches that keep all channels."""
FLOOR = 0.2
"""Of a real model's cells those count in which the dense model scores more."""
NO_SAMPLES = "held_out_samples=0"  # of runs whose masks answer here anyway
GATES = ("heads.steps=600", "heads.learning_rate=0.04", "heads.l1_weight=0.1")
"""Changes to a real model's recipe where gates of heads are trained."""


class Cell(NamedTuple):
    """A task, one of the recipe's own or of RULER's, at a length."""

    task: str
    length: int  # tokens of a prompt, of RULER's tasks with its answer
    most_tokens: int | None = None  # of an answer, where it ends before the task's own limit

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.task}-{self.length}"


class Run(NamedTuple):
    """One training, or one run of a method that trains nothing."""

    overrides: tuple[str, ...]  # changes to the recipe, as `--set` takes them
    ratios: tuple[float, ...]  # the pruning ratios whose masks it leaves


class Entry(NamedTuple):
    """A cache that answers."""

    name: str  # unlike all others' in its plan
    # `dense`; `mask`: LeanK's by a run's mask; `think`: ThinK's rule chooses channels for every prompt, by
    # a run's widths if there is one; `beside`: `evaluate --also NAME`, on a run's mask or on all channels.
    kind: str = "mask"
    ratio: float = EVERY_CHANNEL  # the pruning ratio that was asked for
    run: str | None = None  # whose mask is taken
    setting: str = ""  # which of the method's settings; "" where there is one
    own_windows: bool = False  # whether ThinK's own window sizes replace the recipe's
    kv_dtype: str | None = None  # of a `mask`, where it is not the model's
    mean: str = "model"  # what comes off keys: the `model`'s, `none`, or the `prompt`'s where it is rounded
    rounded: str = ""  # `K` or `V`: this alone is rounded to `kv_dtype`, and of the prompt alone
    values: float | None = None  # the pruning ratio of V, in a plan that has a basis of it


DENSE = Entry(DENSE_NAME, "dense")
Row = tuple[Entry, ...]
"""Settings of one method, of which the one that is best on validation prompts is shown."""


class Round(NamedTuple):
    """Prompts of every cell that are answered by then, and by whom."""

    num_prompts: int
    rows: tuple[Row, ...]


class Part(NamedTuple):
    """Prompts of one seed, asked in rounds: what is there at any time says the same of all cells."""

    name: str  # of its folder; parts of one name are one
    seed: int
    cells: tuple[Cell, ...]
    rounds: tuple[Round, ...]
    floor: float = -1.0  # a cell is left out once the dense model scores no more


class Table(NamedTuple):
    """Rows that are compared with one another, by label, on the prompts of a part."""

    title: str
    part: str
    rows: tuple[tuple[str, Row], ...]


class TextPlan(NamedTuple):
    """What is asked of natural text, and of whom."""

    lengths: tuple[int, ...]  # tokens of a text, before those that are fed
    num_fed: int  # tokens that are fed, each a decode step
    num_texts: int  # of each kind
    rows: tuple[Row, ...] = ()
    answer_tokens: int = 0  # of an answer to a prompt of about the first of `lengths`; 0: none is asked for
    num_answers: int = 0  # prompts of each kind
    answering: tuple[Row, ...] = ()
    learned_on: float = 0.0  # the share of each kind, at its beginning, that masks may have been learned on


@dataclass(frozen=True)
class Plan:
    """Everything that is made, measured and told."""

    title: str  # of the report
    recipe: str  # name of the recipe that every run changes
    runs: Mapping[str, Run]  # masks, by the name of their folder, in the order they are made
    parts: tuple[Part, ...]  # in the order in which they are asked
    tables: tuple[Table, ...]  # of the report
    batch_tokens: int  # of prompts that are answered together
    overrides: tuple[str, ...] = ()  # changes to the recipe that all runs share
    pairs: tuple[tuple[Row, Row], ...] = ()  # rows whose difference is told beside those of the tables
    text: TextPlan | None = None  # None for a model that knows no language
    # Caches whose bytes are counted, on the longest cell of the part that `weighed_on` names.
    weighed: tuple[Entry, ...] = ()
    weighed_on: str = ""
    has_basis: bool = False  # whether a basis of V is measured, for masks that the package has not
    has_scales: bool = False  # whether scales of an FP8 cache are measured for the main mask
    packaged: tuple[str, ...] = ()  # runs whose masks are the package's
    # Of a cell, by its length, how many prompts caches in int4 are asked: no kernels read them.
    most_int4: Mapping[int, int] = field(default_factory=dict)

    def num_asked(self, entry: Entry, cell: Cell, num_prompts: int) -> int:
        """How many of a cell's first prompts an entry is asked, where others are asked `num_prompts`."""
        limit = self.most_int4.get(cell.length, num_prompts) if entry.kv_dtype == "int4" else num_prompts
        return min(limit, num_prompts)


def singles(entries: Iterable[Entry]) -> tuple[Row, ...]:
    """Rows of one entry each."""
    return tuple((entry,) for entry in entries)


def by_name(entries: Iterable[Entry]) -> tuple[tuple[str, Row], ...]:
    """Rows of one entry each, labelled by their names."""
    return tuple((entry.name, (entry,)) for entry in entries)
