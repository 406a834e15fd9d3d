"""`bin/benchmark onnx`: decode step of the exported graph on onnxruntime, beside the exporter's dense graph.

Timed is a step of one row of a model of random weights, of a few hundred MB: the graph, and the new token's
keys and values put into the cache; not the flush, which comes once in `flush_size` steps. The dense graph is
that of a mask without a pruned region, all tokens in one window. Both run as `leank_onnx.py` runs them.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bin.benchmarks.decode_attention import Pruning, attend_row, finite, pruned_length, relative_error
from bin.benchmarks.geometries import Geometry
from bin.benchmarks.measuring import summarize
from bin.benchmarks.random_models import Setup, build_stock
from bin.benchmarks.tables import RATIO, SHARE, Column, Report
from leank_convert.head_layout import count_cache_bytes
from leank_convert.onnx import OPSET, PrunedModel, check_available, export_graph
from leank_convert.onnx.graph import attending
from leank_convert.onnx.leank_onnx_cache import MODEL_FILE, Array, Cache, Description
from leank_convert.onnx.leank_onnx_session import load_graph, run_graph
from leank_convert.onnx.quantize import SCHEMES, quantize_blocks

SIDES = ("dense", "leank")
# At most these, so that a toy stays one. They make 373 MB of four of Llama's layers.
_SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 8192}
_LAYERS = 4
_TOKEN = 5
_WARM_UP, _ROUNDS = 2, 21
# Sharper than a model's of random weights, so that attention is far from uniform.
_KEY_SCALE = 2.0
_TOLERANCE = 1e-4
# Activations of 8 bits before attention as sharp as here: up to 0.09 was seen; a wrong cache is above 1.
_QUANTIZED_TOLERANCE = 0.2

_COLUMNS = {
    "dense ms": Column("dense ms", "{:,.1f}"),
    "leank ms": Column("leank ms", "{:,.1f}"),
    "leank faster": Column("ratio", RATIO),
    "by bytes": Column("byte_ratio", RATIO),
    "±": Column("spread", SHARE),
    "cache of dense": Column("cache", SHARE),
}

# Per layer of one row, keys and values `[1, H_kv, N, D]`, heads in the checkpoint's order.
Cached = Sequence[tuple[Tensor, Tensor]]


def benchmark_onnx(setup: Setup, *, lengths: Sequence[int], weights: str, threads: int) -> dict[str, Any]:
    """Measure a step at each length of the cache, by both graphs in such weights, and print a table."""
    check_available()
    rounded = None if weights == "float32" else weights
    chosen = choose_layers(setup)
    measured = setup.take_layers(chosen)
    report = Report(setup.device, measured.describe(), for_cpu=True)
    report.line(
        f"layers {', '.join(map(str, chosen))} of the mask; {threads} threads, opset {OPSET}, "
        f"{weights} weights, float32 cache"
    )
    model = build_small(measured.geometry)
    exact = copy.deepcopy(model)
    if rounded is not None:
        round_weights(exact, rounded)
    exact.double()
    # Both sides take turns: none may wait busily while the other one runs.
    settings = {"session.force_spinning_stop": "1"}
    masks, cases = torch.stack(measured.channel_masks), []
    with TemporaryDirectory() as temporary:
        hosts = {}
        for side in SIDES:
            folder = Path(temporary, side)
            folder.mkdir()
            kept = masks if side == "leank" else torch.zeros_like(masks)
            export_graph(PrunedModel(model, kept, measured.windows), folder, weights=rounded)
            hosts[side] = Description(folder), load_graph(folder / MODEL_FILE, threads, settings)
        # Those in the graph's file, without the embedding's.
        read = (folder / f"{MODEL_FILE}.data").stat().st_size - model.get_input_embeddings().weight.nbytes
        report.line(f"{read / 1e6:,.1f} MB of weights are read")
        for num_tokens in lengths:
            cached = draw_cache(measured, num_tokens)
            steps = {side: HostStep(*hosts[side], cached, side) for side in SIDES}
            checks = {
                side: step.check(exact_logits(exact, measured, cached, side), rounded)
                for side, step in steps.items()
            }
            held = {side: step.cache_bytes for side, step in steps.items()}
            ok = all(check["ok"] for check in checks.values())
            figures = _time_sides(steps, {side: held[side] + read for side in SIDES}) if ok else {}
            cases.append(
                {
                    "tokens": num_tokens,
                    "pruned": pruned_length(num_tokens + 1, measured.windows),
                    "cache_bytes": held,
                    "cache_share": held["leank"] / held["dense"],
                    "ok": ok,
                    "step": {"checks": checks, **figures},
                }
            )
    _print_times(report, cases)
    return report.document(
        "onnx",
        ok=all(case["ok"] for case in cases),
        dtype="float32",
        weights=weights,
        threads=threads,
        layers=chosen,
        widths=[list(row) for row in measured.layout.widths],
        weight_bytes=read,
        cases=cases,
    )


def choose_layers(setup: Setup) -> list[int]:
    """The layers to measure: one of each quarter of the depth.

    Of all such choices the one whose pruned region takes the share that is closest to the whole mask's.
    """
    head_dim = setup.geometry.facts.head_dim
    counted = [count_cache_bytes([widths], head_dim, 1) for widths in setup.mask.widths]
    taken = [layer.key_pruned + layer.value_pruned for layer in counted]
    mean = sum(taken) / len(taken)
    parts = min(_LAYERS, len(taken))
    choices = itertools.product(*(part.tolist() for part in np.array_split(range(len(taken)), parts)))
    return list(min(choices, key=lambda choice: abs(sum(taken[layer] for layer in choice) / parts - mean)))


def build_small(geometry: Geometry) -> Any:
    """The stock class with random weights in float32, of a geometry's attention in smaller other layers."""
    sizes: dict[str, Any] = {key: min(value, geometry.config[key]) for key, value in _SIZES.items()}
    # Queries of about unit size, so that attention is far from uniform and an error would be seen.
    sizes |= {"head_dim": geometry.facts.head_dim, "initializer_range": sizes["hidden_size"] ** -0.5}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build_stock(geometry, "cpu", torch.float32, **sizes)


