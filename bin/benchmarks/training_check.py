"""Models and samples of `bin/benchmark train`, and its check: loss and gradient beside full sequences.

In higher precision the stock model runs prompt and answer at once, with an attention function that scales the
answer's rows. That is what one writes with transformers alone; it shares no code with `leank_convert.train`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import repeat_kv

from bin.benchmarks.decode_attention import EXACT, judge, relative_error
from bin.benchmarks.geometries import Geometry
from bin.benchmarks.random_models import Setup, build_dense, random_prompt, stock_config
from leank_convert.architectures import ModelFacts
from leank_convert.data import Question, TrainingSample
from leank_convert.train.attention import ATTENTION_NAME, Student
from leank_convert.train.fusion import fuse_layers
from leank_convert.train.graphs import Gradients

# Higher precision needs twice the weights, and attention that forms its scores; and every further layer's
# rounding blurs what is compared.
_CHECKED_LAYERS, CHECKED_TOKENS, _CHECKED_QUESTIONS = 4, 2048, 3
_FULL_SEQUENCE = "leank_full_sequence"
# Standard deviation of q and k; 0.02, transformers' default, gives as much to a hidden size of 4096. With far
# less, attention is uniform and hardly tells one channel from another.
_STATE_SPREAD = 1.28


def build_trainee(geometry: Geometry, setup: Setup) -> Any:
    """A model of random weights with training's attention, frozen, made on the device."""
    spread = _STATE_SPREAD / math.sqrt(geometry.config["hidden_size"])
    with torch.device(setup.device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            stock_config(geometry, initializer_range=spread),
            dtype=setup.dtype,
            attn_implementation=ATTENTION_NAME,
        )
    model.eval().requires_grad_(False)
    if setup.device.type == "cuda":
        fuse_layers(model)
    return model


def draw_sample(
    model: Any, length: int, num_questions: int, question_size: tuple[int, int], seed: int = 0
) -> TrainingSample:
    """Random tokens as training gets them: one question is part of what is stored, several follow it.

    `length` counts context, one question and its answer: the positions that are used.
    """
    total, answer = sum(question_size), question_size[1]
    ids = random_prompt(model, 1, length + (num_questions - 1) * total, seed)[0].cpu()
    start = length - answer if num_questions == 1 else length - total
    questions = (Question(asked, len(asked) - answer) for asked in ids[start:].chunk(num_questions))
    return TrainingSample(task="random tokens", prefix_ids=ids[:start], questions=tuple(questions))


def draw_factors(facts: ModelFacts, device: torch.device) -> Tensor:
    """Scaling factors uniform over [0, 1], as in the middle of training: float32 [L, H_kv, D]."""
    shape = facts.mask_shape
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device)


def check_step(
    setup: Setup, length: int, num_questions: int, question_size: tuple[int, int]
) -> dict[str, Any]:
    """Compare loss and gradient with full sequences' on a shallow model of the shape.

    Checked are stage 1 with one question, which is what is timed, and some questions on one context with a
    head that is empty, as stage 2 may have it.
    """
    num_layers = min(setup.geometry.facts.num_hidden_layers, _CHECKED_LAYERS)
    config = {**setup.geometry.config, "num_hidden_layers": num_layers}
    shallow = replace(setup.geometry, config=config)
    model = build_trainee(shallow, setup)
    dense = build_dense(model, shallow, _FULL_SEQUENCE)
    exact = copy.deepcopy(dense).to(EXACT[setup.dtype])
    factors = draw_factors(shallow.facts, setup.device)
    emptied = factors.clone()
    emptied[0, 0] = 0.0
    students = Student(setup.windows, factors), Student(setup.windows, emptied, emptied.any(-1))
    cases = []
    for stage, student in enumerate(students, start=1):
        count = 1 if stage == 1 else min(num_questions, _CHECKED_QUESTIONS)
        sample = draw_sample(model, length, count, question_size, seed=stage)
        ours = _differentiate_as_training(model, setup, sample, student)
        theirs, truth = (
            _differentiate(partial(distil_full_sequences, one), sample, student) for one in (dense, exact)
        )
        errors, own = (
            [relative_error(*pair) for pair in zip(found, truth, strict=True)] for found in (ours, theirs)
        )
        # One number, the loss, may be right by luck: it is held to the larger of the errors.
        loss, gradient = judge(errors[0], max(own)), judge(errors[1], own[1])
        ok = loss["ok"] and gradient["ok"]
        cases.append({"stage": stage, "questions": count, "loss": loss, "gradient": gradient, "ok": ok})
    ok = all(case["ok"] for case in cases)
    return {"layers": num_layers, "tokens": length, "cases": cases, "ok": ok}


