"""`bin/benchmark kernel`: decode attention of every layer of a mask, beside dense decode attention of others.

Timed is attention alone: not the append of the new token, and not what a step works out once for all its
layers. Keys and values are random, rows are of one length, the last token has just been decoded, or several
new ones. More of these than the kernels take attend to a copy of the cache, and the copying is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bin.benchmarks import measuring
from bin.benchmarks.decode_attention import (
    CAUSAL_PEERS,
    OWN_DENSE,
    PEERS,
    Attend,
    AttentionTruth,
    FilledLayer,
    Pruning,
    attend_exactly,
    count_attention_bytes,
    pruned_length,
    read_peers,
)
from bin.benchmarks.random_models import PLAIN_TORCH, Setup, build_model, name_attention
from bin.benchmarks.tables import RATIO, REPLAYED, SHARE, Column, Report
from leank_convert.errors import LeanKError

OURS, OWN_DTYPE = "leank", "leank-own-dtype"
# What torch's own dispatch takes on a GPU is one of its backends, named here on their own.
_DEFAULT_PEERS = {"cuda": (OWN_DENSE, "sdpa-cudnn", "sdpa-flash"), "cpu": (OWN_DENSE, "sdpa")}
_States = tuple[Tensor, Tensor, Tensor]  # query, keys, values
_COLUMNS = {
    "ms": Column("milliseconds", "{:,.4f}"),
    "MB read": Column("bytes", "{:,.1f}", 1e6),
    "GB/s": Column("gigabytes_per_second", "{:,.0f}"),
    "of bandwidth": Column("bandwidth_share", SHARE),
    "leank faster": Column("faster", RATIO),
}


def benchmark_kernel(
    setup: Setup, *, cases: Sequence[tuple[int, ...]], peers: str | None, rounds: int
) -> dict[str, Any]:
    """Measure and print a table for each case of batch, tokens and perhaps how many of these are new.

    In what is returned `byte_ratio` is the ceiling by bytes, `ratio_to_best` ours against the fastest peer.
    """
    for case in cases:
        if case[2:] and case[2] >= case[1]:
            raise LeanKError(
                f"of {case[1]} tokens {case[2]} are new, which leaves none in the cache",
                hint="the second number of a case counts all tokens of a row, such as 4x32kx512",
            )
    own = (OWN_DTYPE,) if setup.kv_dtype else ()
    named = (
        read_peers(peers, (*own, OWN_DENSE, *PEERS)) if peers else (*own, *_DEFAULT_PEERS[setup.device.type])
    )
    report = Report(setup.device, setup.describe())
    with torch.no_grad():
        bandwidth = measuring.measure_read_bandwidth(setup.device, report)
        bench = _Bench(setup, rounds, bandwidth, report.environment.get("l2_bytes", 0))
        report.line(f"our attention: {bench.attention}")
        results = []
        for case in cases:
            results.append(bench.run_case(named, *case))
            _print_case(report, results[-1])
            measuring.release_memory(setup.device)
    return report.document(
        "kernel",
        ok=all(case["ok"] for case in results),
        dtype=setup.dtype_name,
        kernel=bench.attention,
        read_bandwidth=bandwidth,
        cases=results,
    )


class _Bench:
    """What all cases of one run share."""

    def __init__(self, setup: Setup, rounds: int, bandwidth: float, l2_bytes: int) -> None:
        self.setup, self.rounds, self.bandwidth, self.l2_bytes = setup, rounds, bandwidth, l2_bytes
        generator = torch.Generator(setup.device).manual_seed(0)
        self.random = partial(torch.randn, generator=generator, dtype=setup.dtype, device=setup.device)
        self.sides = {OURS: setup, OWN_DENSE: setup.keeping_all(), OWN_DTYPE: replace(setup, kv_dtype=None)}
        self.models = {name: build_model(side, torch.device("meta")) for name, side in self.sides.items()}
        self.attention = name_attention(self.models[OURS], setup)
        if setup.is_toy:
            self.attention += " (no kernel on the CPU)"
        elif self.attention == PLAIN_TORCH:
            raise LeanKError(
                "the decode kernel cannot be used here, so there is nothing to measure",
                hint="it needs tilelang, a GPU that it supports, and `--dtype bfloat16` or `float16`; a "
                "warning above may say more",
                exit_code=1,
            )

    def run_case(
        self, peers: Sequence[str], batch_size: int, num_tokens: int, num_new: int = 1
    ) -> dict[str, Any]:
        """Measure all peers, all layers, and all peers again; a peer's figure is its faster one."""
        facts = self.setup.geometry.facts
        query = self.random(batch_size, facts.num_attention_heads, num_new, facts.head_dim)
        shape = batch_size, facts.num_key_value_heads, num_tokens, facts.head_dim
        keys, values = self.random(*shape), self.random(*shape)
        states = query, keys, values
        dense_bytes = keys.nbytes + values.nbytes
        every = torch.ones(keys.shape[1], facts.head_dim, dtype=torch.bool, device=query.device)
        truth = attend_exactly(query, keys, values, Pruning(every, 0, 0))
        measured = {name: self._attempt(name, states, truth) for name in peers if name != OWN_DTYPE}
        ours = [self._measure_layer(OURS, states, layer) for layer in facts.layers]
        for name, first in measured.items():
            if first["milliseconds"] is not None:
                again = self._attempt(name, states, truth)
                measured[name] = min(first, again, key=lambda side: side["milliseconds"] or float("inf"))
        if OWN_DTYPE in peers:  # its layers may take twice the memory that ours do
            measured = {OWN_DTYPE: self._attempt(OWN_DTYPE, states, truth), **measured}
        mean = self._mean(ours)
        ratios = {
            name: peer["milliseconds"] / mean["milliseconds"]
            for name, peer in measured.items()
            if mean["ok"] and peer["milliseconds"] is not None
        }
        best = min(ratios, key=ratios.__getitem__, default=None)
        return {
            "batch": batch_size,
            "tokens": num_tokens,
            "new": num_new,
            "dense_bytes": dense_bytes,
            "peers": measured,
            "layers": ours,
            **mean,
            "byte_ratio": dense_bytes / mean["bytes"],
            "best_peer": best,
            "ratio_to_best": None if best is None else ratios[best],
            "ratios": ratios,
        }

    def _attempt(self, name: str, states: _States, truth: AttentionTruth) -> dict[str, Any]:
        """Measure a peer; one that fails has a reason in place of figures."""
        found = measuring.attempt(self._measure_peer, name, states, truth)
        measuring.release_memory(self.setup.device)
        return {"milliseconds": None, "check": None, **found}

    def _measure_peer(self, name: str, states: _States, truth: AttentionTruth) -> dict[str, Any]:
        if name in self.models:
            if not self.setup.is_toy and name_attention(self.models[name], self.setup) == PLAIN_TORCH:
                raise LeanKError("the kernel of this layout cannot be used here")
            # Of a side that keeps all channels every layer is the same.
            layers = [0] if name == OWN_DENSE else self.setup.geometry.facts.layers
            measured = [self._measure_layer(name, states, layer) for layer in layers]
            worst = max(measured, key=lambda layer: layer["check"]["error"] or float("inf"))
            return {**worst, **self._mean(measured)}
        query, keys, values = states
        if query.shape[2] > 1 and name not in CAUSAL_PEERS:
            raise ValueError("it is called for one new token alone")
        attend = PEERS[name](query, keys, values)

        def prepare() -> Attend:
            return PEERS[name](query, keys.clone(), values.clone())

        return self._measure(attend, prepare, query, truth, keys.nbytes + values.nbytes)

    def _measure_layer(self, name: str, states: _States, layer: int) -> dict[str, Any]:
        side, model, (query, keys, values) = self.sides[name], self.models[name], states
        batch_size, _, num_tokens, _ = keys.shape
        pruned = pruned_length(num_tokens, side.windows, query.shape[2])
        layout = model.build_cache().layers[layer].layout
        tokens = batch_size * num_tokens, batch_size * pruned
        regions = count_attention_bytes(layout, *tokens, side.stored_bytes)
        filled, mask = FilledLayer(model, layer, *states), side.channel_masks[layer].to(query.device)
        pruning = Pruning(mask, side.windows.sink_size, pruned, side.value_widths[layer])
        truth = attend_exactly(query, *filled.as_stored(keys, values), pruning)

        def prepare() -> Attend:
            return FilledLayer(model, layer, *states).attend

        found = self._measure(filled.attend, prepare, query, truth, sum(regions.values()))
        return {"layer": layer, "widths": list(layout.widths), "bytes_by_region": regions, **found}

    def _measure(
        self,
        attend: Attend,
        prepare: Callable[[], Attend],
        query: Tensor,
        truth: AttentionTruth,
        num_bytes: int,
    ) -> dict[str, Any]:
        """Check a call and time it, in turns with others so that the L2 cache holds nothing of them."""
        check, figures = truth.check(attend, query), {}
        if check["ok"]:
            others = measuring.copies_needed(num_bytes, self.l2_bytes) - 1
            calls = [attend, *(prepare() for _ in range(others))]
            timing = measuring.time_calls(calls, self.setup.device, rounds=self.rounds)
            figures = {**asdict(timing), **self._speed(num_bytes, timing.milliseconds)}
            figures["copies"] = len(calls)
            check = truth.check(attend, query)  # of the same memory, after it was read thousands of times
        if not check["ok"]:
            figures = {"milliseconds": None, "why": "its result is wrong"}
        return {"bytes": num_bytes, "check": check, **figures}

    def _speed(self, num_bytes: float, milliseconds: float) -> dict[str, float]:
        achieved = num_bytes / milliseconds / 1e6
        return {"gigabytes_per_second": achieved, "bandwidth_share": achieved / self.bandwidth}

    def _mean(self, layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Means over layers; no figures where a layer's check failed."""
        ok, num_bytes = all(layer["check"]["ok"] for layer in layers), fmean(each["bytes"] for each in layers)
        if not ok:
            return {"ok": ok, "milliseconds": None, "bytes": num_bytes}
        mean = fmean(each["milliseconds"] for each in layers)
        method = max((each["method"] for each in layers), key=REPLAYED.__ne__)  # any other before it
        found = {"ok": ok, "milliseconds": mean, "bytes": num_bytes, "method": method}
        return {**found, **self._speed(num_bytes, mean)}


def _print_case(report: Report, case: dict[str, Any]) -> None:
    ours = case | {"faster": 1.0 if case["ok"] else None}
    rows = [(name, peer | {"faster": case["ratios"].get(name)}) for name, peer in case["peers"].items()]
    rows.append((f"leank, mean of {len(case['layers'])} layers", ours))
    wrong = [str(layer["layer"]) for layer in case["layers"] if not layer["check"]["ok"]]
    notes = [f"layers WRONG: {', '.join(wrong)}" if wrong else f"ceiling by bytes: {case['byte_ratio']:.2f}x"]
    new = f", {case['new']} of them new" if case["new"] > 1 else ""
    title = f"decode attention, batch {case['batch']}, {case['tokens']} tokens{new}"
    report.table(title, _COLUMNS, rows, notes)