def round_weights(model: Any, weights: str) -> None:
    """Give a model's linear layers the values that they have once quantized, no longer the embedding's."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(_rounded(module.weight.detach(), weights), requires_grad=False)


def _rounded(weight: Tensor, weights: str) -> Tensor:
    """A weight [out, in] after quantization."""
    scheme = SCHEMES[weights]
    packed, scales = quantize_blocks(weight.T.numpy(), scheme)
    numbers = torch.from_numpy(packed)
    if scheme.bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(2)
    middle = 1 << (scheme.bits - 1)
    blocks = (numbers.float() - middle) * torch.from_numpy(scales)[..., None]
    return blocks.flatten(1)[:, : weight.shape[1]].to(weight.dtype).contiguous()


def draw_cache(setup: Setup, num_tokens: int) -> Cached:
    """Random keys and values, so that both sides and the exact result see the same cache."""
    facts = setup.geometry.facts
    generator = torch.Generator().manual_seed(1)
    shape = (2, 1, facts.num_key_value_heads, num_tokens, facts.head_dim)
    layers = (torch.randn(shape, generator=generator) for _ in range(facts.num_hidden_layers))
    return [(keys * _KEY_SCALE, values) for keys, values in layers]


def exact_logits(model: Any, setup: Setup, cached: Cached, side: str) -> Tensor:
    """Logits of the step that follows a cache, by the definition on dense keys and values.

    Shares no code with graph, host and runtime. `model` is a stock one, in float64; where the graph's weights
    are quantized, it has the values that they were rounded to.
    """
    num_tokens, windows = cached[0][0].shape[2], setup.windows
    pruned = pruned_length(num_tokens + 1, windows) if side == "leank" else 0

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        stored, mask = cached[module.layer_idx], setup.channel_masks[module.layer_idx]
        keys, values = (
            torch.cat([old.to(query), new], dim=2) for old, new in zip(stored, (key, value), strict=True)
        )
        kept = mask if side == "leank" else torch.ones_like(mask)
        with sdpa_kernel(SDPBackend.MATH):
            out = attend_row(query, keys, values, Pruning(kept, windows.sink_size, pruned))
        return out.transpose(1, 2), None

    position = torch.tensor([[num_tokens]])
    with attending(model, attend), torch.no_grad():
        output = model(torch.tensor([[_TOKEN]]), position_ids=position, use_cache=False)
    logits: Tensor = output.logits.flatten()
    return logits


class HostStep:
    """One decode step of a graph as its host runs it, again and again on the same cache.

    The cache of the side `leank` is parted as it is while decoding.
    """

    def __init__(self, description: Description, graph: Any, cached: Cached, side: str) -> None:
        num_tokens = cached[0][0].shape[2]
        order = torch.tensor(description.content["channel_order"])
        prompt = [
            (keys.gather(3, lanes[None, :, None].expand_as(keys)).numpy(), values.mT.numpy())
            for (keys, values), lanes in zip(cached, order, strict=True)
        ]
        # With room for the step's token, and larger than the sink.
        self._cache = Cache(description, 1, max(num_tokens, description.sink_size) + 1)
        self._cache.write_prompt(prompt, np.array([num_tokens]), 0)
        if side == "leank":
            self._cache.split()
        self._side, self._buffers = side, _without_reserve(self._cache)
        self._graph = graph
        self.cache_bytes = sum(buffer.nbytes for buffer in self._buffers.values())

    def run(self) -> Array:
        """Run one step; its logits [1, 1, V]."""
        lengths = self._cache.lengths, self._cache.pruned_lengths
        tokens = np.array([[_TOKEN]]), *lengths, np.array([[0]])
        logits, present = run_graph(self._graph, self._buffers, *tokens)
        if self._side == "leank":
            self._cache.append(present, 0, np.array([True]))
        else:
            self._cache.write_prompt(present, np.array([1]), 0)
        self._cache.lengths -= 1  # so that the next one is the same step
        return logits

    def check(self, exact: Tensor, weights: str | None) -> dict[str, Any]:
        """Hold a fresh run's logits to exact ones.

        Where the graph's weights are quantized, onnxruntime rounds activations to 8 bits, too.
        """
        error = relative_error(torch.from_numpy(self.run()).flatten(), exact)
        tolerance = _TOLERANCE if weights is None else _QUANTIZED_TOLERANCE
        # NaN never is.
        return {"error": finite(error), "tolerance": tolerance, "ok": error <= tolerance}


def _without_reserve(cache: Cache) -> dict[str, Any]:
    """A cache's arrays; the pruned ones with as many columns as there are tokens, but one at least."""
    columns = max(int(cache.pruned_lengths[0]), 1)
    buffers = cache.tensors()
    for name, array in buffers.items():
        if ".pruned." in name:
            held = array[:, :, :columns] if name.endswith(".key") else array[..., :columns]
            buffers[name] = np.ascontiguousarray(held)
    return buffers


