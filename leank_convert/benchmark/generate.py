"""`benchmark generate`: a decode step and whole calls of `generate`, beside the dense model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from leank_convert.benchmark.decoding import Generation, generate, time_limit, time_loop, time_replay
from leank_convert.benchmark.environment import describe_environment, memory_told, release_memory
from leank_convert.benchmark.failures import silenced, tell_reason
from leank_convert.benchmark.models import build_dense, check_model, random_prompt
from leank_convert.benchmark.report import Report, build_document, number, ratio
from leank_convert.benchmark.subject import COMPILED, Subject, load_runtime
from leank_convert.errors import LeanKError

OURS, DYNAMIC, STATIC = "leank", "dense-dynamic", "dense-static"
PEERS = (DYNAMIC, STATIC)
_LOOP_STEPS = 32
# A warm-up needs no long prompt, but more than one of each kind of step.
_WARM_UP_PROMPT = 64
_WARM_UP_TOKENS = 8
_LEGEND = (
    "generate ms/step: from token to token of a call, with all that `generate` does between them",
    "loop: forward pass and argmax alone, without a mask or a wait for the device, after that call",
    "its graph: the loop's step, captured and replayed; tokens/s: whole calls, prefill included",
)


def benchmark_generate(
    subject: Subject,
    cases: Sequence[tuple[int, int, int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    peers: Sequence[str],
    rounds: int,
    static_limit: float,
) -> dict[str, Any]:
    """Measure and print tables.

    Args:
        subject: Mask and shape.
        cases: Batch, prompt tokens and new tokens of each case.
        device: Where.
        dtype: Of weights and cache.
        peers: Among `PEERS`.
        rounds: Timed calls of `generate` for each side and case.
        static_limit: Seconds after which compiling the static cache's step is given up.

    Returns:
        The JSON document. If decoding is not right, `ok` is false and there are no cases.
    """
    if any(num_new < 2 for _, _, num_new in cases):
        raise LeanKError(
            "one new token comes from the prompt alone, without a decode step",
            hint="ask for at least 2 new tokens, such as `--case 64x4kx128`",
        )
    report = Report()
    environment = describe_environment(device)
    report.header(environment, subject.describe())
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder, torch.no_grad(), memory_told():
        torch.manual_seed(0)
        runtime = load_runtime(subject, folder, dtype)
        model = runtime.build_model(subject.channel_masks, device, dtype)
        check = check_model(model, subject, prompt_length=max(prompt for _, prompt, _ in cases))
        attention = runtime.name_attention(device, dtype)
        report.line(f"our decode attention: {attention}")
        report.line(check.describe())
        if check.ok:
            dense = build_dense(model, subject.geometry)
            for case in cases:
                results.append(
                    _Case(model, dense, *case, rounds=rounds, static_limit=static_limit).run(peers)
                )
                _print_case(report, results[-1], attention)
    return build_document(
        "generate",
        environment,
        subject.describe(),
        ok=check.ok,
        dtype=str(dtype).removeprefix("torch."),
        kernel=attention,
        check=check.to_dict(),
        cases=results,
    )


class _Case:
    """One batch and prompt length, on one model and its dense twin."""

    def __init__(
        self,
        model: Any,
        dense: Any,
        batch_size: int,
        num_prompt: int,
        num_new: int,
        *,
        rounds: int,
        static_limit: float,
    ) -> None:
        self.model, self.dense = model, dense
        self.num_new, self.rounds, self.static_limit = num_new, rounds, static_limit
        self.prompt = random_prompt(model, batch_size, num_prompt)

    def run(self, peers: Sequence[str]) -> dict[str, Any]:
        """Measure ours and the peers; a peer that fails has no figures and says why."""
        runners: dict[str, Callable[[], dict[str, Any]]] = {DYNAMIC: self._dynamic, STATIC: self._static}
        batch_size, num_prompt = self.prompt.shape
        sides = {OURS: self._ours()}
        for name in peers:
            release_memory(self.model.device)
            try:
                with silenced():
                    sides[name] = runners[name]()
            # A peer may fail in any way: its compiler, its memory, the time limit.
            except Exception as error:
                sides[name] = {"why": tell_reason(error)}
        release_memory(self.model.device)
        return {
            "batch": batch_size,
            "prompt": num_prompt,
            "new": self.num_new,
            "sides": sides,
            "ratios": {name: _ratios(sides[OURS], sides[name]) for name in peers},
        }

    def _ours(self) -> dict[str, Any]:
        self._warm_up(self.model)
        figures, last = self._time_generate(lambda: generate(self.model, self.prompt, self.num_new))
        cache, token = last.cache, last.tokens[:, -1:]
        graph = {
            "captures": cache.graph.num_captures,
            "replays": cache.graph.num_replays,
            "why_eager": cache.graph.why_eager,
        }
        loop = time_loop(self.model, cache, token, _LOOP_STEPS)
        replay = time_replay(self.model, cache, token)
        return {
            **figures,
            "loop_step_milliseconds": loop,
            "replay_milliseconds": replay,
            "step_over_replay": None if replay is None else loop / replay,
            "graph": graph,
        }

    def _dynamic(self) -> dict[str, Any]:
        self._warm_up(self.dense)
        figures, last = self._time_generate(lambda: generate(self.dense, self.prompt, self.num_new))
        loop = time_loop(self.dense, last.cache, last.tokens[:, -1:], _LOOP_STEPS)
        return {**figures, "loop_step_milliseconds": loop}

    def _static(self) -> dict[str, Any]:
        """One static cache for all calls, so that its compiled step is compiled and captured once."""
        from transformers import StaticCache

        length = self.prompt.shape[1] + self.num_new
        cache = StaticCache(config=self.dense.config, max_cache_len=length)

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
        num_graphs = stats["unique_graphs"] - before
        return {**figures, "warm_up_seconds": warm_up, "compiled_graphs": num_graphs}

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
        num_tokens = self.prompt.shape[0] * self.num_new
        return {
            "rounds": self.rounds,
            "step_milliseconds": median(steps),
            "generate_seconds": median(seconds),
            "tokens_per_second": num_tokens / median(seconds),
        }, last


def _ratios(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, float | None]:
    """How many times as fast ours is, by each way of measuring."""

    def faster(key: str) -> float | None:
        theirs = peer.get(key)
        return None if theirs is None else theirs / ours[key]

    return {
        "step": faster("step_milliseconds"),
        "loop_step": faster("loop_step_milliseconds"),
        "generate": faster("generate_seconds"),
    }


def _remark(side: dict[str, Any]) -> str | None:
    if "why" in side:
        return f"no figures: {side['why']}"
    if "compiled_graphs" in side:
        # Its mask keeps `enable_gqa` out of transformers' call of SDPA.
        compiled = (
            f"compiled in {side['warm_up_seconds']:.0f} s" if side["compiled_graphs"] else "not compiled"
        )
        return f"step {compiled}; its mask has K and V repeated for every query head"
    graph = side.get("graph")
    if graph is None:
        return None
    return (
        f"not replayed: {graph['why_eager']}" if graph["why_eager"] else f"{graph['replays']} steps replayed"
    )


def _print_case(report: Report, case: dict[str, Any], attention: str) -> None:
    rows, notes = [], []
    for name, side in case["sides"].items():
        vs = case["ratios"].get(name, {})
        label = f"{name} ({attention})" if name == OURS and attention != COMPILED else name
        rows.append(
            [
                label,
                number(side.get("step_milliseconds")),
                ratio(vs.get("step")),
                number(side.get("loop_step_milliseconds")),
                ratio(vs.get("loop_step")),
                number(side.get("replay_milliseconds")),
                number(side.get("tokens_per_second"), 0),
                ratio(vs.get("generate")),
            ]
        )
        remark = _remark(side)
        if remark:
            notes.append(f"{label}: {remark}")
    faster = "leank\nfaster"
    report.table(
        f"batch {case['batch']}, prompt {case['prompt']}, {case['new']} new tokens",
        [
            "",
            "generate\nms/step",
            faster,
            "loop\nms/step",
            faster,
            "its graph\nms/step",
            "generate\ntokens/s",
            faster,
        ],
        rows,
        [*notes, *_LEGEND],
    )
