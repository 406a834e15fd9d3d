"""Files of a training run, and its resumable state.

There is no random state in it: a step's sample is a function of the recipe's seed and the step, and nothing
else in training is random.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leank_convert.checkpoint_io import RATIO_PREFIX, TRAINING_FOLDER
from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError, first_line, shorten
from leank_convert.files import sha256_of, write_atomically
from leank_convert.folders import LOCK_NAME
from leank_convert.mask import MASK_FILE_NAME, resolve_mask
from leank_convert.recipe import HeadsSection, Recipe
from leank_convert.recipe_file import RUN_RECIPE_NAME
from leank_convert.train.model import LoadedModel
from leank_convert.train.schedule import Schedule

# Settings that change how a run is watched or what becomes of the mask, not the mask itself. `model.id` is
# a name, and so is a haystack's source: what they stand for is compared. How many ranks share a step's
# samples is not a setting at all.
_FREE_SETTINGS = (
    "save_every",
    "mask",
    "calibration_prompts",
    "model.id",
    "model.device_map",
    "data.haystack.source",
    "offload_context",
    "held_out_samples",
    "trackers",
)
_GATE_SETTINGS = tuple(f"heads.{name}" for name in HeadsSection.model_fields)


class TrainingDirectory:
    """The files of a run under `out/`, which with one asked ratio later becomes the checkpoint."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.mask = out / MASK_FILE_NAME  # the result
        self.folder = out / TRAINING_FOLDER  # log, events, report, recipe, state
        self.recipe = self.folder / RUN_RECIPE_NAME  # the resolved recipe
        self.state = self.folder / "state" / "training_state.pt"  # the resumable state
        self.pattern = self.folder / "heads"  # the heads' gates, of a method that has them

    def check_usable(self, recipe: Recipe, *, resume: bool) -> None:
        """Refuse, by a LeanKError, to begin where a run is, and to go on with what trains nothing."""
        if resume and not recipe.trains:
            raise LeanKError(
                f"`--resume` goes on with training, and `method: {recipe.method}` trains nothing",
                hint="leave `--resume` out, and name a folder without a run: it takes seconds to minutes",
            )
        found = {path.name for path in self.folder.iterdir()} if self.folder.exists() else set()
        if not resume and found - {LOCK_NAME}:
            raise LeanKError(
                f"`{self.folder}` already holds a training run",
                hint="choose another folder" + (", or go on with it by `--resume`" if recipe.trains else ""),
            )

    def results(self, recipe: Recipe) -> dict[float, TrainingDirectory]:
        """Where the mask of each asked ratio goes: `out/`, or `out/ratio-0.5/` and its like of several."""
        ratios = recipe.pruning_ratios
        if len(ratios) == 1:
            return {ratios[0]: self}
        return {ratio: TrainingDirectory(self.out / f"{RATIO_PREFIX}{ratio}") for ratio in ratios}


@dataclass
class TrainingState:
    """Where a run stands between two steps."""

    fingerprint: dict[str, str]  # what the run depends on, as flat keys and values
    # Float32 [L, H_kv, D]; while gates are learned, those of heads [L, H_kv, 1] or of V's directions.
    scaling_factors: Tensor
    step: int = 0  # steps done, over all phases
    # Adam's `step`, `exp_avg` and `exp_avg_sq`; empty before a stage's first step.
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    # What stage 1 ended with, once it has; every ratio's stage 2 begins with them.
    stage1_factors: Tensor | None = None
    # What stage 2 ended with, for each ratio that is done.
    finished: list[Tensor] = field(default_factory=list)
    # Gates of heads [L, H_kv, 1], once they are learned or imported, of a method that has them.
    gates: Tensor | None = None
    # Within a stage 2 whose masks are compared, the least loss so far and the factors that had it.
    best: tuple[float, Tensor] | None = None
    key_mean: Tensor | None = None  # the mean of keys, float16 [L, H_kv, D]; None for keys as they are
    key_mean_tokens: int | None = None  # how many tokens it was measured on; None if not known
    values: dict[str, Any] | None = None  # the fields of the basis of V; None where V is not pruned
    # What gates of V's directions ended with, for each ratio that is done.
    finished_values: list[Tensor] = field(default_factory=list)


def fingerprint_run(recipe: Recipe, loaded: LoadedModel, samples: SampleSource) -> dict[str, str]:
    """Everything that the result depends on: recipe, model and data."""
    settings = _flatten(recipe.model_dump(mode="json"))
    for key in _FREE_SETTINGS if recipe.method_row.has_gates else (*_FREE_SETTINGS, *_GATE_SETTINGS):
        settings.pop(key, None)
    found = {f"recipe: {key}": value for key, value in settings.items()}
    found |= {f"model: config.json: {key}": value for key, value in _flatten(loaded.config).items()}
    found["model: weights"] = loaded.weights_digest[:16]
    if recipe.mask is not None:
        found["mask"] = sha256_of(resolve_mask(recipe.mask))[:16]
    if Schedule(recipe).num_steps:
        found["data: first sample and haystack"] = samples.fingerprint()
    if recipe.value_pruning_ratio and samples.has_text:
        found["data: text"] = hashlib.sha256(samples.text.encode()).hexdigest()[:16]
    return found


def check_same_run(saved: Mapping[str, str], current: Mapping[str, str], path: Path) -> None:
    """Refuse to go on with other settings than a run began with; raises LeanKError."""
    differing = [key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)]
    if not differing:
        return
    listed = "".join(
        f"\n  {shorten(key)} was `{shorten(saved.get(key, 'not set'))}`, "
        f"is `{shorten(current.get(key, 'not set'))}`"
        for key in differing
    )
    raise LeanKError(
        f"`{path}` was saved by another run:{listed}",
        hint="resume with what the run began with, or train into another folder",
    )


def save_state(state: TrainingState, path: Path) -> None:
    """Write the state, so that `path` holds the old or the new one whole; LeanKError if it cannot be."""
    content = BytesIO()
    torch.save(vars(state), content)
    try:
        write_atomically(path, content.getvalue())
    except OSError as error:
        raise LeanKError(f"training state `{path}` cannot be written: {error.strerror}") from error


def load_state(path: Path) -> TrainingState:
    """Read a saved state, to the CPU.

    Raises:
        LeanKError: If it is damaged.
        OSError: If it cannot be read.
    """
    try:
        return TrainingState(**torch.load(path, map_location="cpu", weights_only=True))
    except OSError:  # says nothing of what is in it
        raise
    except Exception as error:  # whatever torch stumbles upon in a file that it has not written
        raise LeanKError(
            f"training state `{path}` is damaged: {first_line(error)}",
            hint="train again without `--resume` into another folder",
        ) from error


def _flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value, sort_keys=True)
    return flat
