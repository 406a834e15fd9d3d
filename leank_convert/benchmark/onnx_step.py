"""`benchmark onnx`: a decode step of the exported graph on onnxruntime, beside the exporter's dense graph.

Timed is a step of one row: the graph, and the new token's keys and values put into the cache; not the flush,
which comes once in `flush_size` steps. Attention alone is the step of a model of next to no other weights.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from leank_convert.benchmark.measuring import measure_host_read_bandwidth, summarize
from leank_convert.benchmark.models import Subject
from leank_convert.benchmark.onnx_graphs import (
    MODELS,
    SIDES,
    BoundStep,
    FilledCache,
    build_stock,
    choose_layers,
    exact_logits,
    export_side,
    take_layers,
    weight_bytes,
)
from leank_convert.benchmark.tables import Report, build_document, describe_environment, number, ratio, share

_PACKAGES = ("torch", "transformers", "onnx", "onnxruntime", "onnxscript")
_WARM_UP = 2
_TITLES = {"attention": "attention of all measured layers", "step": "whole step"}


def benchmark_onnx(
    subject: Subject,
    lengths: Sequence[int],
    *,
    layers: list[int] | None,
    weights: str | None,
    threads: int,
    rounds: int,
) -> dict[str, Any]:
    """Measure and print tables.

    Args:
        subject: Mask and shape.
        lengths: Cached tokens of each case.
        layers: Layers of the mask; None for some that stand for all.
        weights: How both sides' weights are quantized, `int8` or `int4`; None for float32.
        threads: Of onnxruntime.
        rounds: Measurements of each figure.

    Returns:
        The JSON document. A case whose check failed has `ok` false and no figures.

    Raises:
        LeanKError: If a library is missing, or there is no such layer.
    """
    from leank_convert.onnx.leank_onnx import Graph
    from leank_convert.onnx.libraries import DEFAULT_OPSET, check_available

    check_available()
    chosen = choose_layers(subject, layers)
    measured = take_layers(subject, chosen)
    environment = {**describe_environment(torch.device("cpu"), _PACKAGES), "threads": threads}
    environment["load_before"] = os.getloadavg()[0]
    report = Report(environment, subject.describe(), for_cpu=True)
    report.line(
        f"layers {', '.join(map(str, chosen))} of the mask; {threads} threads, opset {DEFAULT_OPSET}, "
        f"{weights or 'float32'} weights, float32 cache"
    )
    models = {name: build_stock(measured.geometry, name) for name in MODELS}
    read = {name: weight_bytes(model, weights) for name, model in models.items()}
    # Both sides take turns: none may wait busily while the other one runs.
    settings = {"session.force_spinning_stop": "1"}
    with TemporaryDirectory() as temporary:
        graphs = {}
        for name, model in models.items():
            report.line(f"{_TITLES[name]}: {read[name] / 1e6:,.1f} MB of weights are read")
            for side in SIDES:
                path = export_side(model, measured, side, Path(temporary, f"{name}-{side}"), weights)
                graphs[name, side] = Graph(path, threads, settings)
        cases = [_run_case(measured, models, graphs, tokens, rounds, weights) for tokens in lengths]
    for name in MODELS:
        _print_times(report, name, cases, rounds)
    _print_bytes(report, cases)
    largest = max(case["cache_bytes"]["dense"] for case in cases)
    report.line(f"read by torch with {threads} threads, as many bytes as the largest dense cache:")
    bandwidth = report.bandwidth(measure_host_read_bandwidth(largest, threads, rounds=rounds))
    environment["load_after"] = os.getloadavg()[0]
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
        widths=[list(row) for row in measured.layout.widths],
        weight_bytes=read,
        read_bandwidth=bandwidth,
        cases=cases,
    )


def _run_case(
    subject: Subject,
    models: Mapping[str, Any],
    graphs: Mapping[tuple[str, str], Any],
    num_tokens: int,
    rounds: int,
    weights: str | None,
) -> dict[str, Any]:
    """Check both models' graphs over one cache, then time them, a dense step and a pruned one in turns."""
    cache = FilledCache(subject, num_tokens)
    buffers = {side: cache.buffers(side) for side in SIDES}
    held = {side: sum(buffer.nbytes for buffer in buffers[side].values()) for side in SIDES}
    case: dict[str, Any] = {
        "tokens": num_tokens,
        "pruned": cache.num_pruned,
        "cache_bytes": held,
        "cache_share": held["leank"] / held["dense"],
        "ok": True,
    }
    for name, model in models.items():
        check = exact_logits(model, cache, weights)
        steps = {side: BoundStep(graphs[name, side], cache, buffers[side], side) for side in SIDES}
        checks = {side: check(side, step.logits()) for side, step in steps.items()}
        case[name] = {"checks": checks}
        if all(found["ok"] for found in checks.values()):
            read = {side: held[side] + weight_bytes(model, weights) for side in SIDES}
            case[name] |= _time_sides(steps, read, rounds)
        else:
            case["ok"] = False
    return case


def _time_sides(steps: Mapping[str, BoundStep], read: Mapping[str, int], rounds: int) -> dict[str, Any]:
    """Time both sides in turns; which one begins changes every round."""
    for step in steps.values():
        for _ in range(_WARM_UP):
            step.run()
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu_samples: dict[str, list[float]] = {side: [] for side in SIDES}
    for index in range(rounds):
        for side in SIDES if index % 2 else reversed(SIDES):
            began, cpu_began = time.perf_counter(), time.process_time()
            steps[side].run()
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


def _print_times(report: Report, name: str, cases: Sequence[Mapping[str, Any]], rounds: int) -> None:
    rows, notes = [], []
    for case in cases:
        figures = case[name]
        sides = [figures.get(side, {}) for side in SIDES]
        rows.append(
            [
                f"{case['tokens']:,}",
                *(number(side.get("milliseconds"), 1) for side in sides),
                *(ratio(figures.get(key)) for key in ("ratio", "cpu_ratio", "byte_ratio")),
                *(number(side.get("gigabytes_per_second"), 1) for side in sides),
                share(max((side["spread"] for side in sides if side), default=None)),
            ]
        )
        notes += [
            f"{case['tokens']:,} tokens: the {side} graph's logits are WRONG: {check['error']}"
            for side, check in figures["checks"].items()
            if not check["ok"]
        ]
    checks = [check for case in cases for check in case[name]["checks"].values()]
    if not notes:
        error, own, effect = (
            max(check[key] for check in checks) for key in ("error", "torch_error", "pruning_effect")
        )
        notes = [f"logits: error at most {error:.1e}, torch's own {own:.1e}, effect of pruning {effect:.1e}"]
    notes.append(f"medians of {rounds} rounds in turns; ±: half the quartiles' distance, the larger one")
    columns = ["tokens", "dense ms", "leank ms", "leank faster", "in CPU time", "by bytes"]
    report.table(f"{_TITLES[name]}, one row", [*columns, "dense GB/s", "leank GB/s", "±"], rows, notes)


def _print_bytes(report: Report, cases: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        [
            f"{case['tokens']:,}",
            *(number(case["cache_bytes"][side], 1, unit=1e6) for side in SIDES),
            share(case["cache_share"]),
        ]
        for case in cases
    ]
    columns = ["tokens", "dense MB", "leank MB", "leank's share"]
    report.table("bytes of the cache, window slots included", columns, rows)
