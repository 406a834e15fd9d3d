"""One prompt of an evaluation, and how an answer to it is scored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

Scoring = Literal["exact", "all", "any"]


@dataclass(frozen=True)
class Prompt:
    """A prompt with what its answer should hold.

    Attributes:
        task: The task it was drawn from.
        length: The tokens that were asked for, room for the answer included.
        index: Its place among the prompts of one task and length.
        input_ids: The tokens as they are fed, template included, int64 [N].
        references: What the answer should be, or should hold.
        scoring: `exact`: the stripped answer is the one reference. `all`: the share of references that it
            holds, whatever their case (RULER's `string_match_all`). `any`: whether it holds one of them
            (RULER's `string_match_part`).
        max_new_tokens: Where an answer ends at the latest.
    """

    task: str
    length: int
    index: int
    input_ids: Tensor
    references: tuple[str, ...]
    scoring: Scoring
    max_new_tokens: int

    @cached_property
    def digest(self) -> str:
        """A digest of everything that an answer and its score depend on, beside the model."""
        content = (self.input_ids.tolist(), self.references, self.scoring, self.max_new_tokens)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def score(prediction: str, prompt: Prompt) -> float:
    """Score an answer, from 0 to 1."""
    if prompt.scoring == "exact":
        return float(prediction.strip() == prompt.references[0])
    text = prediction.lower()
    held = [reference.lower() in text for reference in prompt.references]
    return float(any(held)) if prompt.scoring == "any" else sum(held) / len(held)
