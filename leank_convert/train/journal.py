"""What a run tells while it goes on: log.csv, TensorBoard events, a progress bar."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from leank_convert.checkpoint_io import write_atomically


@dataclass(frozen=True)
class StepRecord:
    """One row of log.csv, empty where a value does not exist.

    Attributes:
        step: Steps done, over both stages.
        stage: 1 or 2.
        task: The sample's task.
        num_tokens: The sample's length, answer included.
        num_answer_tokens: Its answer's length.
        learning_rate: Of this step.
        distillation: Mean squared difference of hidden states.
        mean_factor: Mean scaling factor before the step; the L1 term without its weight.
        pruning_ratio: Stage 2: the ratio that the mask after this step reaches.
        empty_heads: Stage 2: heads that do not see the middle after this step.
        heads_leaving: Stage 2: `layer.head` of those that lost their last channels in this step.
        heads_entering: Stage 2: `layer.head` of those that got channels back in this step.
        seconds: Wall time of the step, sample included.
    """

    step: int
    stage: int
    task: str
    num_tokens: int
    num_answer_tokens: int
    learning_rate: float
    distillation: float
    mean_factor: float
    pruning_ratio: float | None
    empty_heads: int | None
    heads_leaving: str
    heads_entering: str
    seconds: float


_COLUMNS = tuple(field.name for field in fields(StepRecord))
_SCALARS = (
    "learning_rate",
    "distillation",
    "mean_factor",
    "pruning_ratio",
    "empty_heads",
    "num_tokens",
    "seconds",
)


class Journal:
    """Writes each step's record; a context manager.

    Rows beyond the step that a run resumes from are dropped: those steps are run again.

    Args:
        folder: The training directory.
        num_steps: Steps of both stages.
        start: The step the run starts or resumes from.
        progress: Whether to draw a progress bar to stderr.
    """

    def __init__(self, folder: Path, num_steps: int, start: int, progress: bool) -> None:
        # TensorBoard takes a while to import.
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "log.csv"
        kept = io.StringIO(newline="")
        csv.writer(kept).writerows([_COLUMNS, *_rows_until(path, start)])
        write_atomically(path, kept.getvalue().encode())
        self._file = path.open("a", newline="", encoding="utf-8")
        self._csv = csv.writer(self._file)
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not progress,
        )
        self._bar = self._progress.add_task("training", total=num_steps, completed=start, figures="")

    def __enter__(self) -> Journal:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._events.close()
        self._file.close()

    def write(self, record: StepRecord) -> None:
        """Add one step."""
        self._csv.writerow("" if (v := getattr(record, name)) is None else v for name in _COLUMNS)
        for name in _SCALARS:
            value = getattr(record, name)
            if value is not None:
                self._events.add_scalar(f"stage{record.stage}/{name}", value, record.step)
        figures = f"distillation {record.distillation:.2e}  mean factor {record.mean_factor:.3f}"
        if record.pruning_ratio is not None:
            figures = f"distillation {record.distillation:.2e}  pruned {record.pruning_ratio:.1%}"
        self._progress.update(
            self._bar, completed=record.step, description=f"stage {record.stage}", figures=figures
        )

    def sync(self) -> None:
        """Bring all rows to disk; called before a state is saved, so that no row it counts on can be lost."""
        self._file.flush()
        os.fsync(self._file.fileno())


def _rows_until(path: Path, step: int) -> list[list[str]]:
    if not path.is_file():
        return []
    # A row that a dying machine tore may hold anything, NUL included: each line is read by itself.
    text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
    rows = [row for line in text.splitlines() for row in csv.reader([line])]
    return [row for row in rows if len(row) == len(_COLUMNS) and row[0].isdecimal() and int(row[0]) <= step]
