"""CUDA graphs of decode steps: what may be captured, and how it is recorded and launched again."""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

# One per device and stream that models run on: cuBLAS keeps a workspace per stream.
_CAPTURE_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}

# Whose modules compute the same in every step; `kernels` marks what of transformers it could replace.
_STOCK_PACKAGES = ("torch", "transformers", "kernels")

# Arguments of a forward pass that may be there, and what they may be for a step to be captured.
_PLAIN_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    "input_ids": lambda value: value is None or value.ndim == 2,
    "inputs_embeds": lambda value: value is None or value.ndim == 3,
    "position_ids": lambda value: value is None or (value.ndim == 2 and not value.is_floating_point()),
    "logits_to_keep": lambda value: isinstance(value, int) and value in (0, 1),
    "return_dict": lambda value: value in (None, True),
    "output_hidden_states": lambda value: value in (None, False),
}


class GraphMemory:
    """Device memory that the graphs of a model share, per device and stream.

    A graph's intermediate results live in a pool that only graphs use. A pool dies with its last graph, and
    its memory comes back late; so the latest graph is kept here, and the next one takes over its pool.

    Attributes:
        captured_kinds: Kinds of step that were captured before: another cache's first one needs no warm-up.
    """

    def __init__(self) -> None:
        self.captured_kinds: set[tuple[Any, ...]] = set()
        self._pools: dict[tuple[int, int], tuple[Any, Any]] = {}

    def __reduce__(self) -> tuple[type[GraphMemory], tuple[()]]:
        """Copy as an empty one: graphs and their memory cannot be copied."""
        return GraphMemory, ()

    def pool(self, key: tuple[int, int]) -> Any:
        """Return the pool to capture into."""
        if key not in self._pools:
            return torch.cuda.graph_pool_handle()
        return self._pools[key][0]

    def keep(self, key: tuple[int, int], pool: Any, graph: Any) -> None:
        """Keep a pool alive by the latest graph captured into it."""
        self._pools[key] = (pool, graph)

    def forget(self, key: tuple[int, int]) -> None:
        """Leave a pool to its graphs: after a capture that broke off, the allocator refuses it to another."""
        self._pools.pop(key, None)


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
        key = (caller.device_index, caller.cuda_stream)
        if key not in _CAPTURE_STREAMS:
            _CAPTURE_STREAMS[key] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream, pool = _CAPTURE_STREAMS[key], self._memory.pool(key)
        stream.wait_stream(caller)
        try:
            with _no_garbage_collection(), torch.cuda.stream(stream):
                # The generator's state is created here and must be writable outside inference mode as well.
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
            self._memory.forget(key)
            raise
        caller.wait_stream(stream)
        self._memory.keep(key, pool, self._graph)
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


class ModelState:
    """What a captured step presumes of a model: its modules, and where its weights lie.

    Attributes:
        why_eager: Why its steps cannot be captured; None if they can.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        modules = list(model.modules())
        self._model = model  # so that no other model takes its id while this counts
        self._members = [
            members
            for module in modules
            for members in (module._modules, module._parameters, module._buffers)
            if members
        ]
        self._values = list(chain.from_iterable(members.values() for members in self._members))
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        # Subclasses may have no address; they are refused below.
        self._tensors = [tensor for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter)]
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]
        self._hooks = [
            hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._attributes = [vars(module) for module in modules[1:]]
        self.why_eager = _why_model_is_eager(modules, tensors, device)
        if self.why_eager is None and any(self._hooks):
            self.why_eager = "a module has forward hooks"

    def holds(self) -> bool:
        """Return whether modules, what they run, weights and their addresses are what they were."""
        values = list(chain.from_iterable(members.values() for members in self._members))
        return (
            len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and [tensor.data_ptr() for tensor in self._tensors] == self._pointers
            and not any(self._hooks)
            and not any("forward" in attributes for attributes in self._attributes)
        )


def _why_model_is_eager(
    modules: list[nn.Module], tensors: list[torch.Tensor], device: torch.device
) -> str | None:
    """Return why a model's steps cannot be captured, from what does not change between steps."""
    root = modules[0]
    if getattr(root, "hf_quantizer", None) is not None:
        return "the model is quantized"
    for module in modules[1:]:
        if type(module).__module__.split(".")[0] not in _STOCK_PACKAGES:
            # An adapter's module may switch in Python what it computes.
            return f"module {type(module).__name__} is not of the stock model"
        if "forward" in vars(module):
            return f"module {type(module).__name__} has a forward of its own, as accelerate's hooks give it"
        rope_type = getattr(module, "rope_type", "default")
        if "dynamic" in rope_type or rope_type == "longrope":
            return f"rotary embedding of type {rope_type!r} changes with the length"
    if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors):
        return "weights are a tensor subclass"
    if any(tensor.device != device for tensor in tensors):
        return f"weights are not all on {device}"
    return None


def why_step_is_eager(model: Any, inputs: dict[str, Any], tokens: torch.Tensor) -> str | None:
    """Return why a decode step cannot be captured, from what may change with every step.

    Args:
        model: The model.
        inputs: Arguments of its forward pass, without cache and attention mask.
        tokens: Those of them that the step runs on, ids `[B, 1]` or embeddings `[B, 1, hidden]`.
    """
    if tokens.device.type != StepGraph.device_type:
        return f"device {tokens.device} has no graphs"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(tokens.device.type):
        return "autocast is on"
    config = model.config
    if getattr(config, "output_hidden_states", False) or not getattr(config, "return_dict", True):
        return "the config asks for another output"
    for name, value in inputs.items():
        is_plain = _PLAIN_ARGUMENTS.get(name)
        if value is not None if is_plain is None else not is_plain(value):
            return f"argument {name}"
    position_ids = inputs["position_ids"]
    if position_ids is not None and position_ids.device != tokens.device:
        return "position_ids are on another device"
    if StepGraph.is_capturing():
        return "the stream is being captured by the caller"
    return None
