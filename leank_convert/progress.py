"""Progress of every long command: a bar in a terminal or a notebook, else a plain line now and then."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

# The remaining time is judged by what these seconds took; a training step at 96K tokens takes several.
_ESTIMATE_SECONDS = 600.0
# Where nothing can be drawn over, the first line comes early: it shows that the command is at work.
_FIRST_LINE_SECONDS = 5.0
_LINE_SECONDS = 30.0


class Advance(Protocol):
    """Moves a bar on."""

    def __call__(self, count: int = 1, /, *, what: str | None = None, figures: str = "") -> None:
        """Move on by `count`, rename the bar, and show figures below it."""


class _TwoLines(Progress):
    """A bar, and figures below it: beside it they would not fit into 80 columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["figures"]) for task in self.tasks if task.fields["figures"])


class _Lines:
    """Prints a line when a task was moved on, at most every `_LINE_SECONDS`."""

    def __init__(self, task: Task, clock: Callable[[], float]) -> None:
        self._task, self._clock, self._first_done = task, clock, task.completed
        self._began = clock()
        self._next = self._began + _FIRST_LINE_SECONDS
        self._printed: float | None = None

    def move(self) -> None:
        if self._clock() >= self._next:
            self._print()

    def close(self, always: bool) -> None:
        """Print how far it came, unless the last line said so, or it was over before the first."""
        if self._printed != self._task.completed and (always or self._printed is not None):
            self._print()

    def _print(self) -> None:
        now, task = self._clock(), self._task
        elapsed, done = now - self._began, task.completed - self._first_done
        line = f"{task.description}: {task.completed}/{task.total}, {_render_time(elapsed)} elapsed"
        if done and (left := task.remaining or 0) > 0:
            line += f", {_render_time(elapsed / done * left)} left"
        if task.fields["figures"]:
            line += f"  {task.fields['figures']}"
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
        self._printed = task.completed
        self._next = now + _LINE_SECONDS


def _render_time(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


@contextmanager
def progress_bar(
    shown: bool,
    what: str,
    total: int,
    *,
    done: int = 0,
    stays: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show progress on stderr, of a `total` of whatever is counted; yields what moves it on.

    If it `stays`, its last state is left behind; otherwise a terminal's bar goes when it is done, and
    elsewhere what took no longer than the first line waits leaves nothing. The clock is of the plain lines,
    in seconds.
    """
    console = Console(stderr=True)
    is_drawn = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets"))
    bar = _TwoLines(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=not stays,
        disable=not (shown and is_drawn),
        speed_estimate_period=_ESTIMATE_SECONDS,
    )
    task = bar.add_task(what, total=total, completed=done, figures="")
    lines = _Lines(bar.tasks[0], clock) if shown and not is_drawn else None

    def advance(count: int = 1, /, *, what: str | None = None, figures: str = "") -> None:
        bar.update(task, advance=count, description=what, figures=figures)
        if lines is not None:
            lines.move()

    try:
        with bar:
            yield advance
    finally:
        if lines is not None:
            lines.close(stays)
