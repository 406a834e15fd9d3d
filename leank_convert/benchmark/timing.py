"""Time as the device sees it: replays of a CUDA graph between two events; on the CPU the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# One replay lasts about this long or longer, so that what surrounds a graph is small beside what is in it.
_MIN_REPLAY_MS = 2.0
_MAX_CALLS = 512
# What one pass reads is at least this many times the L2 cache, so that nothing is read from there twice.
_TIMES_L2 = 8
_MAX_COPIES = 16


@dataclass(frozen=True)
class Timing:
    """How long one call takes.

    Attributes:
        milliseconds: Median over the rounds.
        spread: Half the distance between the quartiles, as a share of the median.
        rounds: Measurements.
        calls: Calls in each of them.
        method: How it was measured.
    """

    milliseconds: float
    spread: float
    rounds: int
    calls: int
    method: str


def summarize(samples: Sequence[float], calls: int, method: str) -> Timing:
    """Take the median of samples of `calls` calls each, in milliseconds."""
    ordered = sorted(samples)
    median = statistics.median(ordered)
    quarter = len(ordered) // 4
    distance = ordered[len(ordered) - 1 - quarter] - ordered[quarter]
    spread = distance / 2 / median if median > 0 else 0.0
    return Timing(median / calls, spread, len(ordered), calls, method)


def copies_needed(num_bytes: int, device: torch.device) -> int:
    """How many copies of an input of `num_bytes` have to take turns so that L2 holds none of them."""
    if device.type != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(-(-_TIMES_L2 * l2 // max(num_bytes, 1)), 1), _MAX_COPIES)


def outgrow_l2(num_bytes: int, copies: int, device: torch.device) -> bool:
    """Whether that many copies of an input are as many as `copies_needed` would have, had it no bound."""
    if device.type != "cuda":
        return True
    return copies * num_bytes >= _TIMES_L2 * torch.cuda.get_device_properties(device).L2_cache_size


def time_calls(calls: Sequence[Call], device: torch.device, *, rounds: int) -> Timing:
    """Time calls that take turns, each over inputs of its own.

    On CUDA all calls, as often as make 2 ms, are captured as one graph; each round replays it between two
    events. A call that cannot be captured is timed without a graph, and `Timing.method` says so.

    Args:
        calls: What to time; their results are dropped.
        device: Where they run.
        rounds: How many measurements to take the median of.
    """
    if device.type != "cuda":
        return _time_on_cpu(calls, rounds)
    with torch.cuda.device(device):
        once = _time_eagerly(calls, 3)
        repeats = max(1, min(round(_MIN_REPLAY_MS / max(once.milliseconds * len(calls), 1e-3)), _MAX_CALLS))
        batch = list(calls) * repeats
        graph = _capture(calls, batch)
        if graph is None:
            return _time_eagerly(batch, rounds)
        graph.replay()
        samples = _time_launches(graph.replay, rounds)
        return summarize(samples, len(batch), "CUDA graph replay")


def time_whole(call: Call, device: torch.device, *, rounds: int) -> Timing:
    """Time a call that is long beside its launch by the wall clock, the device waited for at both ends.

    The caller runs it once before, to warm up.
    """
    samples = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        samples.append((time.perf_counter() - began) * 1e3)
    return summarize(samples, 1, "wall clock")


def _time_on_cpu(calls: Sequence[Call], rounds: int) -> Timing:
    samples = []
    for index in range(rounds + 1):
        began = time.perf_counter()
        for call in calls:
            call()
        if index:  # the first one warms up
            samples.append((time.perf_counter() - began) * 1e3)
    return summarize(samples, len(calls), "wall clock")


def _capture(calls: Sequence[Call], batch: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for call in batch:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _time_eagerly(batch: Sequence[Call], rounds: int) -> Timing:
    def launch() -> None:
        for call in batch:
            call()

    launch()
    return summarize(_time_launches(launch, rounds), len(batch), "CUDA events, without a graph")


def _time_launches(launch: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds between an event before and one after each launch."""
    events = [(_event(), _event()) for _ in range(rounds)]
    torch.cuda.synchronize()
    for before, after in events:
        before.record()
        launch()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stopwatch:
    """Marks on one device's time line, read when all work is done: CUDA events, or the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def mark(self) -> None:
        """Note the moment that the device reaches this point, without waiting for it."""
        if self._device.type == "cuda":
            event = _event()
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Milliseconds between each mark and the next. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:], strict=False)]
        return [(b - a) * 1e3 for a, b in zip(self._seconds, self._seconds[1:], strict=False)]


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
