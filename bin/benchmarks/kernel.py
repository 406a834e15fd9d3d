"""`bin/benchmark kernel`: decode attention of every layer of a mask, beside dense decode attention of others.

Timed is attention alone: not the append of the new token, and not what a step works out once for all its
layers. Keys and values are random, rows are of one length, the last token has just been decoded, or several
new ones. More of these than the kernels take attend to a copy of the cache, and the copying is timed.
Our FP8 caches have one more peer, the same layers in the dtype of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from bin.benchmarks.decode_attention import (
    CAUSAL_PEERS,
    OWN_DENSE,
    PEERS,
    Attend,
    AttentionTruth,
    FilledLayer,
    attend_exactly,
    count_attention_bytes,
    default_peers,
    pruned_length,
    read_peers,
)
from bin.benchmarks.measuring import (
    attempt,
    copies_needed,
    measure_read_bandwidth,
    outgrow_l2,
    release_memory,
    time_calls,
)
from bin.benchmarks.random_models import PLAIN_TORCH, TOO_LARGE, Setup, build_model, name_attention
from bin.benchmarks.tables import Report, number, ratio, share
from leank_convert.errors import LeanKError, out_of_memory

OWN_DTYPE = "leank-own-dtype"
_States = tuple[Tensor, Tensor, Tensor]  # query, keys, values


def benchmark_kernel(
    setup: Setup,
    *,
    cases: Sequence[tuple[int, ...]],
    peers: str | None,
    rounds: int,
) -> dict[str, Any]:
    """Measure and print a table for each case of batch, tokens and perhaps how many of these are new.

    In the JSON document that is returned a case whose check failed has
    `ok` false and no figures. `byte_ratio` is the ceiling that bytes set, `ratio_to_best` ours against the
    fastest peer.

    Raises:
        LeanKError: If there is no such peer or kernel, all tokens are new, or something of ours does
            not fit in memory.
    """
    for case in cases:
        if case[2:] and case[2] >= case[1]:
            raise LeanKError(
                f"of {case[1]} tokens {case[2]} are new, which leaves none in the cache",
                hint="the second number of a case counts all tokens of a row, such as 4x32kx512",
            )
    pruned = (OWN_DTYPE,) if setup.kv_dtype else ()
    known = (*pruned, OWN_DENSE, *PEERS)
    named = read_peers(peers, known) if peers else (*pruned, *default_peers(setup.device))
    report = Report(setup.device, setup.describe())
    with torch.no_grad(), out_of_memory(*TOO_LARGE):
        bandwidth = measure_read_bandwidth(setup.device, report, rounds=rounds)
        bench = _Bench(setup, rounds, bandwidth, report.environment.get("l2_bytes", 0))
        report.line(f"our attention: {bench.attention}")
        results = []
        for case in cases:
            results.append(bench.run_case(named, *case))
            _print_case(report, results[-1])
            release_memory(setup.device)
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
        self.generator = torch.Generator(setup.device).manual_seed(0)
        sides = {OWN_DENSE: setup.keeping_all(), "leank": setup}
        sides |= {OWN_DTYPE: setup.in_own_dtype()} if setup.kv_dtype else {}
        self.models = {name: build_model(side, torch.device("meta")) for name, side in sides.items()}
        self.attention = name_attention(self.models["leank"], setup)
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
        layers = range(facts.num_hidden_layers)
        query = self._random(batch_size, facts.num_attention_heads, num_new, facts.head_dim)
        keys, values = (
            self._random(batch_size, facts.num_key_value_heads, num_tokens, facts.head_dim) for _ in "kv"
        )
        states = query, keys, values
        whole = torch.ones(facts.num_key_value_heads, facts.head_dim, dtype=torch.bool, device=query.device)
        exact = attend_exactly(*states, whole, 0, 0)
        truths = dict.fromkeys(peers, exact)
        if OWN_DENSE in peers and self.setup.kv_dtype:
            stored = FilledLayer(self.models[OWN_DENSE], 0, *states).as_stored(keys, values)
            truths[OWN_DENSE] = attend_exactly(query, *stored, whole, 0, 0)
            del stored
        others = [name for name in peers if name != OWN_DTYPE]
        measured = {name: self._attempt(name, self._measure_peer, states, truths[name]) for name in others}
        ours = [self._measure_layer("leank", layer, states) for layer in layers]
        for name, first in measured.items():
            if first["milliseconds"] is not None:
                again = self._attempt(name, self._measure_peer, states, truths[name])
                measured[name] = min(first, again, key=lambda side: side["milliseconds"] or float("inf"))
        if OWN_DTYPE in peers:
            of_layers = self._attempt(OWN_DTYPE, self._measure_layers, layers, states)
            measured = {OWN_DTYPE: of_layers, **measured}
        mean, dense_bytes = self._mean(ours), keys.nbytes + values.nbytes
        times = {name: peer["milliseconds"] for name, peer in measured.items()}
        ratios = {
            name: time / mean["milliseconds"]
            for name, time in times.items()
            if mean["ok"] and time is not None
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

    def _random(self, *shape: int) -> Tensor:
        setup = self.setup
        return torch.randn(shape, generator=self.generator, dtype=setup.dtype, device=setup.device)

    def _attempt(self, name: str, measure: Any, *arguments: Any) -> dict[str, Any]:
        """Measure a peer; one that fails has a reason in place of figures."""
        found: dict[str, Any] = {"milliseconds": None, "check": None}
        if name in self.models and not self.setup.is_toy and self._lacks_kernel(name):
            found["why"] = "the kernel of this layout cannot be used here"
        else:
            found |= attempt(measure, name, *arguments)
        release_memory(self.setup.device)
        return found

    def _lacks_kernel(self, name: str) -> bool:
        return name_attention(self.models[name], self.setup) == PLAIN_TORCH

    def _time(self, calls: Sequence[Attend], num_bytes: int) -> dict[str, Any]:
        timing = time_calls(calls, self.setup.device, rounds=self.rounds)
        beyond = {"copies": len(calls), "beyond_l2": outgrow_l2(num_bytes, len(calls), self.l2_bytes)}
        return {**asdict(timing), **beyond, **self._speed(num_bytes, timing.milliseconds)}

    def _speed(self, num_bytes: float, milliseconds: float) -> dict[str, float]:
        achieved = num_bytes / milliseconds / 1e6
        return {"gigabytes_per_second": achieved, "bandwidth_share": achieved / self.bandwidth}

    def _measure_peer(self, name: str, states: _States, truth: AttentionTruth) -> dict[str, Any]:
        query, keys, values = states
        if query.shape[2] > 1 and name not in CAUSAL_PEERS:
            raise ValueError("it is called for one new token alone")
        size = self.setup.stored_bytes if name == OWN_DENSE else keys.element_size()
        num_bytes = (keys.numel() + values.numel()) * size

        def prepare(keys: Tensor, values: Tensor) -> Attend:
            if name == OWN_DENSE:
                return FilledLayer(self.models[name], 0, query, keys, values).attend
            return PEERS[name](query, keys, values)

        calls = [prepare(keys, values)]
        for _ in range(copies_needed(num_bytes, self.l2_bytes) - 1):
            calls.append(prepare(keys.clone(), values.clone()))
        check = truth.check(calls[0], query)
        if not check["ok"]:
            return {"milliseconds": None, "why": "its result is wrong", "check": check}
        return {"bytes": num_bytes, **self._time(calls, num_bytes), "check": check}

    def _measure_layers(self, name: str, layers: Sequence[int], states: _States) -> dict[str, Any]:
        """Means over layers as a peer has them; they may take twice the memory that ours do."""
        measured = [self._measure_layer(name, layer, states) for layer in layers]
        found = self._mean(measured)
        check = max((layer["check"] for layer in measured), key=lambda check: check["error"] or float("inf"))
        why = {} if found["ok"] else {"why": "its result is wrong"}
        return {**found, **why, "method": measured[-1].get("method"), "check": check}

    def _measure_layer(self, name: str, layer: int, states: _States) -> dict[str, Any]:
        setup = self.setup.in_own_dtype() if name == OWN_DTYPE else self.setup
        query, keys, values = states
        windows, (batch_size, _, num_tokens, head_dim) = setup.windows, keys.shape
        widths, pruned = setup.layout.widths[layer], pruned_length(num_tokens, windows, query.shape[2])
        mask, model = setup.channel_masks[layer].to(setup.device), self.models[name]
        chunk_size = model.build_cache().layers[layer].layout.chunk_size
        tokens = batch_size * num_tokens, batch_size * pruned
        regions = count_attention_bytes(widths, head_dim, chunk_size, *tokens, setup.stored_bytes)
        num_bytes = sum(regions.values())
        filled = FilledLayer(model, layer, *states)
        stored = filled.as_stored(keys, values)
        truth = attend_exactly(query, *stored, mask, windows.sink_size, pruned)
        del stored
        calls = [filled.attend]
        facts = {"layer": layer, "widths": list(widths), "bytes": num_bytes, "bytes_by_region": regions}
        check, figures = truth.check(calls[0], query), {"milliseconds": None}
        if check["ok"]:
            for _ in range(copies_needed(num_bytes, self.l2_bytes) - 1):
                calls.append(FilledLayer(model, layer, *states).attend)
            timed = self._time(calls, num_bytes)
            # The same memory, after it was read thousands of times.
            check = truth.check(calls[0], query)
            figures = timed if check["ok"] else figures
        return {**facts, "check": check, **figures}

    def _mean(self, layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Means over layers; no figures where a layer's check failed."""
        ok, num_bytes = all(layer["check"]["ok"] for layer in layers), fmean(each["bytes"] for each in layers)
        found = {"ok": ok, "milliseconds": None, "bytes": num_bytes}
        if not ok:
            return found
        mean = fmean(layer["milliseconds"] for layer in layers)
        beyond = all(layer["beyond_l2"] for layer in layers)
        return {**found, "milliseconds": mean, "beyond_l2": beyond, **self._speed(num_bytes, mean)}


