"""How a graph is captured: streams, pools, what a failure must not leave behind; CUDA calls are counted."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from runtime import capture_leank
from runtime.capture_leank import GraphMemory, StepGraph

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, number: int) -> None:
        self.device_index, self.cuda_stream = 0, number

    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def calls(monkeypatch):
    """Names of CUDA calls in order; the call that `calls.raises` names raises what it holds."""
    made: list[object] = []
    raises: dict[str, Exception] = {}

    def note(name: str):
        def call(*args: object, **kwargs: object) -> None:
            made.append(name)
            if name in raises:
                raise raises[name]

        return call

    class Graph:
        def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local" and not gc.isenabled()
            assert not torch.is_inference_mode_enabled()
            made.append(("begin", pool))

        capture_end, replay = note("end"), note("replay")

    handles = iter(range(100))
    generator = SimpleNamespace(clone_state=lambda: "clone", graphsafe_set_state=note("generator"))
    monkeypatch.setattr(capture_leank, "_CAPTURE_STREAMS", {})
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": lambda device: Stream(7),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device: Stream(0),
        "graph_pool_handle": lambda: next(handles),
        "default_generators": (generator,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, short in (("_cuda_endAllocateToPool", "pool ends"), ("_cuda_releasePool", "pool released")):
        monkeypatch.setattr(torch._C, name, note(short), raising=False)
    return SimpleNamespace(made=made, raises=raises)


def test_graphs_of_a_model_share_a_pool_that_the_latest_keeps_alive(calls):
    memory = GraphMemory()
    with torch.inference_mode():
        for _ in range(2):
            graph = StepGraph(DEVICE, memory)
            assert graph.capture(lambda: "output") == "output"
            graph.replay()
    StepGraph(DEVICE, GraphMemory()).capture(lambda: None)
    assert calls.made == [("begin", 0), "end", "replay", ("begin", 0), "end", "replay", ("begin", 1), "end"]
    assert gc.isenabled() and len(capture_leank._CAPTURE_STREAMS) == 1


@pytest.mark.parametrize("end", ["ends", "fails too"])
def test_a_function_that_raises_ends_the_capture(end, calls):
    if end == "fails too":
        calls.raises["end"] = RuntimeError("capture invalidated")
    else:
        calls.raises["pool ends"] = RuntimeError("not recording to that pool")
    memory = GraphMemory()

    def function() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        StepGraph(DEVICE, memory).capture(function)
    released = ["pool released"] if end == "fails too" else []
    assert calls.made == [("begin", 0), "end", "pool ends", *released, "generator"]
    assert gc.isenabled()
    calls.raises.clear()
    StepGraph(DEVICE, memory).capture(lambda: None)
    assert ("begin", 1) in calls.made


def test_an_end_that_fails_is_an_error(calls):
    calls.raises["end"] = RuntimeError("capture invalidated")
    with pytest.raises(RuntimeError, match="capture invalidated"):
        StepGraph(DEVICE, GraphMemory()).capture(lambda: None)
    assert calls.made[-3:] == ["pool ends", "pool released", "generator"]
