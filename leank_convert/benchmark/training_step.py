"""One optimizer step on a sample of random tokens, whichever way its loss is computed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.benchmark.geometries import Geometry
from leank_convert.benchmark.models import random_ids, stock_config
from leank_convert.benchmark.training_sizes import QuestionSize
from leank_convert.data import Question, TrainingSample
from leank_convert.train.attention import ATTENTION_NAME
from leank_convert.train.fusion import fuse_layers
from leank_convert.train.objective import l1_penalty
from leank_convert.train.ranks import Ranks
from leank_convert.train.step import Student
from leank_convert.windows import Windows

# Loss of a sample, with the graph to the student's factors.
Distil = Callable[[TrainingSample, Student], Tensor]

_LEARNING_RATE = 0.02
_L1_WEIGHT = 0.06
# Standard deviation of q and k; 0.02, transformers' default, gives as much to a hidden size of 4096. With far
# less, attention is uniform and hardly tells one channel from another.
_STATE_SPREAD = 1.28


def build_trainee(geometry: Geometry, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of random weights with training's attention, frozen, made on the device."""
    from transformers import AutoModelForCausalLM

    spread = _STATE_SPREAD / math.sqrt(geometry.config["hidden_size"])
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            stock_config(geometry, initializer_range=spread), dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    model.eval().requires_grad_(False)
    if device.type == "cuda":
        fuse_layers(model)
    return model


def draw_sample(model: Any, length: int, num_questions: int, size: QuestionSize, seed: int) -> TrainingSample:
    """Random tokens as training gets them: one question is part of what is stored, several follow it.

    Args:
        model: Its vocabulary is drawn from.
        length: Tokens of context, one question and its answer: the positions that are used.
        num_questions: One or more.
        size: Of each.
        seed: Another seed, other tokens.
    """
    count = length + (num_questions - 1) * size.total
    ids = random_ids(model, 1, count, seed)[0]
    start = length - size.answer if num_questions == 1 else length - size.total
    asked = ids[start:].chunk(num_questions)
    return TrainingSample(
        task="random tokens",
        prefix_ids=ids[:start],
        questions=tuple(Question(tokens, len(tokens) - size.answer) for tokens in asked),
    )


def stratified_lengths(shortest: int, longest: int, count: int, seed: int = 0) -> list[int]:
    """Lengths uniform over a range, one from each of `count` equal parts of it, shuffled.

    Few of them stand for the whole range, of which as many independent ones may miss either end.
    """
    rng = random.Random(seed)
    width = (longest + 1 - shortest) / count
    lengths = [int(shortest + (part + rng.random()) * width) for part in range(count)]
    rng.shuffle(lengths)
    return lengths


def draw_factors(facts: ModelFacts, device: torch.device, seed: int = 0) -> Tensor:
    """Scaling factors uniform over [0, 1], as in the middle of training: float32 [L, H_kv, D]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (facts.num_hidden_layers, facts.num_key_value_heads, facts.head_dim)
    return torch.rand(shape, generator=generator).to(device)


class OptimizerStep:
    """What training does with a sample: loss, penalty, gradient, Adam, clamp.

    Attributes:
        factors: The scaling factors [L, H_kv, D].
        gradient: The last loss's, on this rank, without the penalty's [L, H_kv, D].
    """

    def __init__(
        self,
        distil: Distil,
        facts: ModelFacts,
        windows: Windows,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.factors = draw_factors(facts, device).requires_grad_()
        self.gradient = torch.zeros_like(self.factors)
        self._distil = distil
        self._windows = windows
        self._ranks = ranks
        self._optimizer = torch.optim.Adam([self.factors], lr=_LEARNING_RATE)

    def run(self, sample: TrainingSample) -> None:
        """Do one step; with ranks, each on a sample of its own."""
        self._optimizer.zero_grad()
        self._distil(sample, Student(self._windows, self.factors)).backward()  # type: ignore[no-untyped-call]
        assert self.factors.grad is not None
        self.gradient.copy_(self.factors.grad)
        if self._ranks is not None:
            self._ranks.add_up(self.factors.grad)
            self.factors.grad /= self._ranks.num_ranks
        (_L1_WEIGHT * l1_penalty(self.factors)).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        with torch.no_grad():
            self.factors.clamp_(0.0, 1.0)
