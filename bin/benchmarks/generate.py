"""`bin/benchmark generate`: a decode step and whole calls of `generate`, beside dense peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, LogitsProcessorList
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutputWithPast

from bin.benchmarks import measuring
from bin.benchmarks.decode_attention import pruned_length, read_peers
from bin.benchmarks.random_models import (
    COMPILED,
    DENSE,
    OURS,
    Models,
    Setup,
    build_dense,
    build_own,
    checked_models,
    name_attention,
    random_prompt,
)
from bin.benchmarks.tables import RATIO, SHARE, Column, Report
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.errors import LeanKError
from leank_convert.head_layout import count_cache_bytes

ALL_CHANNELS, OWN_DTYPE, DYNAMIC = "all-channels", "own-dtype", "dense-dynamic"
GRAPHS = {
    "dense-graph-cudnn": SDPBackend.CUDNN_ATTENTION,
    "dense-graph-flash": SDPBackend.FLASH_ATTENTION,
}
PEERS = (ALL_CHANNELS, *GRAPHS, DYNAMIC)
# Those that are our stack; the last is a peer of an FP8 cache alone.
_OWN = (OURS, ALL_CHANNELS, OWN_DTYPE)
# SDPA, for which transformers makes no mask: it knows none for this name. For SDPA's own, release 5.17 makes
# one while a graph is captured, though a single query needs none, and repeats K and V because there is one.
UNMASKED_SDPA = "leank_benchmark_sdpa"
AttentionInterface.register(UNMASKED_SDPA, sdpa_attention_forward)

_REPLAYS = 20
# Steps that a cache has room for behind the prompt: those that lead to a capture, and replays that append.
_ROOM = 64
_STEPS_TO_CAPTURE = 2  # the first of a kind warms up, the next one is captured
# A warm-up needs no long prompt, but more than one of each kind of step.
_WARM_UP_PROMPT, _WARM_UP_TOKENS = 64, 8
_NOTES = (
    "ms/step: the captured step behind the prompt, replayed; in a call: from token to token of `generate`",
    "both leave out the step in 32 that prunes a block; decode s has it",
    "byte limit: ms to read weights, K and V once; of limit, leank faster: by ms/step, else by a call's",
    "decode s: a call without its prefill, whose share of the call is the last column",
)
_COLUMNS = {
    "ms/step": Column("replay_milliseconds"),
    "in a call": Column("step_milliseconds"),
    "byte limit": Column("byte_limit_milliseconds"),
    "of limit": Column("bandwidth_share", SHARE),
    "leank faster": Column("by step", RATIO),
    "decode s": Column("decode_seconds"),
    "decode faster": Column("decode", RATIO),
    "prefill": Column("prefill_share", SHARE),
}


def benchmark_generate(
    setup: Setup, *, cases: Sequence[tuple[int, int, int]], peers: str | None, rounds: int, drafts: int | None
) -> dict[str, Any]:
    """Measure and print a table for each case of batch, prompt tokens and new tokens.

    `peers` are None for all. With `drafts` our sides' step is also timed with so many tokens to verify.
    """
    if any(num_new < 2 for _, _, num_new in cases):
        raise LeanKError(
            "one new token comes from the prompt alone, without a decode step",
            hint="ask for at least 2 new tokens, such as `--case 64x4kx128`",
        )
    known = (OWN_DTYPE, *PEERS) if setup.kv_dtype else PEERS
    named = read_peers(peers, known) if peers else known
    report = Report(setup.device, setup.describe())
    results: list[dict[str, Any]] = []
    measured: dict[str, Any] = {}
    own = {OURS: setup, ALL_CHANNELS: setup.keeping_all(), OWN_DTYPE: replace(setup, kv_dtype=None)}
    sides = {name: side for name, side in own.items() if name in (OURS, *named)}
    with checked_models(sides, max(prompt for _, prompt, _ in cases), report) as models:
        if models.check["ok"]:
            bandwidth = measuring.measure_read_bandwidth(setup.device, report)
            measured = {"read_bandwidth": bandwidth, "drafts": drafts}
            bench = _Bench(models, named, bandwidth, rounds, drafts)
            for case in cases:
                results.append(bench.run_case(*case))
                _print_case(report, results[-1], models.attention, drafts)
    ok = models.check["ok"] and all("why" not in case["sides"][OURS] for case in results)
    return report.document("generate", **{**models.facts, "ok": ok}, **measured, cases=results)


class _Bench:
    """What all cases of one run share: the sides' models, and how right the peers are."""

    def __init__(
        self, models: Models, named: Sequence[str], bandwidth: float, rounds: int, drafts: int | None
    ) -> None:
        self._setup, self._shared, self._bandwidth = models.sides[OURS], models, bandwidth
        self._rounds, self._drafts, self._named = rounds, drafts, named
        self._models: dict[str, Any] = {OURS: models.ours}
        self._checks = {OURS: models.check}
        self._refused = {name: why for name in named if (why := measuring.attempt(self._prepare, name))}

    def run_case(self, batch_size: int, num_prompt: int, num_new: int) -> dict[str, Any]:
        """Measure all sides one after the other; one that fails has a reason and no figures."""
        prompt = random_prompt(self._shared.ours, batch_size, num_prompt)
        measuring.release_memory(self._setup.device)
        sides = {OURS: measuring.attempt(self._measure, OURS, prompt, num_new)}
        for name in self._named:
            measuring.release_memory(self._setup.device)
            sides[name] = self._refused.get(name) or measuring.attempt(self._measure, name, prompt, num_new)
        ratios = {name: compare(sides[OURS], sides[name]) for name in self._named}
        sizes = {"batch": batch_size, "prompt": num_prompt, "new": num_new}
        return {**sizes, "sides": sides, "ratios": ratios}

    def _prepare(self, name: str) -> dict[str, Any] | None:
        """Put a peer's model together and check it; what speaks against it."""
        shared, setup = self._shared, self._setup
        model = shared.dense
        if name in GRAPHS:
            model = GraphedDense(build_dense(shared.ours, setup.geometry, UNMASKED_SDPA), GRAPHS[name])
        elif name in shared.sides:
            model = build_own(shared.ours, shared.sides[name])
            if name_attention(model, setup) != shared.attention:
                raise LeanKError("the kernel of this layout cannot be used here")
        self._models[name] = model
        check = self._checks[name] = shared.truths.get(name, shared.truths[DENSE]).check(model)
        return None if check["ok"] else {"why": "its result is wrong", "check": check}

    def _measure(self, name: str, prompt: Tensor, num_new: int) -> dict[str, Any]:
        # The first full prompt pays for memory that later ones find in the allocator.
        model = self._models[name]
        figures: dict[str, Any] = {}
        if name in GRAPHS:
            figures |= _name_timing("replay", model.time_step(prompt))
        else:
            call_generate(model, prompt[:, :_WARM_UP_PROMPT], min(_WARM_UP_TOKENS, num_new))
            if name == DYNAMIC:
                call_generate(model, prompt, 1)
            else:
                figures |= _name_timing("replay", time_own_step(model, prompt))
                if self._drafts:
                    figures |= _name_timing("draft", time_own_step(model, prompt, self._drafts))
            figures |= time_generate(model, prompt, num_new, self._rounds)
        setup = self._shared.sides.get(name) or replace(self._setup.keeping_all(), kv_dtype=None)
        # Weights are the same on all sides; the step is that of the first new token.
        read = count_step_bytes(self._shared.ours, setup, prompt.shape[0], prompt.shape[1] + 1)
        limit = sum(read.values()) / self._bandwidth / 1e6
        step = figures["step_milliseconds" if name == DYNAMIC else "replay_milliseconds"]
        return {
            "check": self._checks[name],
            **figures,
            "step_bytes": sum(read.values()),
            "bytes_by_kind": read,
            "byte_limit_milliseconds": limit,
            "bandwidth_share": limit / step,
        }


