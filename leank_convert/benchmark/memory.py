"""`benchmark memory`: bytes of the cache, peak of a prefill, the largest batch, beside the dense model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

import torch

from leank_convert.benchmark.decoding import generate
from leank_convert.benchmark.environment import describe_environment, memory_told, release_memory
from leank_convert.benchmark.largest_batch import DenseSide, LeanKSide, Side, Trial, find_largest
from leank_convert.benchmark.models import build_dense, check_model, random_prompt
from leank_convert.benchmark.report import Report, build_document, number, ratio, share
from leank_convert.benchmark.subject import COMPILED, Subject, load_runtime
from leank_convert.head_layout import count_cache_bytes

OURS, DENSE = "leank", "dense"


def benchmark_memory(
    subject: Subject,
    *,
    device: torch.device,
    dtype: torch.dtype,
    allocated: tuple[int, int] | None,
    prefill: tuple[int, int] | None,
    batches: Sequence[tuple[int, int]],
    limit: int | None,
) -> dict[str, Any]:
    """Measure and print tables.

    Args:
        subject: Mask and shape.
        device: Where.
        dtype: Of weights and cache.
        allocated: Prompt and new tokens of the row whose cache is counted; None to leave it out.
        prefill: Batch and prompt of the prefill whose peak is measured; None to leave it out.
        batches: Prompt and new tokens of each search for the largest batch.
        limit: Bytes that weights and cache may take in that search; None for what the device has.

    Returns:
        The JSON document. If decoding is not right, `ok` is false and there are no figures.
    """
    report = Report()
    environment = describe_environment(device)
    report.header(environment, subject.describe())
    results: dict[str, Any] = {}
    with TemporaryDirectory() as folder, torch.no_grad(), memory_told():
        torch.manual_seed(0)
        runtime = load_runtime(subject, folder, dtype)
        model = runtime.build_model(subject.channel_masks, device, dtype)
        lengths = [sum(case) for case in batches] + [allocated[0] if allocated else 1]
        check = check_model(model, subject, prompt_length=max(lengths))
        attention = runtime.name_attention(device, dtype)
        # Plain torch holds more during a step, so fewer rows fit.
        ours = OURS if attention == COMPILED else f"{OURS} ({attention})"
        report.line(f"our decode attention: {attention}")
        report.line(check.describe())
        if check.ok:
            dense = build_dense(model, subject.geometry)
            if allocated:
                results["allocated"] = count_allocated(model, subject, *allocated)
                _print_allocated(report, results["allocated"])
            if prefill:
                results["prefill"] = measure_prefill(model, dense, *prefill)
                _print_prefill(report, results["prefill"], ours)
            results["largest_batch"] = [
                find_batches(LeanKSide(model), DenseSide(dense), *case, limit=limit) for case in batches
            ]
            if batches:
                _print_batches(report, results["largest_batch"], ours)
    return build_document(
        "memory",
        environment,
        subject.describe(),
        ok=check.ok,
        dtype=str(dtype).removeprefix("torch."),
        kernel=attention,
        check=check.to_dict(),
        **results,
    )


def count_allocated(model: Any, subject: Subject, num_prompt: int, num_new: int) -> dict[str, Any]:
    """Count a row's cache as a `generate` call leaves it.

    The window is a constant; what the append-only store allocates is divided by the tokens that it holds.
    """
    cache = generate(model, random_prompt(model, 1, num_prompt), num_new).cache
    memory, num_tokens = cache.memory(), cache.get_seq_length()
    regions = {name: value for name, value in asdict(memory).items() if isinstance(value, dict)}
    beyond = memory.kept_keys.allocated + memory.kept_values.allocated
    dense = memory.dense_keys + memory.dense_values
    ideal = count_cache_bytes(subject.mask.widths, subject.geometry.facts.head_dim, model.dtype.itemsize)
    release_memory(model.device)
    return {
        "prompt": num_prompt,
        "new": num_new,
        "tokens": num_tokens,
        "regions": regions,
        "dense_bytes_per_token": dense / num_tokens,
        "allocated_bytes_per_token_beyond_window": beyond / num_tokens,
        "share_of_dense_beyond_window": beyond / dense,
        "ideal_share_beyond_window": 1 - ideal.saved,
        "share_of_dense_with_window": memory.total.allocated / dense,
    }


def measure_prefill(model: Any, dense: Any, batch_size: int, num_prompt: int) -> dict[str, Any]:
    """Peak of what is allocated during a prefill, beyond what was allocated before it; null on the CPU."""
    device = model.device
    result: dict[str, Any] = {"batch": batch_size, "prompt": num_prompt}
    prompt = random_prompt(model, batch_size, num_prompt)
    for name, subject in ((OURS, model), (DENSE, dense)):
        release_memory(device)
        peak = None
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        output = subject(prompt, use_cache=True, logits_to_keep=1)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) - before
        del output
        result[name] = {"peak_bytes": peak}
    ours, theirs = result[OURS]["peak_bytes"], result[DENSE]["peak_bytes"]
    release_memory(device)
    return {**result, "share_of_dense": ours / theirs if ours and theirs else None}


def find_batches(
    ours: Side, dense: Side, num_prompt: int, num_new: int, *, limit: int | None
) -> dict[str, Any]:
    """The largest batch of both sides for one prompt length and number of new tokens."""
    result: dict[str, Any] = {"prompt": num_prompt, "new": num_new}
    for name, side in ((OURS, ours), (DENSE, dense)):
        trial = Trial(side, num_prompt, num_new, limit)
        predicted = trial.predict()
        found, tried = find_largest(trial.fits, predicted)
        result[name] = {
            "batch": found,
            "predicted_by_bytes": predicted,
            "row_bytes": trial.row_bytes,
            "tried": {str(count): tried[count] for count in sorted(tried)},
        }
        del trial
        release_memory(side.model.device)
    found, theirs = result[OURS]["batch"], result[DENSE]["batch"]
    return {**result, "ratio": found / theirs if theirs else None}


def _print_allocated(report: Report, found: dict[str, Any]) -> None:
    tokens = found["tokens"]
    rows = [
        [name, number(region["used"] / tokens, 1), number(region["allocated"] / tokens, 1)]
        for name, region in found["regions"].items()
        if region["allocated"]
    ]
    rows.append(
        ["dense", number(found["dense_bytes_per_token"], 1), number(found["dense_bytes_per_token"], 1)]
    )
    report.table(
        f"cache of one row, prompt {found['prompt']}, {found['new']} new tokens",
        ["", "bytes used per token", "bytes allocated per token"],
        rows,
    )
    report.line(
        f"allocated beyond the window: {found['share_of_dense_beyond_window']:.4f} of dense "
        f"(by widths {found['ideal_share_beyond_window']:.4f}); with the window "
        f"{found['share_of_dense_with_window']:.4f}"
    )


def _print_prefill(report: Report, found: dict[str, Any], ours: str) -> None:
    def gigabytes(name: str) -> str:
        peak = found[name]["peak_bytes"]
        return number(None if peak is None else peak / 1e9, 2)

    report.table(
        f"prefill of {found['batch']} x {found['prompt']} tokens: peak beyond the weights, cache included",
        ["", "GB", "of dense"],
        [[ours, gigabytes(OURS), share(found["share_of_dense"])], [DENSE, gigabytes(DENSE), share(1.0)]],
    )


def _print_batches(report: Report, found: Sequence[dict[str, Any]], ours: str) -> None:
    rows = []
    for case in found:
        for name in (OURS, DENSE):
            side = case[name]
            rows.append(
                [
                    f"{ours if name == OURS else name}, {case['prompt']} + {case['new']}",
                    str(side["batch"]),
                    str(side["predicted_by_bytes"]),
                    number(side["row_bytes"] / 1e6, 1),
                    ratio(case["ratio"] if name == OURS else 1.0),
                ]
            )
    report.table(
        "largest batch, rows prefilled one at a time, decoded together to the end",
        ["", "rows", "by bytes", "MB a row", "of dense"],
        rows,
        ["rows: tried, one more does not fit; by bytes: free memory over one row's bytes, not tried"],
    )
