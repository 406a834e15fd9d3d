"""The progress bar of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(shown: bool, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Draw a progress bar to stderr, which goes when it is done; yields what advances it."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    # Where nothing can be drawn over, such as in a file, a bar leaves an empty line.
    drawn = shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not drawn) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