def _print_case(report: Report, case: dict[str, Any]) -> None:
    sides = {**case["peers"], f"leank, mean of {len(case['layers'])} layers": case}
    ratios = {**case["ratios"], list(sides)[-1]: 1.0 if case["ok"] else None}
    rows = [
        [
            name,
            number(side["milliseconds"], 4),
            number(side.get("bytes"), 1, unit=1e6),
            number(side.get("gigabytes_per_second"), 0),
            share(side.get("bandwidth_share")),
            ratio(ratios.get(name)),
        ]
        for name, side in sides.items()
    ]
    wrong = [str(layer["layer"]) for layer in case["layers"] if not layer["check"]["ok"]]
    told = f"layers WRONG: {', '.join(wrong)}" if wrong else f"ceiling by bytes: {case['byte_ratio']:.2f}x"
    failed = [f"{name} has no figures: {side['why']}" for name, side in sides.items() if "why" in side]
    timed = case["peers"] | {f"layer {layer['layer']}": layer for layer in case["layers"]}
    methods = {name: entry["method"] for name, entry in timed.items() if entry["milliseconds"] is not None}
    notes = [told, *failed]
    if methods:
        usual = list(methods.values())[-1]
        notes.append(f"{usual}, medians; of each peer's two the faster")
        notes += [f"{name}: {method}" for name, method in methods.items() if method != usual]
    if not all(side.get("beyond_l2", True) for side in sides.values()):
        notes.append("inputs are too small to be kept out of L2: GB/s are not those of memory")
    new = f", {case['new']} of them new" if case["new"] > 1 else ""
    title = f"decode attention, batch {case['batch']}, {case['tokens']} tokens{new}"
    report.table(title, ["", "ms", "MB read", "GB/s", "of bandwidth", "leank faster"], rows, notes)
