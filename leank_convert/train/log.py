"""Training log: every step in log.jsonl, in trackers (TensorBoard, W&B) and on the progress bar.

What held-out samples showed comes last in log.jsonl, in lines with a `kind`; a resumed run writes them anew.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.filesize import decimal

from leank_convert.errors import LeanKError, first_line
from leank_convert.files import read_json_lines, write_atomically
from leank_convert.held_out import HeldOut
from leank_convert.progress import Advance, progress_bar
from leank_convert.recipe import Recipe

LOG_NAME = "log.jsonl"
_DEFAULT_PROJECT = "leank"
_WANDB_REMEDY = "or drop `wandb` from the recipe's `trackers`"


@dataclass(frozen=True)
class StepRecord:
    """One line of log.jsonl; null where a value does not exist.

    Attributes:
        step: Steps done, over all stages.
        stage: 1 or 2; 0 where gates of heads are learned.
        pruning_ratio_asked: Stage 2: the ratio it is for; a recipe of several has a stage 2 for each.
        task: Of this rank's samples; several as `retrieval+multi_value`.
        num_tokens: What the model computed in this step, over all its contexts and ranks.
        num_answer_tokens: Answer tokens of the same.
        learning_rate: Of this step.
        distillation: Mean squared difference of hidden states.
        mean_factor: Mean scaling factor, or gate where those are learned, before the step; the L1 term
            without its weight.
        pruning_ratio: Stage 2: the ratio that the mask after this step reaches.
        empty_heads: Stage 2: heads that do not see the middle after this step.
        heads_leaving: Stage 2: `layer.head` of those that lost their last channels in this step.
        heads_entering: Stage 2: `layer.head` of those that got channels back in this step.
        seconds: Wall time of the step, samples included.
        gpu_bytes: The most that was allocated at once on this rank's GPU in this step.
        validation: Stage 2, where masks are compared: the mean loss of the mask after this step.
    """

    step: int
    stage: int
    pruning_ratio_asked: float | None
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
    gpu_bytes: int | None
    validation: float | None = None


_KEYS = StepRecord.__dataclass_fields__.keys()
_TRACKED = (
    "learning_rate",
    "distillation",
    "validation",
    "mean_factor",
    "pruning_ratio",
    "empty_heads",
    "num_tokens",
    "seconds",
    "gpu_bytes",
)


def check_trackers(trackers: Sequence[str]) -> None:
    """Check, before anything long begins, that the recipe's trackers are installed.

    Raises:
        LeanKError: If one is not.
    """
    if "wandb" not in trackers:
        return
    try:
        importlib.import_module("wandb")
    except ImportError as error:
        raise LeanKError(
            f"the recipe's `trackers` name `wandb`, which cannot be imported: {first_line(error)}",
            hint=f"`pip install wandb`, {_WANDB_REMEDY}",
        ) from error


class TrainingLog:
    """Writes each step's record; a context manager, on one rank alone.

    Lines and events beyond the step that a run resumes from are dropped: those steps are run again. W&B keeps
    what it has and ignores them, which is the same, for they come out the same.

    Args:
        folder: The training directory.
        recipe: Its trackers are used, and W&B is given its settings.
        num_steps: Steps of all stages.
        start: The step the run starts or resumes from.
        progress: Whether to draw a progress bar to stderr.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, num_steps: int, start: int, progress: bool) -> None:
        self._folder = folder
        self._recipe = recipe
        self._start = start
        self._tokens = 0
        self._seconds = 0.0
        self._trackers: list[Any] = []
        self._stack = ExitStack()
        self._num_steps = num_steps
        self._shown = progress
        self._advance: Advance

    def __enter__(self) -> TrainingLog:
        # What is open already is closed again if a tracker does not start.
        with ExitStack() as stack:
            path = self._folder / LOG_NAME
            kept = [record for record in read_log(path) if record.step <= self._start]
            write_atomically(path, map(_to_line, kept))
            self._file = stack.enter_context(path.open("ab"))
            for name in self._recipe.trackers:
                self._trackers.append(self._start_tracker(name))
                stack.push(partial(_finish, self._trackers[-1]))
            self._advance = stack.enter_context(
                progress_bar(self._shown, "training", self._num_steps, done=self._start, stays=True)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _start_tracker(self, name: str) -> Any:
        # accelerate takes a while to import.
        from accelerate import PartialState
        from accelerate.tracking import TensorBoardTracker, WandBTracker

        PartialState()  # the trackers ask it which rank they are on
        if name == "tensorboard":
            events = TensorBoardTracker("tensorboard", self._folder, purge_step=self._start + 1)
            events.start()
            return events
        known = self._folder / "wandb_run_id"
        run = WandBTracker(
            os.environ.get("WANDB_PROJECT", _DEFAULT_PROJECT),
            name=self._folder.resolve().parent.name,
            dir=str(self._folder),
            id=known.read_text().strip() if known.exists() else None,
            resume="allow",
        )
        try:
            run.start()
            run.store_init_configuration(self._recipe.model_dump(mode="json"))
        except Exception as error:  # W&B has errors of its own, which need not be importable here
            raise LeanKError(
                f"W&B cannot be started: {first_line(error)}",
                hint=f"`wandb login`, set `WANDB_MODE=offline`, {_WANDB_REMEDY}",
            ) from error
        write_atomically(known, f"{run.tracker.id}\n".encode())
        return run

    def write(self, record: StepRecord) -> None:
        """Add one step."""
        self._file.write(_to_line(record))
        stage = f"stage{record.stage}" if record.stage else "gates"
        if len(self._recipe.pruning_ratios) > 1 and record.pruning_ratio_asked is not None:
            stage = f"{stage}-{record.pruning_ratio_asked}"
        values = {name: getattr(record, name) for name in _TRACKED}
        for tracker in self._trackers:
            tracker.log(
                {f"{stage}/{name}": value for name, value in values.items() if value is not None},
                step=record.step,
            )
        self._tokens += record.num_tokens
        self._seconds += record.seconds
        self._advance(
            what=stage.replace("stage", "stage "),
            figures=_render_figures(record, self._tokens / max(self._seconds, sys.float_info.min)),
        )

    def sync(self) -> None:
        """Bring all lines to disk; called before a state is saved, so that none it counts on can be lost."""
        self._file.flush()
        os.fsync(self._file.fileno())


def append_held_out(path: Path, found: Mapping[float, HeldOut]) -> None:
    """Add to a finished run's log how held-out samples were answered, a line for each asked ratio."""
    with path.open("ab") as file:
        for ratio, held_out in found.items():
            line = {"kind": "held_out", "pruning_ratio_asked": ratio, **asdict(held_out)}
            file.write(json.dumps(line).encode() + b"\n")


def _finish(
    tracker: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """End a tracker's run; W&B is told whether it failed, which accelerate's own `finish` does not."""
    if kind is not None and tracker.name == "wandb":
        tracker.tracker.finish(exit_code=1)
    else:
        tracker.finish()


def _render_figures(record: StepRecord, tokens_per_second: float) -> str:
    """What the progress bar says of a step."""
    reached = record.pruning_ratio
    parts = [
        f"distillation {record.distillation:.2e}",
        f"mean {'factor' if record.stage else 'gate'} {record.mean_factor:.3f}"
        if reached is None
        else f"pruned {reached:.1%}",
        f"{tokens_per_second:,.0f} tokens/s",
    ]
    if record.gpu_bytes is not None:
        parts.append(f"GPU {decimal(record.gpu_bytes)}")
    return "  ".join(parts)


def read_log(path: Path) -> list[StepRecord]:
    """Read the steps of a run's log; none if there is no such file. A line that was torn is left out."""
    return [StepRecord(**line) for line in read_json_lines(path) if line.keys() | {"validation"} == _KEYS]


def _to_line(record: StepRecord) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"
