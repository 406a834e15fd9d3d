"""Training log: every step in log.jsonl, in trackers (TensorBoard, W&B) and on the progress bar.

What held-out samples showed comes last in log.jsonl, in lines with a `kind`; a resumed run writes them anew.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from torch import Tensor

from leank_convert.errors import LeanKError, first_line
from leank_convert.files import read_json_lines, write_atomically
from leank_convert.held_out import HeldOut
from leank_convert.methods import STAGES
from leank_convert.progress import progress_bar
from leank_convert.recipe import Recipe

LOG_NAME = "log.jsonl"

_logger = logging.getLogger("leank_convert")


@dataclass(frozen=True)
class StepRecord:
    """One line of log.jsonl; null where a value does not exist."""

    step: int  # steps done, over all stages
    stage: int  # 1 or 2; 0 where gates of heads are learned, 3 where those of V's directions are
    # From stage 2 on: the ratio it is for; a recipe of several has these stages for each.
    pruning_ratio_asked: float | None
    task: str  # of this rank's samples; several as `retrieval+multi_value`
    num_tokens: int  # what the model computed in this step, over all its contexts and ranks
    num_answer_tokens: int  # answer tokens of the same
    learning_rate: float  # of this step
    distillation: float  # mean squared difference of hidden states
    # Mean scaling factor, or gate where those are learned, before the step; the L1 term without its weight.
    mean_factor: float
    pruning_ratio: float | None  # stage 2: the ratio that the mask after this step reaches
    empty_heads: int | None  # stage 2: heads that do not see the middle after this step
    heads_leaving: str  # stage 2: `layer.head` of those that lost their last channels in this step
    heads_entering: str  # stage 2: `layer.head` of those that got channels back in this step
    seconds: float  # wall time of the step, samples included
    gpu_bytes: int | None  # the most that was allocated at once on this rank's GPU in this step
    # Stage 2, where masks are compared: the mean loss of the mask after this step.
    validation: float | None = None


def name_heads(chosen: Tensor, layers: Sequence[int]) -> str:
    """Name heads, bool [L, H_kv] of layers of these numbers, as a record does: `layer.head`."""
    return " ".join(f"{layers[layer]}.{head}" for layer, head in chosen.nonzero().tolist())


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


class TrainingLog:
    """Writes each step's record; a context manager, on one rank alone.

    Lines and events beyond the step that a run resumes from, `start`, are dropped: those steps are run again.
    W&B keeps what it has and ignores them, which is the same, for they come out the same.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, num_steps: int, start: int, progress: bool) -> None:
        self._recipe = recipe
        self._tokens, self._seconds = 0, 0.0
        path, trackers = folder / LOG_NAME, {"tensorboard": _start_tensorboard, "wandb": _start_wandb}
        # What is open already is closed again if a tracker does not start.
        with ExitStack() as stack:
            write_atomically(path, [_to_line(record) for record in read_log(path) if record.step <= start])
            self._file = stack.enter_context(path.open("ab"))
            self._trackers = [trackers[name](stack, folder, recipe, start) for name in recipe.trackers]
            self._advance = stack.enter_context(
                progress_bar(progress, "training", num_steps, done=start, stays=True)
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, record: StepRecord) -> None:
        """Add one step."""
        self._file.write(_to_line(record))
        stage = STAGES[record.stage].replace(" ", "")
        if len(self._recipe.pruning_ratios) > 1 and record.pruning_ratio_asked is not None:
            stage = f"{stage}-{record.pruning_ratio_asked}"
        values = {f"{stage}/{name}": getattr(record, name) for name in _TRACKED}
        for track in self._trackers:
            track({name: value for name, value in values.items() if value is not None}, step=record.step)
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


def _start_tensorboard(stack: ExitStack, folder: Path, recipe: Recipe, start: int) -> Callable[..., None]:
    try:  # here, as it takes a while to import
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _logger.info("TensorBoard is not installed, so there are no events: %s has all figures", LOG_NAME)
        return lambda values, step: None
    events: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
    stack.enter_context(events)

    def track(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            events.add_scalar(name, value, step)
        events.flush()

    return track


def _start_wandb(stack: ExitStack, folder: Path, recipe: Recipe, start: int) -> Callable[..., None]:
    known = folder / "wandb_run_id"
    try:
        run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "leank"),
            name=folder.resolve().parent.name,
            dir=str(folder),
            id=known.read_text().strip() if known.exists() else None,
            resume="allow",
            config=recipe.model_dump(mode="json"),
        )
    except Exception as error:  # W&B has errors of its own, which need not be importable here
        raise LeanKError(
            f"W&B cannot be started: {first_line(error)}",
            hint="`wandb login`, set `WANDB_MODE=offline`, or drop `wandb` from the recipe's `trackers`",
        ) from error
    stack.push(lambda kind, *_: run.finish(exit_code=0 if kind is None else 1))
    write_atomically(known, f"{run.id}\n".encode())
    track: Callable[..., None] = run.log
    return track


def append_held_out(path: Path, found: Mapping[float, HeldOut]) -> None:
    """Add to a finished run's log how held-out samples were answered, a line for each asked ratio."""
    with path.open("ab") as file:
        for ratio, held_out in found.items():
            line = {"kind": "held_out", "pruning_ratio_asked": ratio, **asdict(held_out)}
            file.write(json.dumps(line).encode() + b"\n")


def _render_figures(record: StepRecord, tokens_per_second: float) -> str:
    reached = record.pruning_ratio
    parts = [
        f"distillation {record.distillation:.2e}",
        f"mean {'factor' if record.stage in (1, 2) else 'gate'} {record.mean_factor:.3f}"
        if reached is None
        else f"pruned {reached:.1%}",
        f"{tokens_per_second:,.0f} tokens/s",
    ]
    if record.gpu_bytes is not None:
        parts.append(f"GPU {decimal(record.gpu_bytes)}")
    return "  ".join(parts)


def read_log(path: Path) -> list[StepRecord]:
    """Read the steps of a run's log; none if there is no such file. A line that was torn is left out."""
    return [StepRecord(**line) for line in read_json_lines(path) if line.keys() == _KEYS]


def _to_line(record: StepRecord) -> bytes:
    return json.dumps(asdict(record)).encode() + b"\n"
