"""`benchmark kernel`: decode attention of every layer of a mask, beside dense decode attention of others.

Timed is attention alone: not the append of the new token, and not what a step works out once for all its
layers. Keys and values are random, rows are of one length, the last token has just been decoded, or several
new ones. More of these than the kernels take attend to a copy of the cache, and the copying is timed.
Our FP8 caches have one more peer, the same layers in the dtype of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
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
    copies_needed,
    describe_failure,
    measure_read_bandwidth,
    outgrow_l2,
    release_memory,
    silenced,
    time_calls,
)
from bin.benchmarks.random_models import PLAIN_TORCH, TOO_LARGE, Setup, build_model, name_attention
from bin.benchmarks.tables import Report, number, ratio, share
from leank_convert.errors import LeanKError, out_of_memory

OWN_DTYPE = "leank-own-dtype"


def benchmark_kernel(
    setup: Setup,
    *,
    cases: Sequence[tuple[int, ...]],
    layers: list[int] | None,
    peers: str | None,
    rounds: int,
) -> dict[str, Any]:
    """Measure and print a table for each case of batch, tokens and perhaps how many of these are new.

    `layers` are None for all of the mask. In the JSON document that is returned a case whose check failed has
    `ok` false and no figures. `byte_ratio` is the ceiling that bytes set, `ratio_to_best` ours against the
    fastest peer.

    Raises:
        LeanKError: If there is no such layer, peer or kernel, all tokens are new, or something of ours does
            not fit in memory.
    """
    for case in cases:
        if case[2:] and case[2] >= case[1]:
            raise LeanKError(
                f"of {case[1]} tokens {case[2]} are new, which leaves none in the cache",
                hint="the second number of a case counts all tokens of a row, such as 4x32kx512",
            )
    chosen = setup.choose_layers(layers)
    pruned = (OWN_DTYPE,) if setup.kv_dtype else ()
    defaults = (*pruned, *default_peers(setup.device))
    named = read_peers(peers, (*pruned, OWN_DENSE, *PEERS)) if peers else defaults
    report = Report(setup.device, setup.describe())
    with torch.no_grad(), out_of_memory(*TOO_LARGE):
        bandwidth = measure_read_bandwidth(setup.device, rounds=rounds)
        report.line(bandwidth.describe())
        release_memory(setup.device)
        bench = _Bench(setup, rounds, bandwidth.gigabytes_per_second, report.environment.get("l2_bytes", 0))
        report.line(f"our attention: {bench.attention}")
        results = []
        for case in cases:
            results.append(bench.run_case(chosen, named, *case))
            _print_case(report, results[-1])
            release_memory(setup.device)
    return report.document(
        "kernel",
        ok=all(case["ok"] for case in results),
        dtype=setup.dtype_name,
        kernel=bench.attention,
        read_bandwidth=asdict(bandwidth),
        cases=results,
    )


class _Bench:
    """What all cases of one run share."""

    def __init__(self, setup: Setup, rounds: int, bandwidth: float, l2_bytes: int) -> None:
        self.setup, self.rounds, self.bandwidth, self.l2_bytes = setup, rounds, bandwidth, l2_bytes
        self.generator = torch.Generator(setup.device).manual_seed(0)
        self.whole_model = build_model(setup.keeping_all(), torch.device("meta"))
        # By what their caches hold: one, or with an FP8 cache two.
        sides = {one.kv_dtype: one for one in (setup.in_own_dtype(), setup)}
        self.models = {dtype: build_model(one, torch.device("meta")) for dtype, one in sides.items()}
        self.attention = name_attention(self.models[setup.kv_dtype], setup)
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
        self, layers: Sequence[int], peers: Sequence[str], batch_size: int, num_tokens: int, num_new: int = 1
    ) -> dict[str, Any]:
        """Measure all peers, all layers, and all peers again; a peer's figure is its faster one."""
        facts, device = self.setup.geometry.facts, self.setup.device
        query = self._random(batch_size, facts.num_attention_heads, num_new, facts.head_dim)
        keys, values = (
            self._random(batch_size, facts.num_key_value_heads, num_tokens, facts.head_dim) for _ in "kv"
        )
        whole = torch.ones(facts.num_key_value_heads, facts.head_dim, dtype=torch.bool, device=device)
        truths = {False: attend_exactly(query, keys, values, whole, 0, 0)}
        if OWN_DENSE in peers and self.setup.kv_dtype:
            stored = FilledLayer(self.whole_model, 0, query, keys, values).as_stored(keys, values)
            truths[True] = attend_exactly(query, stored[0], stored[1], whole, 0, 0)
            del stored

        def measure(name: str) -> dict[str, Any]:
            truth = truths.get(name == OWN_DENSE, truths[False])
            return self._measure_peer(name, query, keys, values, truth)

        first = {name: measure(name) for name in peers if name != OWN_DTYPE}
        measured = [self._measure_layer(self.setup, layer, query, keys, values) for layer in layers]
        for name, before in first.items():
            if before["milliseconds"] is not None:
                again = measure(name)
                if (again["milliseconds"] or before["milliseconds"]) < before["milliseconds"]:
                    first[name] = again
        if OWN_DTYPE in peers:
            first = {OWN_DTYPE: self._measure_in_own_dtype(layers, query, keys, values), **first}
        case = {
            "batch": batch_size,
            "tokens": num_tokens,
            "new": num_new,
            "ok": all(layer["check"]["ok"] for layer in measured),
            "beyond_l2": all(entry.get("beyond_l2", True) for entry in (*first.values(), *measured)),
            "dense_bytes": keys.nbytes + values.nbytes,
            "peers": first,
            "layers": measured,
        }
        return {**case, **self._summarize(case)}

    def _random(self, *shape: int) -> Tensor:
        setup = self.setup
        return torch.randn(shape, generator=self.generator, dtype=setup.dtype, device=setup.device)

    def _time(self, calls: Sequence[Attend], num_bytes: int) -> dict[str, Any]:
        timing = time_calls(calls, self.setup.device, rounds=self.rounds)
        return {
            **asdict(timing),
            "copies": len(calls),
            "beyond_l2": outgrow_l2(num_bytes, len(calls), self.l2_bytes),
            **self._speed(num_bytes, timing.milliseconds),
        }

    def _speed(self, num_bytes: float, milliseconds: float) -> dict[str, float]:
        achieved = num_bytes / milliseconds / 1e6
        return {
            "bytes": num_bytes,
            "gigabytes_per_second": achieved,
            "bandwidth_share": achieved / self.bandwidth,
        }

    def _measure_peer(
        self, name: str, query: Tensor, keys: Tensor, values: Tensor, truth: AttentionTruth
    ) -> dict[str, Any]:
        calls: list[Attend] = []
        numbers = keys.numel() + values.numel()
        num_bytes = numbers * (self.setup.stored_bytes if name == OWN_DENSE else keys.element_size())
        prepare = self._prepare_own_dense if name == OWN_DENSE else PEERS[name]
        try:
            if query.shape[2] > 1 and name not in CAUSAL_PEERS:
                raise ValueError("it is called for one new token alone")
            # What the runtime says of its own kernel is for the user.
            with nullcontext() if name == OWN_DENSE else silenced():
                calls.append(prepare(query, keys, values))
                for _ in range(copies_needed(num_bytes, self.l2_bytes) - 1):
                    calls.append(prepare(query, keys.clone(), values.clone()))
                check = truth.check(calls[0], query)
                if not check["ok"]:
                    return {"milliseconds": None, "why": "its result is wrong", "check": check}
                return {**self._time(calls, num_bytes), "check": check}
        # A peer may fail in any way: in its compiler, for want of memory, at a shape it does not know.
        except Exception as error:
            return {"milliseconds": None, "why": describe_failure(error), "check": None}
        finally:
            calls.clear()
            release_memory(self.setup.device)

    def _prepare_own_dense(self, query: Tensor, keys: Tensor, values: Tensor) -> Attend:
        if not self.setup.is_toy and name_attention(self.whole_model, self.setup) == PLAIN_TORCH:
            raise LeanKError("the kernel of this layout cannot be used here")
        return FilledLayer(self.whole_model, 0, query, keys, values).attend

    def _measure_in_own_dtype(
        self, layers: Sequence[int], query: Tensor, keys: Tensor, values: Tensor
    ) -> dict[str, Any]:
        """Means over layers as a peer has them; it takes twice the memory that ours does."""
        setup, measured = self.setup.in_own_dtype(), []
        try:
            if not setup.is_toy and name_attention(self.models[None], setup) == PLAIN_TORCH:
                raise LeanKError("the kernel of this layout cannot be used here")
            for layer in layers:
                measured.append(self._measure_layer(setup, layer, query, keys, values))
                if not measured[-1]["check"]["ok"]:
                    check = measured[-1]["check"]
                    return {"milliseconds": None, "why": f"layer {layer} is wrong", "check": check}
        except Exception as error:
            return {"milliseconds": None, "why": describe_failure(error), "check": None}
        finally:
            release_memory(self.setup.device)
        speed = self._speed(*(fmean(layer[key] for layer in measured) for key in ("bytes", "milliseconds")))
        return {
            "milliseconds": fmean(layer["milliseconds"] for layer in measured),
            "method": measured[-1]["method"],
            "beyond_l2": all(layer["beyond_l2"] for layer in measured),
            **speed,
            "check": max((layer["check"] for layer in measured), key=lambda check: check["error"]),
            "layers": measured,
        }

    def _measure_layer(
        self, setup: Setup, layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> dict[str, Any]:
        windows, (batch_size, _, num_tokens, head_dim) = setup.windows, keys.shape
        widths, pruned = setup.layout.widths[layer], pruned_length(num_tokens, windows, query.shape[2])
        mask, model = setup.channel_masks[layer].to(setup.device), self.models[setup.kv_dtype]
        chunk_size = model.build_cache().layers[layer].layout.chunk_size
        tokens = batch_size * num_tokens, batch_size * pruned
        regions = count_attention_bytes(widths, head_dim, chunk_size, *tokens, setup.stored_bytes)
        num_bytes = sum(regions.values())
        filled = FilledLayer(model, layer, query, keys, values)
        stored = filled.as_stored(keys, values)
        truth = attend_exactly(query, stored[0], stored[1], mask, windows.sink_size, pruned)
        del stored
        calls = [filled.attend]
        facts = {"layer": layer, "widths": list(widths), "bytes_by_region": regions}
        check, figures = truth.check(calls[0], query), {"milliseconds": None}
        if check["ok"]:
            for _ in range(copies_needed(num_bytes, self.l2_bytes) - 1):
                calls.append(FilledLayer(model, layer, query, keys, values).attend)
            timed = self._time(calls, num_bytes)
            # The same memory, after it was read thousands of times.
            check = truth.check(calls[0], query)
            figures = timed if check["ok"] else figures
        return {**facts, "check": check, **figures}

    def _summarize(self, case: dict[str, Any]) -> dict[str, Any]:
        """Means over layers, and ratios to peers; none where a layer's check failed."""
        if not case["ok"]:
            return {"mean_milliseconds": None}
        mean = fmean(layer["milliseconds"] for layer in case["layers"])
        mean_bytes = fmean(layer["bytes"] for layer in case["layers"])
        times = {name: peer["milliseconds"] for name, peer in case["peers"].items()}
        ratios = {name: time / mean for name, time in times.items() if time is not None}
        speed = self._speed(mean_bytes, mean)
        best = min(ratios, key=ratios.__getitem__, default=None)
        return {
            "mean_milliseconds": mean,
            "mean_bytes": speed.pop("bytes"),
            "byte_ratio": case["dense_bytes"] / mean_bytes,
            **speed,
            "best_peer": best,
            "ratio_to_best": None if best is None else ratios[best],
            "ratios": ratios,
        }


def _print_case(report: Report, case: dict[str, Any]) -> None:
    rows = [
        [name, *_columns(peer), ratio(case.get("ratios", {}).get(name))]
        for name, peer in case["peers"].items()
    ]
    mean = {**case, "milliseconds": case["mean_milliseconds"], "bytes": case.get("mean_bytes")}
    ours = f"leank, mean of {len(case['layers'])} layers"
    rows.append([ours, *_columns(mean), ratio(1.0 if case["ok"] else None)])
    wrong = [str(layer["layer"]) for layer in case["layers"] if not layer["check"]["ok"]]
    notes = (
        [f"layers WRONG: {', '.join(wrong)}"] if wrong else [f"ceiling by bytes: {case['byte_ratio']:.2f}x"]
    )
    notes += [
        f"{name} has no figures: {peer['why']}" for name, peer in case["peers"].items() if "why" in peer
    ]
    timed = case["peers"] | {f"layer {layer['layer']}": layer for layer in case["layers"]}
    methods = {name: entry["method"] for name, entry in timed.items() if entry["milliseconds"] is not None}
    if methods:
        usual = list(methods.values())[-1]
        notes.append(f"{usual}, medians; of each peer's two the faster")
        notes += [f"{name}: {method}" for name, method in methods.items() if method != usual]
    if "flex" in case["peers"]:
        notes.append("flex: called plainly, no settings were searched for")
    if not case["beyond_l2"]:
        notes.append("inputs are too small to be kept out of L2: GB/s are not those of memory")
    report.table(
        f"decode attention, batch {case['batch']}, {case['tokens']} tokens"
        + (f", {case['new']} of them new" if case["new"] > 1 else ""),
        ["", "ms", "MB read", "GB/s", "of bandwidth", "leank faster"],
        rows,
        notes,
    )


def _columns(figures: dict[str, Any]) -> list[str]:
    return [
        number(figures.get("milliseconds"), 4),
        number(figures.get("bytes"), 1, unit=1e6),
        number(figures.get("gigabytes_per_second"), 0),
        share(figures.get("bandwidth_share")),
    ]
