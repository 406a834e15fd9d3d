"""`benchmark train`: what a training step costs beside its own prefill and beside full sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from leank_convert.benchmark.accuracy import relative_error
from leank_convert.benchmark.environment import (
    choose_benchmark_device,
    describe_environment,
    memory_told,
    release_memory,
    require_cuda,
)
from leank_convert.benchmark.failures import silenced, tell_reason
from leank_convert.benchmark.geometries import Geometry
from leank_convert.benchmark.report import Report, build_document
from leank_convert.benchmark.timing import Timing, synchronize, time_whole
from leank_convert.benchmark.training_check import check_step
from leank_convert.benchmark.training_peer import DEFAULT, FullSequence, name_backends, prefill, sdpa_backend
from leank_convert.benchmark.training_scale import measure_scale
from leank_convert.benchmark.training_sizes import PARTS, Sizes
from leank_convert.benchmark.training_step import (
    Distil,
    OptimizerStep,
    build_trainee,
    draw_sample,
    stratified_lengths,
)
from leank_convert.benchmark.training_tables import (
    print_check,
    print_memory,
    print_peer,
    print_scale,
    print_schedule,
    print_step,
)
from leank_convert.data import TrainingSample
from leank_convert.train.passes import run_context_pass
from leank_convert.train.ranks import Ranks, join_ranks
from leank_convert.train.step import distil
from leank_convert.windows import Windows

# The paper's, over both stages.
SCHEDULE_STEPS = 2200
# Beside weights, keys and values.
_MEMORY_MARGIN = 0.15
# A step over full sequences takes long, and its times lie close together.
_MOST_PEER_ROUNDS = 2


def benchmark_training(
    geometry: Geometry, sizes: Sizes, *, device: str | None, dtype: torch.dtype
) -> dict[str, Any] | None:
    """Measure and print tables; in one of several processes, how they scale and nothing else.

    Args:
        geometry: The model's shape.
        sizes: What is measured.
        device: Where; None for CUDA.
        dtype: Of the weights.

    Returns:
        The JSON document; None in all processes but the first. If our step's loss or gradient is not right,
        `ok` is false and there are no figures.

    Raises:
        LeanKError: If a length leaves nothing to prune, there is no such device, or something of ours does
            not fit on it.
    """
    sizes.check(geometry.windows)
    require_cuda(device)
    with join_ranks(device) as ranks, memory_told():
        chosen = choose_benchmark_device(str(ranks.device))
        report = Report(quiet=not ranks.is_first)
        environment = describe_environment(chosen)
        subject = {**geometry.describe(), **geometry.windows}
        report.header(environment, subject)
        windows = Windows(geometry.windows["sink_size"], geometry.windows["recent_size"])
        torch.manual_seed(0)
        checks = check_step(
            geometry,
            windows,
            sizes.question,
            length=sizes.length,
            num_questions=sizes.num_questions,
            device=chosen,
            dtype=dtype,
        )
        release_memory(chosen)
        print_check(report, checks)
        results: dict[str, Any] = {}
        ok = not ranks.any(not checks.ok)
        if ok:
            bench = _Bench(geometry, windows, sizes, ranks, chosen, dtype)
            parts = PARTS if ranks.num_ranks == 1 else ("scale",)
            for part in parts:
                if part not in sizes.skip:
                    measure, show = _MEASURED[part]
                    results[part] = measure(bench)
                    show(report, results[part])
                    release_memory(chosen)
    if not ranks.is_first:
        return None
    return build_document(
        "train",
        environment,
        subject,
        ok=ok,
        dtype=str(dtype).removeprefix("torch."),
        question_tokens=sizes.question.question,
        answer_tokens=sizes.question.answer,
        check=checks.to_dict(),
        **results,
    )


class _Bench:
    """One model, trained by our step, and full sequences on the same tensors."""

    def __init__(
        self,
        geometry: Geometry,
        windows: Windows,
        sizes: Sizes,
        ranks: Ranks,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.sizes, self.device = sizes, device
        self._ranks = ranks
        self._facts, self._windows = geometry.facts, windows
        self._shortest = sizes.shortest_of(geometry.windows)
        self._model = build_trainee(geometry, device, dtype)
        self._peer = FullSequence(self._model, geometry)
        self._ours = lambda sample, student: distil(self._model, sample, student)

    def measure_step(self) -> dict[str, Any]:
        """Seconds of prefills and of steps with one and with several questions, at one length."""
        length = self.sizes.length
        # What several questions share, the shortest context of all: no step is flattered by its prefill.
        prefix = self._draw(length, max(self.sizes.num_questions, 2)).prefix_ids
        own = self._time(lambda: run_context_pass(self._model, prefix), self.sizes.rounds)
        stock = {
            name: self._time_prefill(name, prefix[None].to(self.device))
            for name in name_backends(self.device)
        }
        timed = {name: found["seconds"] for name, found in stock.items() if "seconds" in found}
        best = min(timed, key=timed.__getitem__) if timed else None
        steps = []
        for num_questions in self.sizes.counts:
            step, sample = self._step(self._ours), self._draw(length, num_questions)
            found = self._time(lambda step=step, sample=sample: step.run(sample), self.sizes.rounds)  # type: ignore[misc]
            steps.append(
                {
                    "questions": num_questions,
                    **found,
                    "ratio_to_own_prefill": found["seconds"] / own["seconds"],
                    "ratio_to_stock_prefill": None if best is None else found["seconds"] / timed[best],
                }
            )
        return {
            "length": length,
            "context": len(prefix),
            "prefill": own,
            "stock_prefills": stock,
            "best_stock_prefill": best,
            "steps": steps,
        }

    def measure_peer(self) -> list[dict[str, Any]]:
        """Steps over full sequences beside ours; a length that does not fit is halved until it does."""
        cases: dict[int, dict[str, Any]] = {}
        backends = name_backends(self.device)
        for asked in sorted(set(self.sizes.peer_lengths)):
            length = asked
            while length not in cases and length >= self._shortest:
                cases[length] = self._compare(length, backends)
                # The faster way of the shortest length runs the longer ones.
                backends = (cases[length].get("backend", DEFAULT),)
                if not cases[length]["out_of_memory"]:
                    break
                length //= 2
        return [cases[length] for length in sorted(cases)]

    def measure_memory(self) -> dict[str, Any]:
        """Most bytes that a step holds, against weights and one cache; null on the CPU."""
        length = self.sizes.memory_length
        weights = sum(weight.numel() * weight.element_size() for weight in self._model.parameters())
        cached = 2 * self._facts.num_hidden_layers * self._facts.num_key_value_heads * self._facts.head_dim
        cache = cached * self._model.dtype.itemsize * length
        steps = []
        for num_questions in self.sizes.counts:
            step, sample = self._step(self._ours), self._draw(length, num_questions)
            release_memory(self.device)
            peak = reserved = None
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            step.run(sample)
            if self.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.device)
                reserved = torch.cuda.max_memory_reserved(self.device)
            steps.append(
                {
                    "questions": num_questions,
                    "peak_bytes": peak,
                    "reserved_bytes": reserved,
                    "ratio": None if peak is None else peak / (weights + cache),
                }
            )
        return {
            "length": length,
            "weight_bytes": weights,
            "cache_bytes": cache,
            "limit_ratio": 1 + _MEMORY_MARGIN,
            "steps": steps,
        }

    def measure_schedule(self) -> list[dict[str, Any]]:
        """Steps over the schedule's range of lengths, and what the whole schedule takes by their mean."""
        found = []
        for num_questions in self.sizes.counts:
            count = self.sizes.schedule_steps
            if num_questions > 1:
                count = -(-count // 2)
            lengths = stratified_lengths(*self.sizes.lengths, count)
            step = self._step(self._ours)
            step.run(self._draw(self.sizes.lengths[0], num_questions))  # warms up
            seconds, tokens = [], 0
            for seed, length in enumerate(lengths, start=1):
                sample = self._draw(length, num_questions, seed)
                tokens += sample.num_tokens
                synchronize(self.device)
                began = time.perf_counter()
                step.run(sample)
                synchronize(self.device)
                seconds.append(time.perf_counter() - began)
            mean = sum(seconds) / count
            # The same number of answers, at that many fewer prefills.
            num_steps = -(-SCHEDULE_STEPS // num_questions)
            found.append(
                {
                    "questions": num_questions,
                    "range": list(self.sizes.lengths),
                    "lengths": lengths,
                    "seconds": seconds,
                    "mean_seconds": mean,
                    "tokens_per_second": tokens / sum(seconds),
                    "schedule_steps": num_steps,
                    "schedule_seconds": num_steps * mean,
                }
            )
        return found

    def measure_scale(self) -> dict[str, Any]:
        """Samples a second of all processes against those of one."""
        sample = self._draw(self.sizes.length, 1, seed=self._ranks.rank)
        return measure_scale(
            lambda ranks: self._step(self._ours, ranks), sample, self._ranks, self.sizes.rounds
        )

    def _compare(self, length: int, backends: Sequence[str]) -> dict[str, Any]:
        """Our step and full sequences at one length, from the same factors."""
        rounds = min(self.sizes.rounds, _MOST_PEER_ROUNDS)
        sample = self._draw(length, 1)
        step = self._step(self._ours)
        step.run(sample)
        gradient = step.gradient.clone()
        ours = _describe(time_whole(lambda: step.run(sample), self.device, rounds=rounds))
        tried: dict[str, dict[str, Any]] = {}
        out_of_memory = False
        for name in backends:
            release_memory(self.device)
            try:
                with silenced(), sdpa_backend(name):
                    peer = self._step(self._peer.distil)
                    peer.run(sample)
                    # One seed's gradient and another's are 1.4 apart.
                    distance = relative_error(gradient, peer.gradient)
                    timing = time_whole(lambda peer=peer: peer.run(sample), self.device, rounds=rounds)  # type: ignore[misc]
                tried[name] = {**_describe(timing), "gradient_distance": distance}
            # A peer may fail in any way.
            except Exception as error:
                out_of_memory |= isinstance(error, torch.OutOfMemoryError)
                tried[name] = {"why": tell_reason(error)}
        release_memory(self.device)
        timed = {name: found["seconds"] for name, found in tried.items() if "seconds" in found}
        case = {"length": length, "ours": ours, "full_sequence": tried}
        if not timed:
            return {**case, "out_of_memory": out_of_memory, "ratio": None}
        best = min(timed, key=timed.__getitem__)
        return {**case, "out_of_memory": False, "backend": best, "ratio": timed[best] / ours["seconds"]}

    def _time_prefill(self, backend: str, input_ids: torch.Tensor) -> dict[str, Any]:
        try:
            with silenced(), sdpa_backend(backend):
                return self._time(lambda: prefill(self._peer.teacher, input_ids), self.sizes.rounds)
        except Exception as error:
            return {"why": tell_reason(error)}
        finally:
            release_memory(self.device)

    def _time(self, call: Callable[[], object], rounds: int) -> dict[str, Any]:
        call()  # warms up
        return _describe(time_whole(call, self.device, rounds=rounds))

    def _step(self, distilled: Distil, ranks: Ranks | None = None) -> OptimizerStep:
        return OptimizerStep(distilled, self._facts, self._windows, self.device, ranks)

    def _draw(self, length: int, num_questions: int, seed: int = 0) -> TrainingSample:
        return draw_sample(self._model, length, num_questions, self.sizes.question, seed)


_MEASURED: dict[str, tuple[Callable[[_Bench], Any], Callable[[Report, Any], None]]] = {
    "step": (_Bench.measure_step, print_step),
    "peer": (_Bench.measure_peer, print_peer),
    "memory": (_Bench.measure_memory, print_memory),
    "schedule": (_Bench.measure_schedule, print_schedule),
    "scale": (_Bench.measure_scale, print_scale),
}


def _describe(timing: Timing) -> dict[str, Any]:
    return {"seconds": timing.milliseconds / 1e3, "spread": timing.spread, "rounds": timing.rounds}
