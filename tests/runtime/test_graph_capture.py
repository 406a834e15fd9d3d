"""What may be captured, and how: streams, pools, what a failure must not leave; CUDA calls are counted."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from runtime import capture_leank, graph_leank
from runtime.capture_leank import GraphMemory, StepGraph
from runtime.model_state_leank import ModelState, why_step_is_eager

DEVICE = torch.device("cuda", 0)
WIDTHS = [[0, 3, 16], [4, 8, 8]]


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"inputs": {"output_hidden_states": True}}, "argument output_hidden_states"),
        ({"inputs": {"labels": torch.ones(2, 1)}}, "argument labels"),
        ({"inputs": {"logits_to_keep": torch.tensor([0])}}, "argument logits_to_keep"),
        ({"inputs": {"logits_to_keep": -1}}, "argument logits_to_keep"),
        ({"inputs": {"return_dict": False}}, "argument return_dict"),
        ({"inputs": {"position_ids": torch.ones(3, 2, 1, dtype=torch.long)}}, "argument position_ids"),
        ({"inputs": {"some_mask": torch.ones(1)}}, "argument some_mask"),
        ({"inputs": {"some_mask": None, "labels": None, "return_dict": True}}, None),
        ({"tokens": torch.ones(2, 1, dtype=torch.long, device="meta")}, "device meta has no graphs"),
        ({"config": {"output_hidden_states": True}}, "the config asks for another output"),
        ({"grad": True}, "gradients are enabled"),
        ({"autocast": True}, "autocast is on"),
    ],
    ids=str,
)
def test_which_steps_are_captured(change, reason, graphs, model_pair, some_masks):
    model = model_pair(some_masks(WIDTHS)).leank
    for name, value in change.get("config", {}).items():
        setattr(model.config, name, value)
    tokens = change.get("tokens", torch.full((2, 1), 5))
    inputs = {"input_ids": tokens, "inputs_embeds": None, "position_ids": None, "logits_to_keep": 0}
    inputs |= change.get("inputs", {})
    with (
        torch.set_grad_enabled(change.get("grad", False)),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=change.get("autocast", False)),
    ):
        assert why_step_is_eager(model, inputs, tokens) == reason


class Adapter(torch.nn.Linear):
    """A module that is not of the stock model."""


def test_which_models_are_captured(model_pair, some_masks):
    cpu = torch.device("cpu")
    masks = some_masks(WIDTHS)
    assert ModelState(model_pair(masks).leank, cpu).why_eager is None
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 2048}
    assert ModelState(model_pair(masks, rope_parameters=yarn).leank, cpu).why_eager is None
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    state = ModelState(model_pair(masks, rope_parameters=dynamic).leank, cpu)
    assert state.why_eager == "rotary embedding of type 'dynamic' changes with the length"
    model = model_pair(masks).leank
    model.model.layers[1].mlp.up_proj = Adapter(48, 40, bias=False)
    assert ModelState(model, cpu).why_eager == "module Adapter is not of the stock model"
    model = model_pair(masks).leank
    model.lm_head.forward = lambda states: states
    assert "module Linear has a forward of its own" in ModelState(model, cpu).why_eager
    model = model_pair(masks).leank
    model.lm_head.to("meta")
    assert ModelState(model, cpu).why_eager == "weights are not all on cpu"
    model = model_pair(masks).leank
    model.hf_quantizer = object()
    assert ModelState(model, cpu).why_eager == "the model is quantized"


def test_inputs_take_no_notice_of_torchs_default_device():
    inputs = graph_leank._Inputs("input_ids", torch.tensor([[7], [8]]), None, None)
    memory = inputs.buffers()
    with torch.device("meta"):
        memory.fill(inputs, 5)
    assert memory.tokens.tolist() == [[7], [8]] and memory.position_ids.tolist() == [[5]]
