"""Where a run keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from leank_convert.errors import LeanKError
from leank_convert.mask import MASK_FILE_NAME
from leank_convert.recipe import Recipe
from leank_convert.train.state import STATE_FILE_NAME


@dataclass(frozen=True)
class TrainingDirectory:
    """The files of a run under `out/`.

    Args:
        out: The output folder; with one asked ratio it later becomes the checkpoint.
    """

    out: Path

    @property
    def folder(self) -> Path:
        """Log, events, report, recipe, state."""
        return self.out / "leank"

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.folder / "recipe.yaml"

    @property
    def state(self) -> Path:
        """The resumable state."""
        return self.folder / "state" / STATE_FILE_NAME

    @property
    def pattern(self) -> Path:
        """The heads' gates, of a method that has them."""
        return self.folder / "heads"

    @property
    def mask(self) -> Path:
        """The result."""
        return self.out / MASK_FILE_NAME

    def check_usable(self, recipe: Recipe, *, resume: bool) -> None:
        """Refuse to begin where there is a run, and to go on with a method that saves no state.

        Raises:
            LeanKError: If it is either.
        """
        if resume and not recipe.is_trained:
            raise LeanKError(
                f"`--resume` goes on with training, and `method: {recipe.method}` trains nothing",
                hint="leave `--resume` out: the method begins anew, in seconds to minutes",
            )
        if not resume and self.folder.exists():
            raise LeanKError(
                f"`{self.folder}` already holds a training run",
                hint="go on with it by `--resume`, or train into another folder"
                if recipe.is_trained
                else "choose another folder; `leank-convert export` makes a checkpoint of the mask in it",
            )

    def results(self, recipe: Recipe) -> dict[float, TrainingDirectory]:
        """Where the mask of each asked ratio goes: `out/`, or `out/ratio-0.5/` and its like of several."""
        ratios = recipe.pruning_ratios
        if len(ratios) == 1:
            return {ratios[0]: self}
        return {ratio: TrainingDirectory(self.out / f"ratio-{ratio}") for ratio in ratios}
