"""CUDA graph recording: a graph captured without running, in memory shared by a model's graphs."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# One per device and stream that models run on: cuBLAS keeps a workspace per stream.
_CAPTURE_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}
_CAPTURING = threading.Lock()  # threads share streams, and would break each other's captures


class GraphMemory:
    """Device memory that the graphs of a model share, per device and stream.

    A graph's intermediate results live in a pool that only graphs use. A pool dies with its last graph, and
    its memory comes back late; so the latest graph is kept here, and the next one takes over its pool.

    Attributes:
        captured_kinds: Kinds of step that were captured before: another cache's first one needs no warm-up.
        pools: The pool of each device and stream, and the latest graph that was captured into it.
    """

    def __init__(self) -> None:
        self.captured_kinds: set[tuple[Any, ...]] = set()
        self.pools: dict[tuple[int, int], tuple[Any, Any]] = {}

    def __reduce__(self) -> tuple[type[GraphMemory], tuple[()]]:
        """Copy as an empty one: graphs and their memory cannot be copied."""
        return GraphMemory, ()


class StepGraph:
    """What a function launches on a CUDA device, to be launched again at once.

    Args:
        device: The device.
        memory: Where its intermediate results go.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device, memory: GraphMemory) -> None:
        self._device = device
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def is_capturing() -> bool:
        """Return whether somebody is capturing on the current stream already."""
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def stream_of(device: torch.device) -> int:
        """Return a number for the stream that the device's work goes to."""
        return torch.cuda.current_stream(device).cuda_stream

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record what `function` launches, without running it; return what it returned."""
        caller = torch.cuda.current_stream(self._device)
        key, pools = (caller.device_index, caller.cuda_stream), self._memory.pools
        with _CAPTURING:
            if key not in _CAPTURE_STREAMS:
                _CAPTURE_STREAMS[key] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream = _CAPTURE_STREAMS[key]
            pool = pools[key][0] if key in pools else torch.cuda.graph_pool_handle()
            stream.wait_stream(caller)
            try:
                with _no_garbage_collection(), torch.cuda.stream(stream):
                    # The generator's state is created here and must be writable outside inference mode, too.
                    with torch.inference_mode(False):
                        # Not torch.cuda.graph: it empties the allocator's cache.
                        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    try:
                        output = function()
                    except BaseException:
                        with contextlib.suppress(RuntimeError):
                            self._graph.capture_end()
                        raise
                    self._graph.capture_end()
            except BaseException:
                self._leave_capture(pool)
                pools.pop(key, None)  # which the allocator refuses to another graph now
                raise
            caller.wait_stream(stream)
            pools[key] = pool, self._graph
            return output

    def replay(self) -> None:
        """Launch what was recorded."""
        self._graph.replay()

    def _leave_capture(self, pool: Any) -> None:
        """Tell allocator and random generator that a capture is over which broke off before it said so."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        # An error here means that there is nothing left to do.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        with contextlib.suppress(RuntimeError):
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python from destroying CUDA objects by the way: not everything is allowed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
