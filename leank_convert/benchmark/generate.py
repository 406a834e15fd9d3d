"""`benchmark generate`: a decode step and whole calls of `generate`, beside the dense model's."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from leank_convert.benchmark.measuring import (
    Stopwatch,
    describe_failure,
    release_memory,
    silenced,
    synchronize,
)
from leank_convert.benchmark.models import COMPILED, Setup, checked_models, random_prompt
from leank_convert.benchmark.tables import Report, build_document, describe_environment, number, ratio
from leank_convert.errors import LeanKError

OURS, DYNAMIC, STATIC = "leank", "dense-dynamic", "dense-static"
PEERS = (DYNAMIC, STATIC)
_LOOP_STEPS = 32
_LOOP_WARM_UP = 6
_REPLAYS = 24
# A warm-up needs no long prompt, but more than one of each kind of step.
_WARM_UP_PROMPT = 64
_WARM_UP_TOKENS = 8
_LEGEND = (
    "generate ms/step: from token to token of a call, with all that `generate` does between them",
    "loop: forward pass and argmax alone, without a mask or a wait for the device, after that call",
    "its graph: the loop's step, captured and replayed; tokens/s: whole calls, prefill included",
)


def benchmark_generate(
    setup: Setup,
    cases: Sequence[tuple[int, int, int]],
    *,
    peers: Sequence[str],
    rounds: int,
    static_limit: float,
) -> dict[str, Any]:
    """Measure and print tables.

    Args:
        setup: What and where.
        cases: Batch, prompt tokens and new tokens of each case.
        peers: Among `PEERS`.
        rounds: Timed calls of `generate` for each side and case.
        static_limit: Seconds after which compiling the static cache's step is given up.

    Returns:
        The JSON document. If decoding is not right, `ok` is false and there are no cases.

    Raises:
        LeanKError: If a case has no decode step, or something of ours does not fit on the device.
    """
    if any(num_new < 2 for _, _, num_new in cases):
        raise LeanKError(
            "one new token comes from the prompt alone, without a decode step",
            hint="ask for at least 2 new tokens, such as `--case 64x4kx128`",
        )
    environment, subject = describe_environment(setup.device), setup.subject.describe()
    report = Report(environment, subject)
    results: list[dict[str, Any]] = []
    with checked_models(setup, max(prompt for _, prompt, _ in cases), report) as models:
        for case in cases if models.check["ok"] else ():
            batch_size, num_prompt, num_new = case
            prompt = random_prompt(models.ours, batch_size, num_prompt)
            bench = _Case(models.ours, models.dense, prompt, num_new, rounds, static_limit)
            results.append(bench.run(peers))
            _print_case(report, results[-1], models.attention)
    return build_document(
        "generate",
        environment,
        subject,
        ok=models.check["ok"],
        dtype=setup.dtype_name,
        kernel=models.attention,
        check=models.check,
        cases=results,
    )


@dataclass(frozen=True)
class _Case:
    """One prompt `[B, S]` and number of new tokens, on one model and its dense twin."""

    model: Any
    dense: Any
    prompt: Tensor
    num_new: int
    rounds: int
    static_limit: float

    def run(self, peers: Sequence[str]) -> dict[str, Any]:
        """Measure ours and the peers; a peer that fails has no figures and says why."""
        runners = {DYNAMIC: self._dynamic, STATIC: self._static}
        sides = {OURS: self._ours()}
        for name in peers:
            release_memory(self.model.device)
            try:
                with silenced():
                    sides[name] = runners[name]()
            # A peer may fail in any way: its compiler, its memory, the time limit.
            except Exception as error:
                sides[name] = {"why": describe_failure(error)}
        release_memory(self.model.device)
        sizes = {"batch": self.prompt.shape[0], "prompt": self.prompt.shape[1], "new": self.num_new}
        ratios = {name: _ratios(sides[OURS], sides[name]) for name in peers}
        return {**sizes, "sides": sides, "ratios": ratios}

    def _ours(self) -> dict[str, Any]:
        self._warm_up(self.model)
        figures, last = self._time_generate(lambda: generate(self.model, self.prompt, self.num_new))
        cache, token, graph = last.cache, last.tokens[:, -1:], last.cache.graph
        figures["graph"] = {
            "captures": graph.num_captures,
            "replays": graph.num_replays,
            "why_eager": graph.why_eager,
        }
        loop = time_loop(self.model, cache, token)
        replay = time_replay(self.model, cache, token)
        times = {"loop_step_milliseconds": loop, "replay_milliseconds": replay}
        return {**figures, **times, "step_over_replay": None if replay is None else loop / replay}

    def _dynamic(self) -> dict[str, Any]:
        self._warm_up(self.dense)
        figures, last = self._time_generate(lambda: generate(self.dense, self.prompt, self.num_new))
        loop = time_loop(self.dense, last.cache, last.tokens[:, -1:])
        return {**figures, "loop_step_milliseconds": loop}

    def _static(self) -> dict[str, Any]:
        """One static cache for all calls, so that its compiled step is compiled and captured once."""
        from transformers import StaticCache

        cache = StaticCache(config=self.dense.config, max_cache_len=self.prompt.shape[1] + self.num_new)

        def run(prompt: Tensor, num_new: int) -> Generation:
            cache.reset()  # type: ignore[no-untyped-call]
            return generate(self.dense, prompt, num_new, cache=cache)

        stats = torch._dynamo.utils.counters["stats"]
        before = stats["unique_graphs"]
        try:
            with time_limit(self.static_limit):
                short = self.prompt[:, :_WARM_UP_PROMPT]
                warm_up = run(short, min(_WARM_UP_TOKENS, self.num_new)).seconds
            run(self.prompt, 1)  # as `_warm_up` does for the others
            figures, _ = self._time_generate(lambda: run(self.prompt, self.num_new))
        finally:
            torch._dynamo.reset()
        return {
            **figures,
            "warm_up_seconds": warm_up,
            "compiled_graphs": stats["unique_graphs"] - before,
        }

    def _warm_up(self, model: Any) -> None:
        generate(model, self.prompt[:, :_WARM_UP_PROMPT], min(_WARM_UP_TOKENS, self.num_new))
        # The first full prompt pays for memory that later ones find in the allocator.
        model(self.prompt, use_cache=True, logits_to_keep=1)

    def _time_generate(self, run: Callable[[], Generation]) -> tuple[dict[str, Any], Generation]:
        seconds: list[float] = []
        steps: list[float] = []
        for _ in range(self.rounds):
            last = None  # the cache before goes first
            last = run()
            seconds.append(last.seconds)
            steps += last.step_milliseconds
        assert last is not None
        return {
            "rounds": self.rounds,
            "step_milliseconds": median(steps),
            "generate_seconds": median(seconds),
            "tokens_per_second": self.prompt.shape[0] * self.num_new / median(seconds),
        }, last


class _StepClock(LogitsProcessor):
    """Marks the moment between a step's forward pass and the choice of its token."""

    def __init__(self, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.stopwatch.mark()
        return scores


@dataclass(frozen=True)
class Generation:
    """One call of `generate`: how long it took, prefill included, and its new tokens `[B, new]` and cache.

    `step_milliseconds` are from each token to the next, without the first.
    """

    seconds: float
    step_milliseconds: Sequence[float]
    tokens: Tensor
    cache: Any


def generate(model: Any, prompt: Tensor, num_new: int, *, cache: Any = None) -> Generation:
    """Call `generate` on a prompt `[B, S]`, greedy, for exactly `num_new` tokens; `cache` is one to fill."""
    clock = _StepClock(model.device)
    given = {} if cache is None else {"past_key_values": cache}
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
    seconds = time.perf_counter() - began
    tokens = output.sequences[:, prompt.shape[1] :]
    return Generation(seconds, clock.stopwatch.gaps(), tokens, output.past_key_values)


def time_loop(model: Any, cache: Any, token: Tensor) -> float:
    """Median milliseconds of a step of a bare loop: forward pass, then the token of the largest logit.

    `cache` holds a prompt, `token` `[B, 1]` is each row's next one.
    """
    stopwatch = Stopwatch(model.device)
    for step in range(_LOOP_WARM_UP + _LOOP_STEPS):
        if step >= _LOOP_WARM_UP:
            stopwatch.mark()
        token = _next_token(model, cache, token)
    stopwatch.mark()
    return median(stopwatch.gaps())


def time_replay(model: Any, cache: Any, token: Tensor) -> float | None:
    """Median milliseconds of a decode step's own CUDA graph, replayed back to back; None on the CPU.

    The step is captured here, so that nothing of the runtime's own replay is measured. A replay appends its
    token as the step did: `cache` is of no use afterwards.
    """
    if model.device.type != "cuda":
        return None
    cache.use_graphs = False
    # The host does not know of replayed tokens, so room for them is made before.
    cache.reserve(cache.get_seq_length() + _LOOP_WARM_UP + _REPLAYS + 2)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_LOOP_WARM_UP):
            token = _next_token(model, cache, token)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _next_token(model, cache, token)
    stopwatch = Stopwatch(model.device)
    for _ in range(_REPLAYS):
        stopwatch.mark()
        graph.replay()
    stopwatch.mark()
    return median(stopwatch.gaps())


def _next_token(model: Any, cache: Any, token: Tensor) -> Tensor:
    logits: Tensor = model(token, past_key_values=cache, use_cache=True).logits
    return logits[:, -1:].argmax(-1)


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
    keys = {
        "step": "step_milliseconds",
        "loop_step": "loop_step_milliseconds",
        "generate": "generate_seconds",
    }
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
        rows.append(
            [
                label,
                number(side.get("step_milliseconds")),
                ratio(faster.get("step")),
                number(side.get("loop_step_milliseconds")),
                ratio(faster.get("loop_step")),
                number(side.get("replay_milliseconds")),
                number(side.get("tokens_per_second"), 0),
                ratio(faster.get("generate")),
            ]
        )
        if remark := _remark(side):
            notes.append(f"{label}: {remark}")
    columns = ["generate\nms/step", "loop\nms/step", "its graph\nms/step", "generate\ntokens/s"]
    heading = "leank\nfaster"
    report.table(
        f"batch {case['batch']}, prompt {case['prompt']}, {case['new']} new tokens",
        ["", columns[0], heading, columns[1], heading, *columns[2:], heading],
        rows,
        [*notes, *_LEGEND],
    )