def count_step_bytes(model: Any, setup: Setup, batch_size: int, num_tokens: int) -> dict[str, int]:
    """Count what a decode step has to read, each byte once: weights, and keys and values by the mask.

    The step's own token is the last of each row's `num_tokens`. Of the embedding's table it reads next to
    nothing, unless that is the head's too.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = (weight for weight in model.parameters() if weight is not embedding or weight is head)
    mask, head_dim = setup.mask, setup.geometry.facts.head_dim
    token = count_cache_bytes(mask.widths, head_dim, setup.stored_bytes, value_widths=mask.stored_values)
    pruned = pruned_length(num_tokens, setup.windows)
    row = pruned * (token.key_pruned + token.value_pruned)
    row += (num_tokens - pruned) * (token.key_window + token.value_window)
    return {"weights": sum(weight.nbytes for weight in read), "cache": batch_size * row}


def time_own_step(model: Any, prompt: Tensor, num_drafted: int = 0) -> measuring.Timing:
    """Time the step of a LeanK model behind a prompt `[B, S]`: replays of the graph that it captured.

    It verifies so many drafted tokens, all of which stay in the cache.
    """
    cache = model.build_cache()
    cache.reserve(prompt.shape[1] + _ROOM * (1 + num_drafted))
    model(prompt, logits_to_keep=1, **{CACHE: cache})
    tokens = prompt[:, -1:].repeat(1, 1 + num_drafted)

    def step() -> None:
        model(tokens, **{CACHE: cache})

    for _ in range(_STEPS_TO_CAPTURE):
        step()
    return measuring.time_replays(cache.graph.captured_step, step, model.device, rounds=_REPLAYS)


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer `[B, H_kv, capacity, D]`, written in place and seen up to their length."""

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.length = capacity, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens `[B, H_kv, S, D]`; return all there are."""
        if self.keys is None or self.values is None:
            batch_size, num_heads, _, head_dim = key_states.shape
            shape = batch_size, num_heads, self.capacity, head_dim
            self.keys, self.values = key_states.new_empty(shape), value_states.new_empty(shape)
            self.is_initialized = True
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.length


class GraphedDense:
    """The stock model over a preallocated cache, called like a model; on a GPU each of its steps is a graph.

    A step is told how many tokens there are by shapes alone, and a mask over room to spare would cost time:
    it is captured at exactly its length. The model is loaded with `UNMASKED_SDPA`: its rows have no padding.
    """

    def __init__(self, dense: Any, backend: SDPBackend) -> None:
        self._dense, self._backend = dense, backend
        self._is_on_gpu = dense.device.type == "cuda"

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        """Run a prompt `[B, S]`, or a step `[B, 1]` behind one."""
        if options.get(CACHE) is None:
            capacity = input_ids.shape[1] + _ROOM
            options[CACHE] = Cache(layers=[PreallocatedLayer(capacity) for _ in self._dense.model.layers])
            return self._dense(input_ids, **options)
        graph, step, logits = self._capture(input_ids, options[CACHE])
        if graph is None:
            step()
        else:
            graph.replay()
        return CausalLMOutputWithPast(logits=logits[-1].clone(), **{CACHE: options[CACHE]})

    def time_step(self, prompt: Tensor) -> measuring.Timing:
        """Time the step behind a prompt `[B, S]`, by replays if it was captured."""
        cache = self(prompt, logits_to_keep=1)[CACHE]
        graph, step, _ = self._capture(prompt[:, -1:], cache)
        return measuring.time_replays(graph, step, prompt.device, rounds=_REPLAYS)

    def _capture(self, token: Tensor, cache: Cache) -> tuple[Any, Callable[[], None], list[Tensor]]:
        """The graph of a step `[B, 1]`, None on the CPU; the step, which may run repeatedly; its logits."""
        length = cache.get_seq_length()
        position = torch.full((1, 1), length, device=token.device)
        logits: list[Tensor] = []

        def step() -> None:
            for layer in cache.layers:
                assert isinstance(layer, PreallocatedLayer)
                layer.length = length
            with sdpa_kernel(self._backend) if self._is_on_gpu else nullcontext():
                logits[:] = [self._dense(token, position_ids=position, **{CACHE: cache}).logits]

        return measuring.capture(step, step) if self._is_on_gpu else None, step, logits


def _name_timing(name: str, timing: Any) -> dict[str, Any]:
    return {f"{name}_milliseconds": timing.milliseconds, name: asdict(timing)}


def call_generate(model: Any, prompt: Tensor, num_new: int) -> tuple[float, list[float], Any]:
    """Call `generate`, greedy, on a prompt `[B, S]` for `num_new` tokens.

    Returned are the seconds of the whole, the milliseconds up to the first logits and from token to token,
    and the cache.
    """
    stopwatch = measuring.Stopwatch(model.device)

    def mark(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mark the moment between a step's forward pass and the choice of its token."""
        stopwatch.mark()
        return scores

    measuring.synchronize(model.device)
    began = time.perf_counter()
    stopwatch.mark()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        pad_token_id=0,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([mark]),
    )
    measuring.synchronize(model.device)
    seconds = time.perf_counter() - began
    return seconds, stopwatch.gaps(), output[CACHE]


