"""Schedule of a run: head gates where the method has them, stage 1 once, stage 2 and V's gates per ratio."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from leank_convert.recipe import Recipe
from leank_convert.train.scaling import learning_rate_factor


@dataclass(frozen=True)
class Phase:
    """One stage of a run, from stage 2 on with the ratio it is for."""

    stage: int  # 1 or 2; 0 where gates of heads are learned, 3 where those of V's directions are
    pruning_ratio: float | None  # what stage 2 prunes, or pruned, to; None before it
    start: int  # steps of the run before it
    steps: int  # steps of its own, one or more
    # Which of the data's steps its first step takes. Every ratio's stage 2 takes the same, so that a mask
    # does not depend on what other ratios were asked for with it.
    first_draw: int
    peak_learning_rate: float  # the rate of its middle steps
    l1_weight: float  # what the penalty is multiplied by

    @property
    def stop(self) -> int:
        """Steps of the run when it is done."""
        return self.start + self.steps

    def learning_rate(self, step: int) -> float:
        """The rate of one step of the run."""
        return self.peak_learning_rate * learning_rate_factor(step - self.start, self.steps)

    def ends_tenth(self, step: int) -> bool:
        """Whether another tenth of it is over when so many steps of the run are done."""
        done = step - self.start
        return 10 * done // self.steps > 10 * (done - 1) // self.steps


class Schedule:
    """All phases of a recipe that have steps."""

    def __init__(self, recipe: Recipe) -> None:
        sections: dict[str, Any] = {"gates": recipe.heads, "stage1": recipe.stage1}
        sections |= {"stage2": recipe.stage2, "values": recipe.values}
        phases: list[Phase] = []
        stop = first_draw = 0
        for stage, (part, section) in enumerate(sections.items()):
            if part not in recipe.trains:
                continue
            rates = section.learning_rate, getattr(section, "l1_weight", 0.0)
            for ratio in (None,) if stage < 2 else recipe.pruning_ratios:
                phases.append(Phase(stage, ratio, stop, section.steps, first_draw, *rates))
                stop += section.steps
            first_draw += section.steps
        self.phases = tuple(phase for phase in phases if phase.steps)  # in the order they run
        self.num_steps = stop
        self.num_steps_of_data = first_draw  # every ratio's are the same ones
        # How often masks are tried on validation contexts, where there are any.
        self.num_comparisons = sum(
            1 + sum(phase.ends_tenth(step) for step in range(phase.start + 1, phase.stop + 1))
            for phase in self.phases
            if phase.stage == 2
        )
        self._batch_size = recipe.batch_size

    def phase(self, step: int) -> Phase:
        """The phase that a step of the run lies in."""
        return next(phase for phase in self.phases if step < phase.stop)

    def sample_indices(self, start: int, rank: int = 0, num_ranks: int = 1) -> Iterator[int]:
        """Which samples one of several ranks takes from a step of the run on, in order.

        As V is measured on tasks and on text by turns, its gates are learned on both.
        """
        for step in range(start, self.num_steps):
            phase = self.phase(step)
            draw = phase.first_draw + step - phase.start
            first = phase.first_draw * self._batch_size
            for index in range(draw * self._batch_size + rank, (draw + 1) * self._batch_size, num_ranks):
                place, is_text = divmod(index - first, 2)
                yield index if phase.stage < 3 else ~(first + place) if is_text else first + place