def _time_sides(steps: Mapping[str, HostStep], read: Mapping[str, int]) -> dict[str, Any]:
    """Time both sides in turns; which one begins changes every round."""
    for step in steps.values():
        for _ in range(_WARM_UP):
            step.run()
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    for index in range(_ROUNDS):
        for side in SIDES if index % 2 else reversed(SIDES):
            began = time.perf_counter()
            steps[side].run()
            samples[side].append((time.perf_counter() - began) * 1e3)
    figures: dict[str, Any] = {
        side: {**asdict(summarize(samples[side], 1, "wall clock, in turns")), "bytes": read[side]}
        for side in SIDES
    }
    keys = {"ratio": "milliseconds", "byte_ratio": "bytes"}
    ratios = {name: figures["dense"][key] / figures["leank"][key] for name, key in keys.items()}
    return {**figures, **ratios}


def _print_times(report: Report, cases: Sequence[Mapping[str, Any]]) -> None:
    rows, notes = [], []
    for case in cases:
        figures, label = case["step"], f"{case['tokens']:,} tokens"
        own = {f"{side} ms": figures[side]["milliseconds"] for side in SIDES if side in figures}
        spread = max((figures[side]["spread"] for side in SIDES if side in figures), default=None)
        rows.append((label, {**figures, **own, "spread": spread, "cache": case["cache_share"]}))
        notes += [
            f"{label}: the {side} graph's logits are WRONG: {check['error']}"
            for side, check in figures["checks"].items()
            if not check["ok"]
        ]
    if not notes:
        errors = (check["error"] for case in cases for check in case["step"]["checks"].values())
        notes = [f"error of logits at most {max(errors):.1e}, ‖graph's - exact‖ / ‖exact‖, in float64"]
    notes.append(f"medians of {_ROUNDS} rounds in turns; ±: half the quartiles' distance, the larger one")
    report.table("whole step, one row", _COLUMNS, rows, notes)
