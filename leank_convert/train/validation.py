"""Validation contexts, on which masks of stage 2 are compared.

Near a high ratio one channel block more or less may decide whether a model still retrieves, and stage 2 goes
from one mask to another with every step: the last of them is as good as chance made it.
"""

from __future__ import annotations

from functools import cached_property

from leank_convert.data import SampleSource, TrainingSample
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.recipe import Recipe
from leank_convert.train.graphs import Gradients
from leank_convert.train.model import LoadedModel
from leank_convert.train.passes import Student
from leank_convert.train.ranks import Ranks

# Added to the recipe's seed: apart from training, and from what is held out in the end.
_SEED_OFFSET = 500_000


class Validation:
    """Contexts of a recipe's data with another seed.

    Args:
        recipe: Its data, and how many contexts.
        loaded: The model.
        gradients: What computes the losses.
        ranks: The processes that share the contexts.
    """

    def __init__(self, recipe: Recipe, loaded: LoadedModel, gradients: Gradients, ranks: Ranks) -> None:
        self._count = recipe.stage2.validation_contexts
        self._source = SampleSource(loaded.tokenizer, recipe.data, recipe.seed + _SEED_OFFSET)
        self._gradients = gradients
        self._ranks = ranks

    def loss(self, student: Student) -> float:
        """The mean loss of a student.

        Raises:
            LeanKError: If memory does not suffice, or no sample can be drawn, on any rank.
        """
        total, failure = 0.0, None
        try:
            with out_of_memory("a validation context", "lower `data.max_length`"):
                total = sum(self._gradients.loss(sample, student).item() for sample in self._samples)
        except LeanKError as error:
            failure = error
        self._ranks.check(failure)
        (total,) = self._ranks.totals([total])
        return total / self._count

    @cached_property
    def _samples(self) -> list[TrainingSample]:
        """This rank's."""
        return [
            self._source.draw(index) for index in range(self._ranks.rank, self._count, self._ranks.num_ranks)
        ]
