"""Result of the check that ends the making of a mask: held-out samples, answered dense and pruned.

Importing this module does not import torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="ignore"))
class HeldOut:
    """How samples that the mask was not made by were answered.

    Attributes:
        tasks: What was asked, in turn.
        min_length: Tokens that the shortest sample may have.
        max_length: Those of the longest.
        seed: Of the samples.
        num_contexts: Samples.
        num_answers: Their questions, one or more each.
        dense: Share that the dense model answers right in every token, greedily.
        pruned: Share that the pruned one does.
        distillation: Mean squared difference of their hidden states, as training logs it.
        warnings: What of it is far off, and what to change.
    """

    tasks: Annotated[tuple[Annotated[str, Field(max_length=40)], ...], Field(max_length=16, strict=False)]
    min_length: _Count
    max_length: _Count
    seed: Annotated[int, Field(ge=0)]
    num_contexts: _Count
    num_answers: _Count
    dense: _Share
    pruned: _Share
    distillation: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    warnings: Annotated[
        tuple[Annotated[str, Field(max_length=400)], ...], Field(max_length=8, strict=False)
    ] = ()

    def render(self) -> str:
        """The result in one line."""
        return (
            f"dense {self.dense:.1%}, pruned {self.pruned:.1%} of {self.num_answers} answers right in every "
            f"token ({self.num_contexts} held-out contexts of {self.min_length} to {self.max_length} tokens; "
            f"{', '.join(self.tasks)}; seed {self.seed}; distillation {self.distillation:.2e})"
        )
