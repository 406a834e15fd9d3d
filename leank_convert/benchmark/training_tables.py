"""Tables of `benchmark train`, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leank_convert.benchmark.report import Report, number, ratio
from leank_convert.benchmark.training_check import StepChecks
from leank_convert.train.plan import describe_seconds

_GB = 1e9


def print_check(report: Report, checks: StepChecks) -> None:
    """Errors of our step beside those of full sequences."""
    rows = [
        [
            f"stage {case.stage}, {_count(case.num_questions)}",
            f"{case.gradient.error:.1e}",
            f"{case.gradient.torch_error:.1e}",
            f"{case.loss.error:.1e}",
            f"{case.window_effect:.1e}",
            "ok" if case.ok else "WRONG",
        ]
        for case in checks.cases
    ]
    report.table(
        f"our step against full sequences in higher precision, {checks.num_tokens:,} tokens, "
        f"{checks.num_layers} layers",
        ["", "error of\ngradient", "of full\nsequences", "error\nof loss", "half a\nwindow", "check"],
        rows,
        [
            "of full sequences: their gradient's own error; ours may have twice that, and the loss too",
            "half a window: how far the exact gradient moves if the recent window is half as long",
            *([] if checks.ok else ["WRONG: nothing is measured"]),
        ],
    )


def print_step(report: Report, found: dict[str, Any]) -> None:
    """Prefills, and the steps against them."""
    own, best = found["prefill"], found["best_stock_prefill"]
    rows = [["our prefill", number(own["seconds"], 3), "", ""]]
    notes = []
    for name, prefill in found["stock_prefills"].items():
        rows.append([f"stock prefill, {name}", number(prefill.get("seconds"), 3), "", ""])
        if "why" in prefill:
            notes.append(f"stock prefill, {name}, has no figure: {prefill['why']}")
    for step in found["steps"]:
        rows.append(
            [
                f"step, {_count(step['questions'])}",
                number(step["seconds"], 3),
                ratio(step["ratio_to_own_prefill"]),
                ratio(step["ratio_to_stock_prefill"]),
            ]
        )
    report.table(
        f"one step on {found['length']:,} tokens",
        ["", "seconds", "of our\nprefill", "of the best\nstock prefill"],
        rows,
        [
            *notes,
            f"prefills: of the {found['context']:,} tokens that questions share, without logits, each alone"
            + (f"; best stock: {best}" if best else ""),
            f"medians of {own['rounds']} rounds after a warm-up; a step includes Adam and the clamp",
        ],
    )


def print_peer(report: Report, found: Sequence[dict[str, Any]]) -> None:
    """Full sequences against ours, length by length."""
    rows, notes = [], []
    for case in found:
        best = case["full_sequence"].get(case.get("backend"), {})
        rows.append(
            [
                f"{case['length']:,} tokens",
                number(case["ours"]["seconds"], 3),
                number(best.get("seconds"), 3),
                ratio(case["ratio"]),
                number(best.get("gradient_distance"), 3),
            ]
        )
        for name, tried in case["full_sequence"].items():
            if "why" in tried:
                notes.append(f"{case['length']:,} tokens, {name}: no figure, {tried['why']}")
            elif name != case["backend"]:
                notes.append(f"{case['length']:,} tokens, {name}: {number(tried['seconds'], 3)} seconds")
    report.table(
        "a step with one question against teacher, student and backward over the full sequence",
        ["", "ours\nseconds", "full sequence\nseconds", "ours\nfaster", "gradients\napart"],
        rows,
        [
            *notes,
            "full sequence: stock transformers, SDPA, gradient checkpointing; the longest here that fits",
            "gradients apart: ‖ours - theirs‖ / ‖theirs‖ of the first step, both in low precision",
        ],
    )


def print_memory(report: Report, found: dict[str, Any]) -> None:
    """Peaks against what has to be held."""
    needed = found["weight_bytes"] + found["cache_bytes"]
    rows = [["weights + K/V of the context", number(needed / _GB), "", ratio(1.0)]]
    for step in found["steps"]:
        peak, reserved = step["peak_bytes"], step["reserved_bytes"]
        rows.append(
            [
                f"step, {_count(step['questions'])}",
                number(None if peak is None else peak / _GB),
                number(None if reserved is None else reserved / _GB),
                ratio(step["ratio"]),
            ]
        )
    rows.append(["limit", number(found["limit_ratio"] * needed / _GB), "", ratio(found["limit_ratio"])])
    report.table(
        f"peak memory of a step on {found['length']:,} tokens",
        ["", "GB allocated", "GB reserved", "of weights\n+ K/V"],
        rows,
        [] if found["steps"][0]["peak_bytes"] else ["on the CPU nothing counts what is allocated"],
    )


def print_schedule(report: Report, found: Sequence[dict[str, Any]]) -> None:
    """What the whole schedule takes."""
    rows = [
        [
            _count(case["questions"]),
            str(len(case["seconds"])),
            number(case["mean_seconds"], 3),
            f"{min(case['seconds']):.3f} to {max(case['seconds']):.3f}",
            number(case["tokens_per_second"], 0),
            f"{case['schedule_steps']:,}",
            describe_seconds(case["schedule_seconds"]),
        ]
        for case in found
    ]
    shortest, longest = found[0]["range"]
    report.table(
        f"the paper's schedule, {shortest:,} to {longest:,} tokens, extrapolated from measured steps",
        [
            "",
            "steps\nmeasured",
            "mean\nseconds",
            "least to\nmost",
            "tokens/s",
            "steps\nin all",
            "takes",
        ],
        rows,
        [
            "lengths: uniform over the range, one from each of as many equal parts as steps are measured",
            "several questions per context: as many answers in as many fewer steps",
            "left out: start, compilation, saved states, and samples, drawn beside the steps in training",
        ],
    )


def print_scale(report: Report, found: dict[str, Any]) -> None:
    """All processes against one."""
    alone = found["samples_per_second_alone"]
    report.table(
        f"samples of {found['tokens']:,} tokens, each process its own",
        ["", "samples a\nsecond", "of one"],
        [
            ["one process, others idle", number(alone, 3), ratio(1.0)],
            [f"{found['ranks']} processes", number(found["samples_per_second"], 3), ratio(found["ratio"])],
        ],
        [f"medians of {found['rounds']} steps after one; gradients added up over all processes"],
    )


def _count(num_questions: int) -> str:
    return "one question" if num_questions == 1 else f"{num_questions} questions"
