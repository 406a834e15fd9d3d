"""Loss and gradient of our training step, held to the full-sequence step in higher precision."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from leank_convert.benchmark.accuracy import Check, exact_dtype, relative_error
from leank_convert.benchmark.geometries import Geometry
from leank_convert.benchmark.training_peer import FullSequence
from leank_convert.benchmark.training_sizes import QuestionSize
from leank_convert.benchmark.training_step import Distil, build_trainee, draw_factors, draw_sample
from leank_convert.data import TrainingSample
from leank_convert.train.step import Student, distil
from leank_convert.windows import Windows

# Higher precision needs twice the weights, and attention that forms its scores; and every further layer's
# rounding blurs what is compared.
_MAX_LAYERS = 4
_MAX_TOKENS = 4096
_MAX_QUESTIONS = 3
_KEPT_SHARE = 0.3


@dataclass(frozen=True)
class StepCheck:
    """How far a step's results are from the exact ones.

    Attributes:
        num_questions: On one context.
        stage: 1 with factors, 2 with a mask that leaves a head empty.
        loss: Of the loss. One number may be right by luck, so it is held to the larger of the peer's errors.
        gradient: Of the gradient of all factors.
        window_effect: How far the exact gradient is from the exact one with a recent window half as long. An
            error far below it shows that each token was seen as it should be.
    """

    num_questions: int
    stage: int
    loss: Check
    gradient: Check
    window_effect: float

    @property
    def ok(self) -> bool:
        """Whether both are as close as the peer's."""
        return self.loss.ok and self.gradient.ok

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "questions": self.num_questions,
            "stage": self.stage,
            "loss": self.loss.to_dict(),
            "gradient": self.gradient.to_dict(),
            "window_effect": self.window_effect,
            "ok": self.ok,
        }


@dataclass(frozen=True)
class StepChecks:
    """All cases that were checked.

    Attributes:
        num_layers: Of the shape's layers, how many.
        num_tokens: Context, one question and its answer.
        cases: One or more.
    """

    num_layers: int
    num_tokens: int
    cases: tuple[StepCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every case is right."""
        return all(case.ok for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "layers": self.num_layers,
            "tokens": self.num_tokens,
            "cases": [case.to_dict() for case in self.cases],
        }


def check_step(
    geometry: Geometry,
    windows: Windows,
    size: QuestionSize,
    *,
    length: int,
    num_questions: int,
    device: torch.device,
    dtype: torch.dtype,
) -> StepChecks:
    """Compare loss and gradient on a shallow model of a shape.

    Args:
        geometry: The shape.
        windows: Sink and recent window.
        size: Tokens of each question.
        length: Tokens of the longest sequence, if it is not too long to be checked.
        num_questions: Questions on one context, if they are not too many.
        device: Where.
        dtype: Of the weights.
    """
    num_layers = min(geometry.facts.num_hidden_layers, _MAX_LAYERS)
    shallow = replace(geometry, config={**geometry.config, "num_hidden_layers": num_layers})
    model = build_trainee(shallow, device, dtype)
    exact_model = copy.deepcopy(model).to(exact_dtype(dtype))
    peer, exact = FullSequence(model, shallow), FullSequence(exact_model, shallow)
    tokens = min(length, _MAX_TOKENS)
    factors = draw_factors(shallow.facts, device)
    mask = factors > 1 - _KEPT_SHARE
    mask[0, 0] = False
    first = Student(windows, factors)
    second = Student(windows, mask.to(factors), mask.any(-1))
    cases = []
    for count, stage, student in (
        (1, 1, first),
        (min(num_questions, _MAX_QUESTIONS), 1, first),
        (min(num_questions, _MAX_QUESTIONS), 2, second),
    ):
        sample = draw_sample(model, tokens, count, size, seed=stage)
        ours = _differentiate(partial(distil, model), sample, student)
        theirs = _differentiate(peer.distil, sample, student)
        truth = _differentiate(exact.distil, sample, student)
        halved = Windows(windows.sink_size, windows.recent_size // 2)
        other = _differentiate(exact.distil, sample, replace(student, windows=halved))
        cases.append(
            StepCheck(
                num_questions=count,
                stage=stage,
                loss=Check(
                    relative_error(ours[0], truth[0]),
                    max(relative_error(theirs[part], truth[part]) for part in (0, 1)),
                ),
                gradient=Check(relative_error(ours[1], truth[1]), relative_error(theirs[1], truth[1])),
                window_effect=relative_error(other[1], truth[1]),
            )
        )
    return StepChecks(num_layers, tokens, tuple(cases))


def _differentiate(distil: Distil, sample: TrainingSample, student: Student) -> tuple[Tensor, Tensor]:
    """Loss, and gradient of the scaling factors [L, H_kv, D]."""
    factors = student.scaling_factors.clone().requires_grad_()
    loss = distil(sample, replace(student, scaling_factors=factors))
    loss.backward()  # type: ignore[no-untyped-call]
    assert factors.grad is not None
    return loss.detach(), factors.grad
