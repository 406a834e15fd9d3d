"""`benchmark kernel`: decode attention of every layer of a mask, beside dense decode attention of others.

Timed is attention alone: not the append of the new token, and not what a step works out once for all its
layers. Keys and values are random, rows are of one length, the last token has just been decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from leank_convert.benchmark.accuracy import AttentionTruth, attend_exactly, pruned_length
from leank_convert.benchmark.environment import (
    describe_environment,
    measure_read_bandwidth,
    memory_told,
    release_memory,
)
from leank_convert.benchmark.failures import silenced, tell_reason
from leank_convert.benchmark.layers import FilledLayer
from leank_convert.benchmark.peers import OWN_DENSE, PEERS, REMARKS
from leank_convert.benchmark.report import Report, build_document, number, ratio, share
from leank_convert.benchmark.subject import PLAIN_TORCH, Runtime, Subject, load_runtime
from leank_convert.benchmark.timing import Timing, copies_needed, outgrow_l2, time_calls
from leank_convert.errors import LeanKError

Attend = Callable[[], Tensor]


def benchmark_kernel(
    subject: Subject,
    cases: Sequence[tuple[int, int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[int] | None,
    peers: Sequence[str],
    rounds: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure and print tables.

    Args:
        subject: Mask and shape.
        cases: Batch and tokens of each case.
        device: Where.
        dtype: Of keys, values and queries.
        layers: Layers of the mask; None for all.
        peers: Names of `PEERS`, and `OWN_DENSE`.
        rounds: Measurements of each figure.
        seed: Of the random numbers.

    Returns:
        The JSON document. A case whose check failed has `ok` false and no figures.
    """
    num_layers = subject.geometry.facts.num_hidden_layers
    chosen = list(range(num_layers)) if layers is None else list(layers)
    wrong = [layer for layer in chosen if not 0 <= layer < num_layers]
    if wrong:
        raise LeanKError(f"there is no layer {wrong[0]}: `{subject.geometry.name}` has {num_layers}")
    report = Report()
    environment = describe_environment(device)
    report.header(environment, subject.describe())
    with memory_told():
        bandwidth = measure_read_bandwidth(device, rounds=rounds)
    best = max(bandwidth, key=bandwidth.__getitem__)
    report.line(
        f"read bandwidth {bandwidth[best]:,.0f} GB/s: the fastest of {len(bandwidth)} plain reads by torch "
        f"({best});"
    )
    report.line("what is above 100% of it reads faster than any of them")
    release_memory(device)
    with TemporaryDirectory() as folder, TemporaryDirectory() as dense_folder, torch.no_grad(), memory_told():
        runtime = load_runtime(subject, folder, dtype)
        dense = subject.keeping_all()
        bench = _Bench(device, dtype, rounds, bandwidth[best], seed)
        bench.own = (subject, runtime)
        bench.own_dense = (dense, load_runtime(dense, dense_folder, dtype))
        kernel = bench.check_kernel()
        report.line(f"our attention: {kernel}")
        results = []
        for batch_size, num_tokens in cases:
            results.append(bench.run_case(batch_size, num_tokens, chosen, peers))
            _print_case(report, results[-1])
            release_memory(device)
    return build_document(
        "kernel",
        environment,
        subject.describe(),
        ok=all(case["ok"] for case in results),
        dtype=str(dtype).removeprefix("torch."),
        kernel=kernel,
        read_bandwidth={"gigabytes_per_second": bandwidth[best], "ways": bandwidth},
        cases=results,
    )


