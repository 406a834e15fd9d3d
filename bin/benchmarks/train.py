"""`bin/benchmark train`: a training step beside its own prefill, in seconds and in memory.

Before anything is timed, loss and gradient are compared with the same passes in higher precision, neither
fused nor captured as graphs; that these equal full sequences is what the tests of training show.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from bin.benchmarks.decode_attention import EXACT, judge, relative_error
from bin.benchmarks.measuring import peak_bytes, release_memory, synchronize, time_replays
from bin.benchmarks.random_models import Setup, build_stock, random_prompt
from bin.benchmarks.tables import RATIO, Column, Report
from leank_convert.architectures import ModelFacts
from leank_convert.data import Question, TrainingSample
from leank_convert.errors import LeanKError
from leank_convert.train.attention import ATTENTION_NAME
from leank_convert.train.fusion import fuse_layers
from leank_convert.train.graphs import Gradients
from leank_convert.train.passes import run_context_pass
from leank_convert.train.scaling import l1_penalty
from leank_convert.train.split_attention import Student

# How many are asked of one context, and the tokens of a question and its answer.
_QUESTIONS, _TOY_QUESTIONS = (8, (24, 40)), (2, (3, 5))
_ROUNDS = 3
_LEARNING_RATE, _L1_WEIGHT = 0.02, 0.06
# Higher precision needs twice the weights; and every further layer's rounding blurs what is compared.
_CHECKED_LAYERS, _CHECKED_TOKENS, _CHECKED_QUESTIONS = 4, 2048, 3
# Standard deviation of q and k; 0.02, transformers' default, gives as much to a hidden size of 4096. With far
# less, attention is uniform and hardly tells one channel from another.
_STATE_SPREAD = 1.28
_COLUMNS = {
    "seconds": Column("seconds", "{:,.3f}"),
    "of our prefill": Column("ratio_to_own_prefill", RATIO),
    "peak GB": Column("peak_bytes", unit=1e9),
    "of weights + K/V": Column("ratio", RATIO),
}


def benchmark_train(setup: Setup, *, length: int) -> dict[str, Any]:
    """Measure steps of one and of several questions on a context, which has `length` tokens with one."""
    questions, question_size = _TOY_QUESTIONS if setup.is_toy else _QUESTIONS
    windows, total = setup.windows, sum(question_size)
    least = windows.sink_size + windows.recent_size + total + 1
    if length < least:
        raise LeanKError(
            f"`--length` {length} leaves nothing to prune between sink {windows.sink_size} and recent window "
            f"{windows.recent_size} of a sample with a question of {total} tokens",
            hint=f"ask for {least} or more",
        )
    report = Report(setup.device, setup.describe(masked=False))
    results: dict[str, Any] = {}
    torch.manual_seed(0)
    check = check_step(setup, min(length, _CHECKED_TOKENS), questions, question_size)
    release_memory(setup.device)
    for case in check["cases"]:
        error, own = (case["gradient"][key] or math.nan for key in ("error", "torch_error"))
        report.line(
            f"{case['questions']} on a context: error of gradient {error:.1e}, of plain passes {own:.1e}: "
            f"{'as close' if case['ok'] else 'WRONG, nothing is measured'}"
        )
    if check["ok"]:
        model = fused(build_trainee(setup))
        samples = [draw_sample(model, length, count, question_size) for count in sorted({1, questions})]
        results["step"] = measure_step(model, samples, setup)
        _print_step(report, results["step"])
    sizes = {"question_tokens": question_size[0], "answer_tokens": question_size[1]}
    return report.document("train", ok=check["ok"], dtype=setup.dtype_name, **sizes, check=check, **results)


def build_trainee(setup: Setup) -> Any:
    """A model of random weights with training's attention, frozen, made on the device."""
    spread = _STATE_SPREAD / math.sqrt(setup.geometry.config["hidden_size"])
    return build_stock(setup.geometry, setup.device, setup.dtype, ATTENTION_NAME, initializer_range=spread)


def fused(model: Any) -> Any:
    """The model with the layers that training gives it on a GPU."""
    if model.device.type == "cuda":
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
    return torch.rand(facts.mask_shape, generator=torch.Generator().manual_seed(0)).to(device)