def _differentiate(
    loss_of: Callable[[TrainingSample, Student], Tensor], sample: TrainingSample, student: Student
) -> tuple[Tensor, Tensor]:
    """Loss, and gradient of the scaling factors [L, H_kv, D]."""
    factors = student.scaling_factors.clone().requires_grad_()
    loss = loss_of(sample, replace(student, scaling_factors=factors))
    loss.backward()  # type: ignore[no-untyped-call]
    assert factors.grad is not None
    return loss.detach(), factors.grad


def _differentiate_as_training(
    model: Any, setup: Setup, sample: TrainingSample, student: Student
) -> tuple[Tensor, Tensor]:
    """The same as training computes it once it has captured what it captures."""
    factors = student.scaling_factors.clone().requires_grad_()
    gradients = Gradients(model, setup.geometry.facts, sample.num_positions)
    for _ in range(3 if gradients.captures else 1):
        factors.grad = None
        loss = gradients.add(sample, replace(student, scaling_factors=factors), 1.0)
    assert factors.grad is not None
    return loss, factors.grad


def distil_full_sequences(model: Any, sample: TrainingSample, student: Student) -> Tensor:
    """Loss of a sample by a stock model with `_FULL_SEQUENCE` attention, question by question."""
    losses = []
    for index in range(len(sample.questions)):
        prompt, answer = sample.prompt_ids(index), sample.answer_ids(index)
        input_ids, start = torch.cat([prompt, answer])[None].to(model.device), len(prompt)
        with torch.no_grad():
            target = model.base_model(input_ids, use_cache=False).last_hidden_state
        hidden = model.base_model(input_ids, use_cache=False, student=student, start=start).last_hidden_state
        precise = torch.promote_types(hidden.dtype, torch.float32)
        losses.append((target.to(precise) - hidden.to(precise))[:, start:].square().mean())
    return torch.stack(losses).mean()


def _full_sequence_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    student: Student | None = None,
    start: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention `[B, S, H, D]` of queries `[B, H, S, D]`; a student's, from `start` on, are scaled."""
    groups = query.shape[1] // key.shape[1]
    keys, values = repeat_kv(key, groups).mT, repeat_kv(value, groups)
    j = torch.arange(query.shape[2], device=query.device)
    p = j[:, None]
    logits = query @ keys * scaling
    if student is not None:
        factors = student.scaling_factors[module.layer_idx].repeat_interleave(groups, dim=0)[:, None]
        middle = (query * factors).to(query.dtype) @ keys * scaling
        if student.sees_middle is not None:
            hidden = ~student.sees_middle[module.layer_idx].repeat_interleave(groups)
            middle = middle.masked_fill(hidden[:, None, None], float("-inf"))
        windows = student.windows
        whole = (p < start) | (j < windows.sink_size) | (j >= p - windows.recent_size)
        logits = torch.where(whole, logits, middle)
    precise = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.masked_fill(j > p, float("-inf")).softmax(-1, dtype=precise).to(query.dtype)
    return (weights @ values).transpose(1, 2), None


AttentionInterface.register(_FULL_SEQUENCE, _full_sequence_attention)
