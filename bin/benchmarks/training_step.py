"""`bin/benchmark train`: a training step beside its own prefill, in seconds and in memory.

Before anything is timed, loss and gradient are compared with full sequences in higher precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from bin.benchmarks.measuring import peak_memory, release_memory, time_whole
from bin.benchmarks.random_models import TOO_LARGE, Setup
from bin.benchmarks.tables import Column, Report, number, ratio
from bin.benchmarks.training_check import (
    CHECKED_TOKENS,
    build_trainee,
    check_step,
    draw_factors,
    draw_sample,
)
from leank_convert.data import TrainingSample
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.train.attention import Student
from leank_convert.train.graphs import Gradients
from leank_convert.train.passes import run_context_pass
from leank_convert.train.scaling import l1_penalty

_LEARNING_RATE, _L1_WEIGHT = 0.02, 0.06
_COLUMNS: dict[str, Column] = {
    "seconds": ("seconds", partial(number, digits=3)),
    "of our\nprefill": ("ratio_to_own_prefill", ratio),
    "peak\nGB": ("peak_bytes", partial(number, unit=1e9)),
    "of weights\n+ K/V": ("ratio", ratio),
}


def benchmark_train(
    setup: Setup, *, length: int, questions: int, question_size: tuple[int, int], rounds: int
) -> dict[str, Any]:
    """Measure steps of one and of several questions on one context, and print a table.

    `length` counts context, one question and its answer, `question_size` the tokens of both. If our step's
    loss or gradient is not right, the JSON document that is returned has `ok` false and no figures.

    Raises:
        LeanKError: If the length leaves nothing to prune, or something does not fit on the device.
    """
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
    with out_of_memory(*TOO_LARGE):
        torch.manual_seed(0)
        check = check_step(setup, min(length, CHECKED_TOKENS), questions, question_size)
        release_memory(setup.device)
        for case in check["cases"]:
            error, own = (case["gradient"][key] or math.nan for key in ("error", "torch_error"))
            report.line(
                f"stage {case['stage']}, {case['questions']} on a context: error of gradient {error:.1e}, of "
                f"full sequences {own:.1e}: {'as close' if case['ok'] else 'WRONG, nothing is measured'}"
            )
        if check["ok"]:
            model = build_trainee(setup.geometry, setup)
            samples = [draw_sample(model, length, count, question_size) for count in sorted({1, questions})]
            results["step"] = measure_step(model, samples, setup, rounds)
            _print_step(report, results["step"])
    sizes = {"question_tokens": question_size[0], "answer_tokens": question_size[1]}
    return report.document("train", ok=check["ok"], dtype=setup.dtype_name, **sizes, check=check, **results)


def optimizer_step(model: Any, sample: TrainingSample, setup: Setup) -> Callable[[], None]:
    """What training does with a sample, again and again: loss, penalty, gradient, Adam, clamp."""
    facts = setup.geometry.facts
    factors = draw_factors(facts, model.device).requires_grad_()
    optimizer = torch.optim.Adam([factors], lr=_LEARNING_RATE)
    gradients = Gradients(model, facts, sample.num_positions)

    def run() -> None:
        optimizer.zero_grad()
        gradients.add(sample, Student(setup.windows, factors), 1.0)
        (_L1_WEIGHT * l1_penalty(factors)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            factors.clamp_(0.0, 1.0)

    if gradients.captures:
        run()  # the next one captures
    return run


def measure_step(model: Any, samples: Sequence[TrainingSample], setup: Setup, rounds: int) -> dict[str, Any]:
    """Seconds of the prefill alone; seconds and peak memory of a step on each sample."""
    device, facts, length = setup.device, setup.geometry.facts, samples[0].num_tokens

    def seconds(call: Callable[[], object]) -> dict[str, Any]:
        timing = time_whole(call, device, rounds=rounds)
        return {"seconds": timing.milliseconds / 1e3, **asdict(timing)}

    # What several questions share, the shortest context of all: no step is flattered by its prefill.
    prefix = min((sample.prefix_ids for sample in samples), key=len)
    prefill = seconds(lambda: run_context_pass(model, prefix))
    weights = sum(weight.nbytes for weight in model.parameters())
    cache = 2 * facts.num_hidden_layers * facts.num_key_value_heads * facts.head_dim * length
    cache *= model.dtype.itemsize
    steps = []
    for sample in samples:
        release_memory(device)
        with peak_memory(device) as peak:
            step = seconds(optimizer_step(model, sample, setup))
        step |= {"questions": len(sample.questions), "peak_bytes": peak.bytes}
        step["ratio_to_own_prefill"] = step["seconds"] / prefill["seconds"]
        step["ratio"] = peak.bytes and peak.bytes / (weights + cache)
        steps.append(step)
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