def time_generate(model: Any, prompt: Tensor, num_new: int, rounds: int) -> dict[str, Any]:
    """Figures of several calls of `generate`; medians."""
    calls, replayed = [], {}
    for _ in range(rounds):
        seconds, (prefill, *steps), cache = call_generate(model, prompt, num_new)
        calls.append((seconds, prefill / 1e3, steps))
        if hasattr(cache, "graph"):
            facts = ("num_captures", "num_replays", "why_eager")
            replayed = {"graph": {key.removeprefix("num_"): getattr(cache.graph, key) for key in facts}}
        del cache  # before the next one comes
    seconds = median(seconds for seconds, _, _ in calls)
    return {
        "rounds": rounds,
        "step_milliseconds": median(gap for _, _, steps in calls for gap in steps),
        "generate_seconds": seconds,
        "decode_seconds": median(seconds - prefill for seconds, prefill, _ in calls),
        "prefill_share": median(prefill / seconds for seconds, prefill, _ in calls),
        "tokens_per_second": prompt.shape[0] * num_new / seconds,
        **replayed,
    }


_COMPARED = {
    "bytes": "step_bytes",
    "replay": "replay_milliseconds",
    "step": "step_milliseconds",
    "decode": "decode_seconds",
    "generate": "generate_seconds",
}


def compare(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, float | None]:
    """How many times as fast ours is, by each way of measuring that the peer has, and what bytes allow."""
    known = peer.keys() & ours.keys()
    return {name: peer[key] / ours[key] if key in known else None for name, key in _COMPARED.items()}


def _print_case(report: Report, case: dict[str, Any], attention: str, drafts: int | None) -> None:
    columns, notes = _COLUMNS, list(_NOTES)
    if drafts:
        first, *others = columns.items()
        columns = dict([first, (f"{drafts} drafts", Column("draft_milliseconds")), *others])
        notes.append("drafts: ms/step with so many drafted tokens to verify; calls are without")
    rows = []
    for name, side in case["sides"].items():
        label = f"{name} ({attention})" if name in _OWN and attention != COMPILED else name
        faster = case["ratios"].get(name, {})
        rows.append((label, {**side, **faster, "by step": faster.get("replay") or faster.get("step")}))
        if side.get("graph", {}).get("why_eager"):
            notes.append(f"{label}: steps of a call are not replayed: {side['graph']['why_eager']}")
    title = f"generate, batch {case['batch']}, prompt {case['prompt']}, {case['new']} new tokens"
    report.table(title, columns, rows, notes)
