"""`benchmark onnx`: a decode step of the exported graph on onnxruntime, beside the exporter's dense graph.

Timed is a step of one row: the graph, and the new token's keys and values put into the cache; not the flush,
which comes once in `flush_size` steps. Attention alone is the step of a model of next to no other weights.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from leank_convert.benchmark.environment import describe_environment, measure_host_read_bandwidth
from leank_convert.benchmark.onnx_cache import BoundStep, FilledCache
from leank_convert.benchmark.onnx_check import ExactLogits, LogitsCheck
from leank_convert.benchmark.onnx_graphs import (
    MODELS,
    SIDES,
    build_stock,
    choose_layers,
    count_whole_mask,
    export_side,
    take_layers,
    weight_bytes,
    widths_of,
)
from leank_convert.benchmark.report import Report, build_document, number, ratio, share
from leank_convert.benchmark.subject import Subject
from leank_convert.benchmark.timing import summarize

_PACKAGES = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript")
_WARM_UP = 2
_COLUMNS = [
    *("tokens", "dense ms", "leank ms", "leank faster", "in CPU time", "by bytes"),
    *("dense GB/s", "leank GB/s", "±"),
]
_TITLES = {"attention": "attention of all measured layers", "step": "whole step"}


def benchmark_onnx(
    subject: Subject,
    lengths: Sequence[int],
    *,
    layers: Sequence[int] | None,
    weights: str | None,
    threads: int,
    rounds: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure and print tables.

    Args:
        subject: Mask and shape.
        lengths: Cached tokens of each case.
        layers: Layers of the mask; None for some that stand for all.
        weights: How both sides' weights are quantized, `int8` or `int4`; None for float32.
        threads: Of onnxruntime.
        rounds: Measurements of each figure.
        seed: Of the random numbers.

    Returns:
        The JSON document. A case whose check failed has `ok` false and no figures.
    """
    from leank_convert.onnx.libraries import DEFAULT_OPSET, check_available

    check_available()
    chosen = choose_layers(subject, layers)
    measured = take_layers(subject, chosen)
    environment = {**describe_environment(torch.device("cpu")), "device": _processor(), "threads": threads}
    environment["versions"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
    environment["load_before"] = os.getloadavg()[0]
    report = Report()
    report.header(environment, subject.describe(), for_cpu=True)
    report.line(
        f"layers {', '.join(map(str, chosen))} of the mask; {threads} threads, opset {DEFAULT_OPSET}, "
        f"{weights or 'float32'} weights, float32 cache"
    )
    cases = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        models, steps = {}, {}
        for name in MODELS:
            models[name] = build_stock(measured.geometry, name, seed)
            for side in SIDES:
                path = export_side(models[name], measured, side, folder / f"{name}-{side}", weights)
                steps[name, side] = BoundStep(path, threads)
            read = weight_bytes(models[name], weights)
            report.line(f"{_TITLES[name]}: {read / 1e6:,.1f} MB of weights are read")
        for num_tokens in lengths:
            cases.append(_run_case(measured, models, steps, num_tokens, rounds, seed, weights))
    largest = max(case["cache_bytes"]["dense"] for case in cases)
    bandwidth = measure_host_read_bandwidth(largest, threads, rounds=rounds)
    environment["load_after"] = os.getloadavg()[0]
    whole = count_whole_mask(subject, lengths)
    for name in MODELS:
        _print_times(report, name, cases, rounds)
    _print_bytes(report, cases, whole)
    best = max(bandwidth, key=bandwidth.__getitem__)
    report.line(f"read bandwidth {bandwidth[best]:,.1f} GB/s, of as many bytes as the largest dense cache:")
    report.line(f"the fastest of {len(bandwidth)} plain reads by torch with {threads} threads ({best})")
    report.line(
        f"load of the machine {environment['load_before']:.2f} before, {environment['load_after']:.2f} after "
        f"these runs, whose own {threads} threads are in the latter"
    )
    return build_document(
        "onnx",
        environment,
        subject.describe(),
        ok=all(case["ok"] for case in cases),
        dtype="float32",
        weights=weights or "float32",
        opset=DEFAULT_OPSET,
        layers=chosen,
        widths=widths_of(measured),
        weight_bytes={name: weight_bytes(model, weights) for name, model in models.items()},
        read_bandwidth={"gigabytes_per_second": bandwidth[best], "ways": bandwidth},
        cases=cases,
        whole_mask=whole,
    )


def _run_case(
    subject: Subject,
    models: Mapping[str, Any],
    steps: Mapping[tuple[str, str], BoundStep],
    num_tokens: int,
    rounds: int,
    seed: int,
    weights: str | None,
) -> dict[str, Any]:
    """Check both models' graphs over one cache, then time them, a dense step and a pruned one in turns."""
    cache = FilledCache(subject, num_tokens, seed + 1)
    buffers = {"dense": cache.dense_buffers(), "leank": cache.leank_buffers()}
    cache_bytes = {side: sum(one.nbytes for one in held.values()) for side, held in buffers.items()}
    pruned = {"dense": 0, "leank": cache.num_pruned}
    case: dict[str, Any] = {
        "tokens": num_tokens,
        "pruned": cache.num_pruned,
        "cache_bytes": cache_bytes,
        "cache_share": cache_bytes["leank"] / cache_bytes["dense"],
    }
    for name, model in models.items():
        sides = {side: steps[name, side] for side in SIDES}
        exact = ExactLogits(model, cache, weights)
        checks: dict[str, LogitsCheck] = {}
        for side, step in sides.items():
            step.bind(buffers[side], past=num_tokens, pruned=pruned[side], slot=cache.slot(side))
            checks[side] = exact.check(side, step.logits())
        case[name] = {"checks": {side: check.to_dict() for side, check in checks.items()}}
        if all(check.ok for check in checks.values()):
            read = {side: held + weight_bytes(model, weights) for side, held in cache_bytes.items()}
            case[name] |= _time_sides({side: step.run for side, step in sides.items()}, read, rounds)
        for step in sides.values():
            step.release()
    case["ok"] = all(check["ok"] for name in models for check in case[name]["checks"].values())
    return case


def _time_sides(
    runs: Mapping[str, Callable[[], None]], read: Mapping[str, int], rounds: int
) -> dict[str, Any]:
    """Time both sides in turns; which one begins changes every round."""
    for run in runs.values():
        for _ in range(_WARM_UP):
            run()
    samples: dict[str, list[float]] = {side: [] for side in runs}
    cpu_samples: dict[str, list[float]] = {side: [] for side in runs}
    for index in range(rounds):
        for side in SIDES if index % 2 else reversed(SIDES):
            began, cpu_began = time.perf_counter(), time.process_time()
            runs[side]()
            samples[side].append((time.perf_counter() - began) * 1e3)
            cpu_samples[side].append((time.process_time() - cpu_began) * 1e3)
    figures: dict[str, Any] = {}
    for side, taken in samples.items():
        timing = summarize(taken, 1, "wall clock, in turns")
        figures[side] = {
            **asdict(timing),
            "fastest_milliseconds": min(taken),
            "cpu_milliseconds": statistics.median(cpu_samples[side]),
            "bytes": read[side],
            "gigabytes_per_second": read[side] / timing.milliseconds / 1e6,
        }
    dense, leank = figures["dense"], figures["leank"]
    return {
        **figures,
        "ratio": dense["milliseconds"] / leank["milliseconds"],
        "fastest_ratio": dense["fastest_milliseconds"] / leank["fastest_milliseconds"],
        "cpu_ratio": dense["cpu_milliseconds"] / leank["cpu_milliseconds"],
        "byte_ratio": read["dense"] / read["leank"],
    }


def _processor() -> str:
    """The processor's name as the kernel tells it, else the machine's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _print_times(report: Report, name: str, cases: Sequence[Mapping[str, Any]], rounds: int) -> None:
    rows, notes = [], []
    for case in cases:
        figures = case[name]
        sides = [figures.get(side, {}) for side in SIDES]
        rows.append(
            [
                f"{case['tokens']:,}",
                *(number(side.get("milliseconds"), 1) for side in sides),
                ratio(figures.get("ratio")),
                ratio(figures.get("cpu_ratio")),
                ratio(figures.get("byte_ratio")),
                *(number(side.get("gigabytes_per_second"), 1) for side in sides),
                share(max((side["spread"] for side in sides if side), default=None)),
            ]
        )
        for side, check in figures["checks"].items():
            if not check["ok"]:
                notes.append(
                    f"{case['tokens']:,} tokens: the {side} graph's logits are WRONG: {check['error']}"
                )
    checks = [check for case in cases for check in case[name]["checks"].values()]
    if all(check["ok"] for check in checks):
        effects = [case[name]["checks"]["leank"]["pruning_effect"] for case in cases]
        notes.append(
            f"logits: error at most {max(check['error'] for check in checks):.1e}, torch's own "
            f"{max(check['torch_error'] for check in checks):.1e}, effect of pruning {max(effects):.1e}"
        )
    notes.append(f"medians of {rounds} rounds in turns; ±: half the quartiles' distance, the larger one")
    report.table(
        f"{_TITLES[name]}, one row",
        _COLUMNS,
        rows,
        notes,
    )


def _print_bytes(report: Report, cases: Sequence[Mapping[str, Any]], whole: Mapping[str, Any]) -> None:
    report.table(
        "bytes of the cache, window slots included",
        ["tokens", "dense MB", "leank MB", "leank's share", "of the whole mask"],
        [
            [
                f"{case['tokens']:,}",
                *(number(case["cache_bytes"][side] / 1e6, 1) for side in SIDES),
                share(case["cache_share"]),
                share(whole["cache_share"][str(case["tokens"])]),
            ]
            for case in cases
        ],
        [
            f"whole mask: {share(whole['limit'])} of dense bytes in the long run; "
            f"{whole['next_percent']:.0%}, window included, from {whole['reached_from_tokens']:,} tokens on"
        ],
    )
