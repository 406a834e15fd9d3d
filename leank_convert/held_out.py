"""Held-out accuracy of a mask, dense and pruned, as it is stored with the mask.

Importing this module does not import torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_Share = Annotated[float, Field(ge=0, le=1, strict=True)]
_Count = Annotated[int, Field(ge=1, strict=True)]


# Not `strict` as a whole: files give it as an object.
@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class TokenShares:
    """How many tokens of the answers are the most likely ones, each given the right tokens before it.

    Attributes:
        count: Tokens of all answers.
        dense: Share that the dense model predicts right.
        pruned: Share that the pruned one does.
    """

    count: _Count
    dense: _Share
    pruned: _Share


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
        tokens: What the answers' single tokens say.
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
    tokens: TokenShares
    warnings: Annotated[
        tuple[Annotated[str, Field(max_length=400)], ...], Field(max_length=8, strict=False)
    ] = ()

    @property
    def shares(self) -> str:
        """What was right, in a few words."""
        dense, pruned, count = self.tokens.dense, self.tokens.pruned, self.tokens.count
        return (
            f"dense {dense:.1%}, pruned {pruned:.1%} of {count} tokens in held-out answers; "
            f"dense {self.dense:.1%}, pruned {self.pruned:.1%} of {self.num_answers} answers in full"
        )

    def render(self) -> str:
        """The result in one line."""
        return (
            f"{self.shares} ({self.num_contexts} contexts of {self.min_length} to {self.max_length} tokens; "
            f"{', '.join(self.tasks)}; seed {self.seed}; distillation {self.distillation:.2e})"
        )
