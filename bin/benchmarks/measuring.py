"""Timing: replays of a CUDA graph between two events; on the CPU the wall clock.

And what surrounds a measurement: the device, how fast its memory can be read, peers that fail.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bin.benchmarks.tables import REPLAYED, Report
from leank_convert.device import choose_device
from leank_convert.errors import LeanKError, first_line

Call = Callable[[], object]

# One replay lasts about this long or longer, so that what surrounds a graph is small beside what is in it.
_MIN_REPLAY_MS = 2.0
_MAX_CALLS = 512
# What one pass reads is at least this many times the L2 cache, so that nothing is read from there twice.
_TIMES_L2 = 8
_MAX_COPIES = 64
_READ_ROUNDS = 21
_READ_BYTES = {"cuda": 1 << 32, "cpu": 1 << 24}
# Memory that was given back seems to be cleared by the driver: a kernel that reads at 96% of an H100's
# bandwidth took 12 to 18% longer in the next 20 ms and more.
_CLEARING_SECONDS = 0.5


def choose_benchmark_device(device: str | None) -> torch.device:
    """The device to measure on: CUDA, unless the CPU is asked for by name."""
    if device is None and not torch.cuda.is_available():
        raise LeanKError(
            "there is no CUDA device to measure on",
            hint="run it on a machine with a GPU; `--device cpu` runs the command at toy sizes, as a test",
        )
    chosen = choose_device(device or "cuda")
    if chosen.type not in _READ_BYTES:
        raise LeanKError(f"benchmarks run on `cuda` and, as a test, on `cpu`, not on `{chosen.type}`")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen if chosen.index is not None else torch.cuda.current_device())
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give freed memory back to the device, so that the next subject finds what the last one found."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        time.sleep(_CLEARING_SECONDS)


def peak_bytes(device: torch.device, call: Call) -> tuple[int | None, int]:
    """Most bytes that were allocated during a call, None on the CPU, which counts nothing; those before."""
    if device.type != "cuda":
        call()
        return None, 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return torch.cuda.max_memory_allocated(device), before


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a peer, or tell `why` it failed, in any way: for want of memory, or of a backend."""
    try:
        with warnings.catch_warnings():  # torch warns of each backend that it cannot take
            warnings.simplefilter("ignore")
            return function(*arguments)
    except Exception as error:
        return {"why": first_line(error)}


@dataclass(frozen=True)
class Timing:
    """How long one call takes: a median over rounds of so many calls, and how it was measured.

    `spread` is half the distance between the quartiles, as a share of the median.
    """

    milliseconds: float
    spread: float
    rounds: int
    calls: int
    method: str


def summarize(samples: Sequence[float], calls: int, method: str) -> Timing:
    """Take the median of samples of `calls` calls each, in milliseconds."""
    low, median, high = np.percentile(samples, (25, 50, 75)).tolist()
    spread = (high - low) / 2 / median if median > 0 else 0.0
    return Timing(median / calls, spread, len(samples), calls, method)


def copies_needed(num_bytes: int, l2_bytes: int) -> int:
    """How many copies of an input have to take turns so that the L2 cache holds none of them."""
    return min(max(-(-_TIMES_L2 * l2_bytes // max(num_bytes, 1)), 1), _MAX_COPIES)


class Stopwatch:
    """Marks on one device's time line, read when all work is done: CUDA events, or the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note the moment that the device reaches this point, without waiting for it."""
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._marks[-1].record(torch.cuda.current_stream(self._device))
        else:
            self._marks.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Milliseconds between each mark and the next. Waits for the device."""
        synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) if self._device.type == "cuda" else (b - a) * 1e3 for a, b in pairs]


def time_calls(calls: Sequence[Call], device: torch.device, *, rounds: int) -> Timing:
    """Time calls that take turns, each over inputs of its own; their results are dropped.

    On CUDA all calls, as often as make 2 ms, are captured as one graph; each round replays it between two
    events. A call that cannot be captured is timed without a graph, and `Timing.method` says so.
    """

    def one_after_another() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return time_replays(None, one_after_another, device, rounds=rounds, calls=len(calls))
    with torch.cuda.device(device):
        once = statistics.median(_time_launches(one_after_another, device, 3))
        repeats = max(1, min(round(_MIN_REPLAY_MS / max(once, 1e-3)), _MAX_CALLS))

        def batch() -> None:
            for _ in range(repeats):
                one_after_another()

        graph = None
        with suppress(RuntimeError):
            graph = capture(one_after_another, batch)
        return time_replays(graph, batch, device, rounds=rounds, calls=repeats * len(calls))


def time_replays(graph: Any, call: Call, device: torch.device, *, rounds: int, calls: int = 1) -> Timing:
    """Time replays of what was captured, which has a `replay`; None: times the call that was not captured."""
    plain = "CUDA events, without a graph" if device.type == "cuda" else "wall clock"
    launch, method = (call, plain) if graph is None else (graph.replay, REPLAYED)
    return summarize(_time_launches(launch, device, rounds), calls, method)


def capture(warm_up: Call, batch: Call) -> torch.cuda.CUDAGraph:
    """Capture what `batch` launches on the current CUDA device, after `warm_up` ran on the same stream.

    RuntimeError if something of it cannot be captured.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    # A capture has memory of its own, and cannot free what lies cached for others.
    release_memory(torch.device("cuda"))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            batch()
    except RuntimeError:
        torch.cuda.synchronize()
        raise
    return graph


def _time_launches(launch: Call, device: torch.device, rounds: int) -> list[float]:
    """Milliseconds of each launch between events on the device, after one to warm up."""
    launch()
    synchronize(device)
    stopwatch = Stopwatch(device)
    stopwatch.mark()
    for _ in range(rounds):
        launch()
        stopwatch.mark()
    return stopwatch.gaps()


def measure_read_bandwidth(device: torch.device, report: Report) -> float:
    """Read one large buffer of random numbers; GB/s of the faster of two reductions.

    Reductions write next to nothing, so this is what a kernel that only reads can hope for, where a copy
    would pay for its writes.
    """
    numbers = torch.randn(_READ_BYTES[device.type] // 2, dtype=torch.bfloat16, device=device)
    ways: tuple[Call, ...] = (numbers.view(torch.int32).amax, numbers.view(torch.int64).amax)
    best = min(time_calls([way], device, rounds=_READ_ROUNDS).milliseconds for way in ways)
    bandwidth = numbers.nbytes / best / 1e6
    del numbers, ways
    release_memory(device)
    report.line(
        f"read bandwidth {bandwidth:,.1f} GB/s: the faster of two plain reductions by torch; what is above "
        "100% of it reads faster than they do"
    )
    return bandwidth
