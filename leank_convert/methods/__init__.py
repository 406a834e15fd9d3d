"""Table of the methods that choose a model's channels.

A method is LeanK's training or a part of it, or a function that scores channels without training; those with
the highest scores are kept (`train.selection`). To add one, write a function that takes a
`calibration.Calibration` and returns scores [L, H_kv, D] in a file of this folder, and give it a row: recipes
and commands read the table. Rows of other packages are found by their entry points (`ENTRY_POINTS`).

Importing this module does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

ENTRY_POINTS = "leank_convert.methods"
"""Group of the entry points by which a package adds methods, each a `Method`."""

_logger = logging.getLogger("leank_convert")

Budget = Literal["uniform", "global"]
Part = Literal["gates", "stage1", "stage2", "values"]

STAGES = ("gates", "stage 1", "stage 2", "values")
"""What a person calls the phases of a training run, by number; the last is of gates on V's directions."""


@dataclass(frozen=True)
class Method:
    """A row."""

    name: str  # a recipe's `method`
    summary: str  # what it does, as the end of "this method ..."
    # Where its function is, as `module:function`; None where training finds the scores.
    score: str | None = None
    # How many prompts that function measures; None for the recipe's `calibration_prompts`.
    num_prompts: int | None = 0
    # What is learned of K, in this order: gates of heads, scaling factors (stage 1), the mask (stage 2).
    trains: tuple[Part, ...] = ()
    # How channels are shared out where the recipe does not say: every head keeps as many, or the whole
    # model's best are kept.
    budget: Budget = "global"
    whole_heads: bool = False  # whether a head keeps all channels or none

    @property
    def has_gates(self) -> bool:
        """Whether heads are chosen by gates, learned or imported."""
        return "gates" in self.trains


METHODS = {
    method.name: method
    for method in (
        Method(
            "leank",
            "learns scaling factors of channels, then the mask itself (the paper's two stages)",
            trains=("stage1", "stage2"),
        ),
        Method(
            "magnitude-alpha",
            "learns scaling factors and keeps the largest (stage 1 of leank alone)",
            trains=("stage1",),
        ),
        Method(
            "static-norm",
            "keeps channels with the largest part in the norm of q·k, averaged over prompts",
            score="leank_convert.methods.scores:static_norm",
            num_prompts=None,
            budget="uniform",
        ),
        Method(
            "double-sparsity",
            "keeps channels with the largest |q·k| of a token with itself, averaged over prompts",
            score="leank_convert.methods.scores:double_sparsity",
            num_prompts=None,
            budget="uniform",
        ),
        Method(
            "random",
            "keeps channels at random, by the recipe's seed",
            score="leank_convert.methods.scores:random",
            budget="uniform",
        ),
        Method(
            "high-frequency-ratio",
            "keeps whole heads, those that attend least by fast RoPE pairs on one prompt",
            score="leank_convert.methods.scores:high_frequency_ratio",
            num_prompts=1,
            whole_heads=True,
        ),
        Method(
            "duo-attention",
            "keeps whole heads, by gates that it learns or takes from `heads.pattern`",
            trains=("gates",),
            whole_heads=True,
        ),
        Method(
            "duo-attention+leank",
            "chooses heads as duo-attention does, then channels of these as leank does",
            trains=("gates", "stage1", "stage2"),
        ),
    )
}


def _installed() -> Iterator[Method]:
    """Rows of installed packages; what cannot be one is left out with a warning."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            row = point.load()
        except Exception as error:  # whatever a package may raise
            row = f"{type(error).__name__}: {error}"
        if not isinstance(row, Method) or row.name in METHODS:
            reason = row if isinstance(row, str) else "it is no `Method` with a name of its own"
            _logger.warning("method `%s` of `%s` is left out: %s", point.name, point.value, reason)
            continue
        yield row


METHODS |= {row.name: row for row in _installed()}