class _Bench:
    """What all cases of one run share."""

    own: tuple[Subject, Runtime]
    own_dense: tuple[Subject, Runtime]

    def __init__(
        self, device: torch.device, dtype: torch.dtype, rounds: int, bandwidth: float, seed: int
    ) -> None:
        self.device, self.dtype, self.rounds, self.bandwidth = device, dtype, rounds, bandwidth
        self.generator = torch.Generator(device).manual_seed(seed)

    def check_kernel(self) -> str:
        """Find out what attends; only on the CPU may it be plain torch."""
        attention = self.own[1].name_attention(self.device, self.dtype)
        if self.device.type != "cuda":
            return f"{attention} (no kernel on the CPU)"
        if attention == PLAIN_TORCH:
            raise LeanKError(
                "the decode kernel cannot be used here, so there is nothing to measure",
                hint="it needs tilelang, a GPU that it supports, and `--dtype bfloat16` or `float16`; a "
                "warning above may say more",
                exit_code=1,
            )
        return attention

    def run_case(
        self, batch_size: int, num_tokens: int, layers: Sequence[int], peers: Sequence[str]
    ) -> dict[str, Any]:
        """Measure all peers, all layers, and all peers again; a peer's figure is its faster one."""
        facts = self.own[0].geometry.facts
        query = self._random(batch_size, facts.num_attention_heads, 1, facts.head_dim)
        keys, values = (
            self._random(batch_size, facts.num_key_value_heads, num_tokens, facts.head_dim) for _ in "kv"
        )
        dense_bytes = 2 * keys.numel() * keys.element_size()
        whole = torch.ones(facts.num_key_value_heads, facts.head_dim, dtype=torch.bool, device=self.device)
        truth = attend_exactly(query, keys, values, whole, 0, 0)
        first = {name: self._measure_peer(name, query, keys, values, truth, dense_bytes) for name in peers}
        measured = [self._measure_layer(layer, query, keys, values) for layer in layers]
        for name, before in first.items():
            if before["milliseconds"] is not None:
                again = self._measure_peer(name, query, keys, values, truth, dense_bytes)
                if (again["milliseconds"] or before["milliseconds"]) < before["milliseconds"]:
                    first[name] = again
        case = {
            "batch": batch_size,
            "tokens": num_tokens,
            "ok": all(layer["check"]["ok"] for layer in measured),
            "beyond_l2": all(entry.get("beyond_l2", True) for entry in (*first.values(), *measured)),
            "dense_bytes": dense_bytes,
            "peers": first,
            "layers": measured,
        }
        return {**case, **self._summarize(case)}

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def _figures(self, timing: Timing, num_bytes: int, copies: int) -> dict[str, Any]:
        achieved = num_bytes / timing.milliseconds / 1e6
        return {
            **asdict(timing),
            "copies": copies,
            "beyond_l2": outgrow_l2(num_bytes, copies, self.device),
            "bytes": num_bytes,
            "gigabytes_per_second": achieved,
            "bandwidth_share": achieved / self.bandwidth,
        }

    def _measure_peer(
        self, name: str, query: Tensor, keys: Tensor, values: Tensor, truth: AttentionTruth, num_bytes: int
    ) -> dict[str, Any]:
        calls: list[Attend] = []
        prepare = self._prepare_own_dense if name == OWN_DENSE else PEERS[name]
        try:
            # What the runtime says of its own kernel is for the user.
            with nullcontext() if name == OWN_DENSE else silenced():
                calls.append(prepare(query, keys, values))
                copies = copies_needed(num_bytes, self.device)
                calls += [prepare(query, keys.clone(), values.clone()) for _ in range(copies - 1)]
                check = truth.check(_attend_afresh(calls[0], query))
                if not check.ok:
                    return {"milliseconds": None, "why": "its result is wrong", "check": check.to_dict()}
                timing = time_calls(calls, self.device, rounds=self.rounds)
        # A peer may fail in any way: in its compiler, for want of memory, at a shape it does not know.
        except Exception as error:
            return {"milliseconds": None, "why": tell_reason(error), "check": None}
        finally:
            calls.clear()
            release_memory(self.device)
        return {**self._figures(timing, num_bytes, copies), "check": check.to_dict()}

    def _prepare_own_dense(self, query: Tensor, keys: Tensor, values: Tensor) -> Attend:
        subject, runtime = self.own_dense
        if self.device.type == "cuda" and runtime.name_attention(self.device, self.dtype) == PLAIN_TORCH:
            raise LeanKError("the kernel of this layout cannot be used here")
        return FilledLayer(runtime, subject, 0, query, keys, values).attend

    def _measure_layer(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Any]:
        subject, runtime = self.own
        mask = subject.channel_masks[layer].to(self.device)
        pruned = pruned_length(keys.shape[2], subject.windows)
        truth = attend_exactly(query, keys, values, mask, subject.windows.sink_size, pruned)
        filled = [FilledLayer(runtime, subject, layer, query, keys, values)]
        num_bytes = filled[0].bytes.total
        result: dict[str, Any] = {
            "layer": layer,
            "widths": list(subject.layout.widths[layer]),
            "bytes_by_region": asdict(filled[0].bytes),
            "bytes_allocated": filled[0].memory.total.allocated,
            "check": truth.check(_attend_afresh(filled[0].attend, query)).to_dict(),
        }
        if not result["check"]["ok"]:
            return {**result, "milliseconds": None}
        for _ in range(copies_needed(num_bytes, self.device) - 1):
            filled.append(FilledLayer(runtime, subject, layer, query, keys, values))
        timing = time_calls([one.attend for one in filled], self.device, rounds=self.rounds)
        # The same memory, after it was read thousands of times.
        result["check"] = truth.check(_attend_afresh(filled[0].attend, query)).to_dict()
        if not result["check"]["ok"]:
            return {**result, "milliseconds": None}
        return {**result, **self._figures(timing, num_bytes, len(filled))}

    def _summarize(self, case: dict[str, Any]) -> dict[str, Any]:
        """Means over layers, and ratios to peers; none where a layer's check failed."""
        if not case["ok"]:
            return {"mean_milliseconds": None}
        mean = fmean(layer["milliseconds"] for layer in case["layers"])
        mean_bytes = fmean(layer["bytes"] for layer in case["layers"])
        ratios = {
            name: peer["milliseconds"] / mean
            for name, peer in case["peers"].items()
            if peer["milliseconds"] is not None
        }
        best = min(ratios, key=ratios.__getitem__) if ratios else None
        achieved = mean_bytes / mean / 1e6
        return {
            "mean_milliseconds": mean,
            "mean_bytes": mean_bytes,
            "byte_ratio": case["dense_bytes"] / mean_bytes,
            "gigabytes_per_second": achieved,
            "bandwidth_share": achieved / self.bandwidth,
            "best_peer": best,
            "ratio_to_best": None if best is None else ratios[best],
            "ratios": ratios,
        }