def check_step(
    setup: Setup, length: int, num_questions: int, question_size: tuple[int, int]
) -> dict[str, Any]:
    """Compare loss and gradient with those in higher precision, on a shallow model of the shape.

    Checked are one question and some on one context, and with these a head that is empty, as one may become.
    """
    num_layers = min(setup.geometry.facts.num_hidden_layers, _CHECKED_LAYERS)
    shallow = setup.take_layers(range(num_layers))
    plain, facts = build_trainee(shallow), shallow.geometry.facts
    ours, exact = fused(copy.deepcopy(plain)), copy.deepcopy(plain).to(EXACT[setup.dtype])
    factors = draw_factors(facts, setup.device)
    cases = []
    for count in sorted({1, min(num_questions, _CHECKED_QUESTIONS)}):
        if count > 1:
            factors[0, 0] = 0.0
        student = Student(setup.windows, factors, factors.any(-1))
        sample = draw_sample(ours, length, count, question_size, seed=count)
        found = differentiate(ours, facts, sample, student)
        own, truth = (
            differentiate(model, facts, sample, student, captures=False) for model in (plain, exact)
        )
        errors, theirs = (
            [relative_error(*pair) for pair in zip(each, truth, strict=True)] for each in (found, own)
        )
        # One number, the loss, may be right by luck: it is held to the larger of the errors.
        loss, gradient = judge(errors[0], max(theirs)), judge(errors[1], theirs[1])
        ok = loss["ok"] and gradient["ok"]
        cases.append({"questions": count, "loss": loss, "gradient": gradient, "ok": ok})
    return {"layers": num_layers, "tokens": length, "cases": cases, "ok": all(case["ok"] for case in cases)}


def differentiate(
    model: Any, facts: ModelFacts, sample: TrainingSample, student: Student, *, captures: bool = True
) -> tuple[Tensor, Tensor]:
    """Loss, and gradient of the scaling factors [L, H_kv, D], once what may be captured is."""
    factors = student.scaling_factors.clone().requires_grad_()
    gradients = Gradients(model, facts, sample.num_positions, offload=not captures)
    for _ in range(3 if gradients.captures else 1):
        factors.grad = None
        loss = gradients.add(sample, replace(student, scaling_factors=factors), 1.0)
    assert factors.grad is not None
    return loss, factors.grad


def optimizer_step(model: Any, sample: TrainingSample, setup: Setup) -> Callable[[], None]:
    """What training does with a sample, again and again: loss, penalty, gradient, Adam, clamp."""
    factors = draw_factors(setup.geometry.facts, model.device).requires_grad_()
    optimizer = torch.optim.Adam([factors], lr=_LEARNING_RATE)
    gradients = Gradients(model, setup.geometry.facts, sample.num_positions)
    student = Student(setup.windows, factors, factors.any(-1))  # all heads go on seeing the middle

    def run() -> None:
        optimizer.zero_grad()
        gradients.add(sample, student, 1.0)
        (_L1_WEIGHT * l1_penalty(factors)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            factors.clamp_(0.0, 1.0)

    if gradients.captures:
        run()  # the next one captures
    return run


def measure_step(model: Any, samples: Sequence[TrainingSample], setup: Setup) -> dict[str, Any]:
    """Seconds of the prefill alone; seconds and peak memory of a step on each sample."""
    device, facts, length = setup.device, setup.geometry.facts, samples[0].num_tokens

    def seconds(call: Callable[[], object]) -> dict[str, Any]:
        def whole() -> None:
            call()
            synchronize(device)  # launches of a round do not hide behind the one before

        timing = time_replays(None, whole, device, rounds=_ROUNDS)
        return {"seconds": timing.milliseconds / 1e3, **asdict(timing)}

    # What several questions share, the shortest context of all: no step is flattered by its prefill.
    prefix = min((sample.prefix_ids for sample in samples), key=len)
    prefill = seconds(lambda: run_context_pass(model, prefix))
    weights = sum(weight.nbytes for weight in model.parameters())
    cache = 2 * facts.num_hidden_layers * facts.num_key_value_heads * facts.head_dim * length
    cache *= model.dtype.itemsize

    def measure(sample: TrainingSample) -> dict[str, Any]:
        found: dict[str, Any] = {"questions": len(sample.questions)}
        release_memory(device)
        peak, _ = peak_bytes(device, lambda: found.update(seconds(optimizer_step(model, sample, setup))))
        found["ratio_to_own_prefill"] = found["seconds"] / prefill["seconds"]
        return {**found, "peak_bytes": peak, "ratio": peak and peak / (weights + cache)}

    steps = [measure(sample) for sample in samples]
    sizes = {"length": length, "context": len(prefix), "weight_bytes": weights, "cache_bytes": cache}
    return {**sizes, "prefill": prefill, "steps": steps}


def _print_step(report: Report, found: dict[str, Any]) -> None:
    rows = [("our prefill", found["prefill"])]
    rows += [(f"step, {step['questions']} on a context", step) for step in found["steps"]]
    notes = [
        f"prefill: of the {found['context']:,} tokens that questions share, without logits, alone",
        f"medians of {found['prefill']['rounds']} rounds after one; a step includes Adam and the clamp",
        f"weights and K/V of the context: {(found['weight_bytes'] + found['cache_bytes']) / 1e9:.2f} GB",
    ]
    title = f"one step on {found['length']:,} tokens, by questions on a context"
    report.table(title, _COLUMNS, rows, notes)
