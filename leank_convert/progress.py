"""The progress bar of every long command: training, calibration, evaluation, analysis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

# The remaining time is judged by what these seconds took; a training step at 96K tokens takes several.
_ESTIMATE_SECONDS = 600.0


class Advance(Protocol):
    """Moves a bar on."""

    def __call__(self, count: int = 1, /, *, what: str | None = None, figures: str = "") -> None:
        """Move on by `count`, rename the bar, and show figures below it."""


class _TwoLines(Progress):
    """A bar, and figures below it: beside it they would not fit into 80 columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["figures"]) for task in self.tasks if task.fields["figures"])


@contextmanager
def progress_bar(
    shown: bool, what: str, total: int, *, done: int = 0, stays: bool = False
) -> Iterator[Advance]:
    """Draw a progress bar to stderr; yields what moves it on.

    Args:
        shown: Whether to draw it at all.
        what: Stands before the bar.
        total: Of whatever is counted.
        done: Of these before it begins.
        stays: Whether its last state is left behind, in a file too; otherwise it goes when it is done, and is
            drawn in terminals alone, for elsewhere nothing can be drawn over.
    """
    console = Console(stderr=True)
    bar = _TwoLines(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=not stays,
        disable=not shown or not (stays or console.is_terminal),
        speed_estimate_period=_ESTIMATE_SECONDS,
    )
    task = bar.add_task(what, total=total, completed=done, figures="")

    def advance(count: int = 1, /, *, what: str | None = None, figures: str = "") -> None:
        bar.update(task, advance=count, description=what, figures=figures)

    with bar:
        yield advance