def _attend_afresh(attend: Attend, query: Tensor) -> Tensor:
    """Attend into memory that was NaN just before, so that what is not written does not pass."""
    poison = [torch.full_like(query, float("nan")) for _ in range(4)]
    del poison  # the allocator gives such memory out again first
    return attend()


def _print_case(report: Report, case: dict[str, Any]) -> None:
    rows = [
        [name, *_columns(peer), ratio(case.get("ratios", {}).get(name))]
        for name, peer in case["peers"].items()
    ]
    num_layers = len(case["layers"])
    if case["ok"]:
        mean = {**case, "milliseconds": case["mean_milliseconds"], "bytes": case["mean_bytes"]}
        rows.append([f"leank, mean of {num_layers} layers", *_columns(mean), ratio(1.0)])
    else:
        rows.append([f"leank, {num_layers} layers", *_columns({}), ratio(None)])
    report.table(
        f"decode attention, batch {case['batch']}, {case['tokens']} tokens",
        ["", "ms", "MB read", "GB/s", "of bandwidth", "leank faster"],
        rows,
        _notes(case),
    )


def _notes(case: dict[str, Any]) -> list[str]:
    notes = []
    if case["ok"]:
        notes.append(f"ceiling by bytes: {case['byte_ratio']:.2f}x")
    else:
        wrong = [str(layer["layer"]) for layer in case["layers"] if not layer["check"]["ok"]]
        notes.append(f"layers WRONG: {', '.join(wrong)}")
    for name, peer in case["peers"].items():
        if peer["milliseconds"] is None:
            notes.append(f"{name} has no figures: {peer['why']}")
        elif name in REMARKS:
            notes.append(f"{name}: {REMARKS[name]}")
    if not case["beyond_l2"]:
        notes.append("inputs are too small to be kept out of L2: GB/s are not those of memory")
    named = [(name, peer) for name, peer in case["peers"].items() if peer["milliseconds"] is not None]
    named += [(f"layer {layer['layer']}", layer) for layer in case["layers"] if layer["check"]["ok"]]
    if named:
        usual = named[-1][1]["method"]
        notes.append(f"{usual}, medians of {named[-1][1]['rounds']} rounds; of each peer's two the faster")
        notes += [f"{name}: {entry['method']}" for name, entry in named if entry["method"] != usual]
    return notes


def _columns(figures: dict[str, Any]) -> list[str]:
    num_bytes = figures.get("bytes")
    return [
        number(figures.get("milliseconds"), 4),
        number(None if num_bytes is None else num_bytes / 1e6, 1),
        number(figures.get("gigabytes_per_second"), 0),
        share(figures.get("bandwidth_share")),
    ]
