"""`benchmark generate`: a decode step and whole calls of `generate`, beside the dense model's."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from leank_convert.benchmark.decode_attention import read_peers
from leank_convert.benchmark.measuring import (
    Stopwatch,
    describe_failure,
    release_memory,
    silenced,
    synchronize,
)
from leank_convert.benchmark.random_models import COMPILED, Setup, checked_models, random_prompt
from leank_convert.benchmark.tables import Report, number, ratio
from leank_convert.errors import LeanKError

OURS, DYNAMIC, STATIC = "leank", "dense-dynamic", "dense-static"
PEERS = (DYNAMIC, STATIC)
# A warm-up needs no long prompt, but more than one of each kind of step.
_WARM_UP_PROMPT = 64
_WARM_UP_TOKENS = 8


def benchmark_generate(
    setup: Setup,
    *,
    cases: Sequence[tuple[int, int, int]],
    peers: str,
    rounds: int,
    static_limit: float,
) -> dict[str, Any]:
    """Measure and print a table for each case of batch, prompt tokens and new tokens.

    Compiling the static cache's step is given up after `static_limit` seconds. If decoding is not right, the
    JSON document that is returned has `ok` false and no cases.

    Raises:
        LeanKError: If a case has no decode step, or something of ours does not fit on the device.
    """
    if any(num_new < 2 for _, _, num_new in cases):
        raise LeanKError(
            "one new token comes from the prompt alone, without a decode step",
            hint="ask for at least 2 new tokens, such as `--case 64x4kx128`",
        )
    named = read_peers(peers, PEERS)
    report = Report(setup.device, setup.describe())
    results: list[dict[str, Any]] = []
    with checked_models(setup, max(prompt for _, prompt, _ in cases), report) as models:
        for batch_size, num_prompt, num_new in cases if models.check["ok"] else ():
            prompt = random_prompt(models.ours, batch_size, num_prompt)
            sides = {OURS: _time_ours(models.ours, prompt, num_new, rounds)}
            for name in named:
                release_memory(setup.device)
                try:
                    with silenced():
                        sides[name] = (
                            _time_generate(models.dense, prompt, num_new, rounds)[0]
                            if name == DYNAMIC
                            else _time_static(models.dense, prompt, num_new, rounds, static_limit)
                        )
                # A peer may fail in any way: its compiler, its memory, the time limit.
                except Exception as error:
                    sides[name] = {"why": describe_failure(error)}
            release_memory(setup.device)
            ratios = {name: _ratios(sides[OURS], sides[name]) for name in named}
            sizes = {"batch": batch_size, "prompt": num_prompt, "new": num_new}
            results.append({**sizes, "sides": sides, "ratios": ratios})
            _print_case(report, results[-1], models.attention)
    return report.document("generate", **models.facts, cases=results)


def _time_ours(model: Any, prompt: Tensor, num_new: int, rounds: int) -> dict[str, Any]:
    figures, cache = _time_generate(model, prompt, num_new, rounds)
    graph = cache.graph
    replayed = {"captures": graph.num_captures, "replays": graph.num_replays, "why_eager": graph.why_eager}
    return {**figures, "graph": replayed}


def _time_static(
    dense: Any, prompt: Tensor, num_new: int, rounds: int, compile_limit: float
) -> dict[str, Any]:
    """One static cache for all calls, so that its compiled step is compiled and captured once."""
    from transformers import StaticCache

    cache = StaticCache(config=dense.config, max_cache_len=prompt.shape[1] + num_new)
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    try:
        with time_limit(compile_limit):
            short = prompt[:, :_WARM_UP_PROMPT]
            warm_up = generate(dense, short, min(_WARM_UP_TOKENS, num_new), static=cache).seconds
        figures, _ = _time_generate(dense, prompt, num_new, rounds, static=cache)
    finally:
        torch._dynamo.reset()
    return {**figures, "warm_up_seconds": warm_up, "compiled_graphs": stats["unique_graphs"] - before}


def _time_generate(
    model: Any, prompt: Tensor, num_new: int, rounds: int, static: Any = None
) -> tuple[dict[str, Any], Any]:
    """Figures of several calls, after a warm-up, and the cache of the last one."""
    if static is None:
        generate(model, prompt[:, :_WARM_UP_PROMPT], min(_WARM_UP_TOKENS, num_new))
    # The first full prompt pays for memory that later ones find in the allocator.
    generate(model, prompt, 1, static=static)
    seconds: list[float] = []
    steps: list[float] = []
    cache = None
    for _ in range(rounds):
        cache = None  # the one before goes first
        call = generate(model, prompt, num_new, static=static)
        seconds.append(call.seconds)
        steps += call.step_milliseconds
        cache = call.cache
        del call
    return {
        "rounds": rounds,
        "step_milliseconds": median(steps),
        "generate_seconds": median(seconds),
        "tokens_per_second": prompt.shape[0] * num_new / median(seconds),
    }, cache


class _StepClock(LogitsProcessor):
    """Marks the moment between a step's forward pass and the choice of its token."""

    def __init__(self, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.stopwatch.mark()
        return scores


@dataclass(frozen=True)
class Generation:
    """One call of `generate`: how long it took, prefill included, and from token to token; its cache."""

    seconds: float
    step_milliseconds: Sequence[float]
    cache: Any


def generate(model: Any, prompt: Tensor, num_new: int, *, static: Any = None) -> Generation:
    """Call `generate`, greedy, on a prompt `[B, S]` for `num_new` tokens; `static` is a cache to fill."""
    clock = _StepClock(model.device)
    given = {}
    if static is not None:
        static.reset()
        given = {"past_key_values": static}
    synchronize(model.device)
    began = time.perf_counter()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        pad_token_id=0,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([clock]),
        **given,
    )
    synchronize(model.device)
    return Generation(time.perf_counter() - began, clock.stopwatch.gaps(), output.past_key_values)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a `TimeoutError` in what runs inside after some seconds; only in the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ratios(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, float | None]:
    """How many times as fast ours is, by each way of measuring."""
    keys = {"step": "step_milliseconds", "generate": "generate_seconds"}
    return {name: peer[key] / ours[key] if key in peer else None for name, key in keys.items()}


def _remark(side: dict[str, Any]) -> str | None:
    if "why" in side:
        return f"no figures: {side['why']}"
    if "compiled_graphs" in side:
        # Its mask keeps `enable_gqa` out of transformers' call of SDPA.
        seconds = f"compiled in {side['warm_up_seconds']:.0f} s"
        compiled = seconds if side["compiled_graphs"] else "not compiled"
        return f"step {compiled}; its mask has K and V repeated for every query head"
    if "graph" not in side:
        return None
    why = side["graph"]["why_eager"]
    return f"not replayed: {why}" if why else f"{side['graph']['replays']} steps replayed"


def _print_case(report: Report, case: dict[str, Any], attention: str) -> None:
    rows, notes = [], []
    for name, side in case["sides"].items():
        faster = case["ratios"].get(name, {})
        label = f"{name} ({attention})" if name == OURS and attention != COMPILED else name
        step, tokens = number(side.get("step_milliseconds")), number(side.get("tokens_per_second"), 0)
        rows.append([label, step, ratio(faster.get("step")), tokens, ratio(faster.get("generate"))])
        if remark := _remark(side):
            notes.append(f"{label}: {remark}")
    report.table(
        f"generate, batch {case['batch']}, prompt {case['prompt']}, {case['new']} new tokens",
        ["", "ms/step", "leank faster", "tokens/s", "leank faster"],
        rows,
        [*notes, "ms/step: from token to token of a call; tokens/s: whole calls, prefill included"],
    )
