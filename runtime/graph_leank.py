"""CUDA graph of a decode step: captured once from the model's forward pass, replayed per token.

A decode step of a large model is a thousand short kernels, and the host needs longer to launch them than the
device to run them. A step always does the same to the same memory (lengths live on the device, the cache is
updated in place), so it is captured once and launched as a whole after that. A model's first step of a kind
runs as it is, which loads and compiles what there is to load; the next one is captured. Where a later step
differs from what was captured, it is captured anew, after such a step of its own if its kind is new to the
model.

Where fused_step_leank knows the model, its forward pass takes the place of the stock one, with fewer kernels.
Steps of several columns, drafts to be verified, have a graph for each of `_COLUMNS`: one of another number
runs as the next of these, padded on the right. Drafts differ in length from step to step.

    DecodeGraph    of a cache: which steps are captured, replayed, captured anew, run as they are
    StepGraph      the graph itself, in memory that a model's graphs share (`GraphMemory`)
    ModelState     what a captured step presumes of the model
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging

from .decode_kernels_leank import MAX_DRAFT
from .fused_step_leank import fuse_weights, fused_forward

if TYPE_CHECKING:
    from .cache_leank import LeanKCache

logger = logging.get_logger(__name__)

_FIRST_OF_ITS_KIND = "the first step of its kind"

# Columns of the steps that are captured; kernels are compiled for such numbers too.
_COLUMNS = (1, 2, 4, 8, 16, MAX_DRAFT)

# One per device and stream that models run on: cuBLAS keeps a workspace per stream.
_CAPTURE_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}

# Whose modules compute the same in every step; `kernels` marks what of transformers it could replace.
_STOCK_PACKAGES = ("torch", "transformers", "kernels")

# Arguments of a forward pass that may be there, and what they may be for a step to be captured.
_PLAIN_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    "input_ids": lambda value: value is None or value.ndim == 2,
    "inputs_embeds": lambda value: value is None or value.ndim == 3,
    "position_ids": lambda value: value is None or (value.ndim == 2 and not value.is_floating_point()),
    "logits_to_keep": lambda value: isinstance(value, int) and value >= 0,
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

    Args:
        model: The model.
        device: Where its weights should lie.
        fuse: Called where its steps can be captured: lays weights side by side, and returns whether
            `fused_forward` serves it now.

    Attributes:
        why_eager: Why its steps cannot be captured; None if they can.
        is_fused: Whether they run as `fused_forward`.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, fuse: Callable[[], bool] | None = None
    ) -> None:
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
        self._hooks = [
            hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._attributes = [vars(module) for module in modules[1:]]
        self.why_eager = _why_model_is_eager(modules, tensors, device)
        self._intercepted = self._is_intercepted()
        if self.why_eager is None and any(self._hooks):
            self.why_eager = "a module has forward hooks"
        self.is_fused = self.why_eager is None and fuse is not None and fuse()
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]

    def holds(self) -> bool:
        """Return whether modules, what they run, weights and their addresses are what they were."""
        values = list(chain.from_iterable(members.values() for members in self._members))
        return (
            len(values) == len(self._values)
            and all(map(operator.is_, values, self._values))
            and [tensor.data_ptr() for tensor in self._tensors] == self._pointers
            and self._is_intercepted() == self._intercepted
        )

    def _is_intercepted(self) -> tuple[bool, bool]:
        """Return whether modules have hooks, and whether some have a forward pass of their own."""
        return any(self._hooks), any("forward" in attributes for attributes in self._attributes)


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
        # Where kinds of layers have rotary embeddings of their own, one of each.
        rope_type = getattr(module, "rope_type", "default")
        for kind in rope_type.values() if isinstance(rope_type, dict) else (rope_type,):
            if "dynamic" in kind or kind == "longrope":
                return f"rotary embedding of type {kind!r} changes with the length"
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
        tokens: Those of them that the step runs on, ids `[B, d]` or embeddings `[B, d, hidden]`.
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
    if inputs["input_ids"] is not None and inputs["inputs_embeds"] is not None:
        return "both input_ids and inputs_embeds are given"
    position_ids = inputs["position_ids"]
    if position_ids is not None and position_ids.device != tokens.device:
        return "position_ids are on another device"
    if StepGraph.is_capturing():
        return "the stream is being captured by the caller"
    return None


@dataclass(frozen=True)
class _Inputs:
    """The tensors that a decode step reads, apart from the cache.

    Attributes:
        name: `input_ids` or `inputs_embeds`.
        tokens: `[B, d]` or `[B, d, hidden]`.
        position_ids: `[B, d]` or `[1, d]`; None: behind the cache's length.
        valid: Columns that are real `[B, d]`; None if all are.
    """

    name: str
    tokens: torch.Tensor
    position_ids: torch.Tensor | None
    valid: torch.Tensor | None

    @property
    def num_columns(self) -> int:
        """Columns of the step."""
        return self.tokens.shape[1]

    @property
    def captured_columns(self) -> int:
        """Columns of the captured step that such a step runs as."""
        return next(count for count in _COLUMNS if count >= self.num_columns)

    @property
    def _all_are_real(self) -> bool:
        """Whether no column of any such step is padding."""
        return self.valid is None and self.captured_columns == 1

    def signature(self) -> tuple[Any, ...]:
        """Return what must be equal for one capture to serve several steps."""
        position = self.position_ids
        return (
            self.name,
            (self.tokens.shape[0], self.captured_columns, *self.tokens.shape[2:]),
            self.tokens.dtype,
            self.tokens.device,
            None if position is None else (position.shape[0], position.dtype),
            self._all_are_real,
        )

    def buffers(self) -> _Inputs:
        """Return memory for such inputs, that stays where it is; what is padding in it may be any token."""
        device, position, count = self.tokens.device, self.position_ids, self.captured_columns
        batch_size, *sizes = self.tokens.shape[:1] + self.tokens.shape[2:]
        rows, dtype = (1, torch.long) if position is None else (position.shape[0], position.dtype)
        # Not of inference mode: it is written in whatever mode a later step runs in.
        with torch.inference_mode(False):
            return _Inputs(
                self.name,
                torch.zeros((batch_size, count, *sizes), dtype=self.tokens.dtype, device=device),
                torch.zeros((rows, count), dtype=dtype, device=device),
                None
                if self._all_are_real
                else torch.zeros((batch_size, count), dtype=torch.bool, device=device),
            )

    def fill(self, inputs: _Inputs, length: int) -> None:
        """Copy `inputs` of the same signature into this memory; `length` is the cache's."""
        assert self.position_ids is not None
        count = inputs.num_columns
        self.tokens[:, :count] = inputs.tokens
        if inputs.position_ids is None:
            positions = self.position_ids[0]
            torch.arange(length, length + self.num_columns, out=positions, device=positions.device)
        else:
            self.position_ids[:, :count] = inputs.position_ids
        if self.valid is not None:
            self.valid[:, :count] = True if inputs.valid is None else inputs.valid
            self.valid[:, count:] = False


@dataclass(frozen=True)
class _Captured:
    """A captured step.

    Attributes:
        kind: What steps have in common that it serves.
        graph: What it launches.
        inputs: Memory that it reads.
        output_type: Class of the model's output.
        output: Memory that it writes, by name.
    """

    kind: tuple[Any, ...]
    graph: StepGraph
    inputs: _Inputs
    output_type: type
    output: dict[str, torch.Tensor]


class DecodeGraph:
    """Runs the decode steps of one cache, captured where that is possible.

    Args:
        enabled: Whether steps may be captured.

    Attributes:
        enabled: The same, may be set at any time.
        why_eager: Why the last step ran as it is; None if it was replayed.
        num_captures: Graphs captured so far.
        num_replays: Steps replayed so far.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.why_eager: str | None = None
        self.num_captures = 0
        self.num_replays = 0
        self._failures: dict[int, str] = {}
        # The latest step's columns and kind, and all kinds so far.
        self._num_columns = 1
        self._kind: tuple[Any, ...] = ()
        self._kinds: set[tuple[Any, ...]] = set()
        self.forget()

    def __reduce__(self) -> tuple[type[DecodeGraph], tuple[bool]]:
        """Copy as one that has captured nothing: the copy of a cache lies elsewhere."""
        return DecodeGraph, (self.enabled,)

    @property
    def captured_step(self) -> StepGraph | None:
        """The latest step's graph, to time it by itself: a replay appends what the host does not count."""
        captured = self._captured.get(self._num_columns)
        return None if captured is None else captured.graph

    def forget(self) -> None:
        """Drop what was captured."""
        self._key: tuple[Any, ...] | None = None
        self._model: ModelState | None = None
        self._captured: dict[int, _Captured] = {}

    def run(
        self,
        model: Any,
        cache: LeanKCache,
        inputs: dict[str, Any],
        valid: torch.Tensor | None,
        forward: Callable[[dict[str, Any]], Any],
    ) -> Any:
        """Run a decode step of at most `MAX_DRAFT` columns on a cache that is split and has room for it.

        Args:
            model: The model.
            cache: The cache that this belongs to.
            inputs: Arguments of the model's forward pass, without cache and attention mask.
            valid: Columns that are real `[B, d]`, of any dtype; None if all are.
            forward: Runs the model's forward pass on such arguments.

        Returns:
            What `forward` returns; tensors in it are the caller's.
        """
        name = "input_ids" if inputs["inputs_embeds"] is None else "inputs_embeds"
        given = _Inputs(name, inputs[name], inputs["position_ids"], valid)
        self._num_columns = count = given.captured_columns
        self.why_eager = self._why_eager(model, cache, inputs, given)
        is_new, step = self.why_eager == _FIRST_OF_ITS_KIND, forward
        if (self.why_eager is None or is_new) and self._model and self._model.is_fused:
            step = functools.partial(fused_forward, model, cache)
        if self.why_eager is None:
            captured = self._captured.get(count) or self._capture(model, cache, inputs, given, step)
            if captured is not None:
                self._captured[count] = captured
                return self._replay(cache, inputs, given, captured)
            is_new = count not in self._failures
        if is_new and count > 1:
            return self._warm_up(cache, inputs, given, step)
        cache.rows.next_valid = None if valid is None else valid.to(torch.bool)
        return (step if is_new else forward)(inputs)

    def _why_eager(self, model: Any, cache: LeanKCache, inputs: dict[str, Any], given: _Inputs) -> str | None:
        """Return why a step is not replayed; drop a capture that does not hold any more."""
        if not self.enabled:
            return "`use_graphs` is off"
        if self._num_columns in self._failures:
            return self._failures[self._num_columns]
        reason = why_step_is_eager(model, inputs, given.tokens)
        if reason is not None:
            return reason
        device, rows = given.tokens.device, cache.rows
        kind = (
            id(model),
            given.signature(),
            # Only without a window does it matter whether a row may have been empty so far.
            rows.padding is not None and rows.sink_size + rows.recent_size == 0,
            torch.is_inference_mode_enabled(),
            StepGraph.stream_of(device),
        )
        key = (id(model), given.tokens.dtype, device, cache.addresses())
        if key != self._key or self._model is None or not self._model.holds():
            self.forget()
            fuse = functools.partial(fuse_weights, model, cache, given.tokens)
            self._key, self._model = key, ModelState(model, device, fuse)
        if self._model.why_eager is not None:
            return self._model.why_eager
        captured = self._captured.get(self._num_columns)
        if captured is not None and captured.kind == kind:
            return None
        self._captured.pop(self._num_columns, None)
        self._kind, is_first = kind, kind not in self._kinds | model.graph_memory.captured_kinds
        self._kinds.add(kind)
        # One column's kernels were chosen when the prompt was split, or are in the first step.
        if (self._num_columns > 1 or not is_first) and not self._has_kernels(model, cache, device):
            return "plain torch serves a layer"
        # Libraries set themselves up in it, which is not allowed during a capture.
        return _FIRST_OF_ITS_KIND if is_first else None

    def _has_kernels(self, model: Any, cache: LeanKCache, device: torch.device) -> bool:
        """Return whether kernels serve all layers; those of several columns are compiled here."""
        if self._num_columns == 1:
            return all(layer.kernels is not None for layer in cache.pruned_layers)
        head_dim = cache.pruned_layers[0].layout.head_dim
        shape = (0, model.config.num_attention_heads, self._num_columns, head_dim)
        query = torch.empty(shape, dtype=model.dtype, device=device)
        return all(layer.kernels_for(query) is not None for layer in cache.pruned_layers)

    def _capture(
        self,
        model: Any,
        cache: LeanKCache,
        inputs: dict[str, Any],
        given: _Inputs,
        forward: Callable[[dict[str, Any]], Any],
    ) -> _Captured | None:
        """Capture a step without running it; None, and the cache as it was, if that fails."""
        saved = _host_state(cache)
        for attempt in (1, 2):
            try:
                return self._try_capture(model, cache, inputs, given, forward)
            except Exception as error:
                _restore(saved)
                if isinstance(error, torch.OutOfMemoryError) and attempt == 1:
                    # A capture cannot take over memory that is only cached.
                    torch.cuda.empty_cache()
                    continue
                failure = f"capturing failed: {type(error).__name__}: {error}"
                kinds = model.graph_memory.captured_kinds
                self.why_eager = failure
                if self._kind in kinds:
                    # Perhaps a warm-up was wanted after all: this step is one, and the next is captured.
                    kinds.discard(self._kind)
                    break
                self._failures[self._num_columns] = failure
                logger.warning_once(
                    f"a decode step could not be captured as a CUDA graph ({type(error).__name__}: {error}); "
                    "decoding goes on without, slower; `model.build_cache(use_graphs=False)` turns this off"
                )
                break
            except BaseException:  # an interrupt by the user, who may go on with the cache
                _restore(saved)
                raise
            finally:
                # It refers to memory of the graph.
                cache.rows.forget_step()
        return None

    def _try_capture(
        self,
        model: Any,
        cache: LeanKCache,
        inputs: dict[str, Any],
        given: _Inputs,
        forward: Callable[[dict[str, Any]], Any],
    ) -> _Captured:
        saved = _host_state(cache)
        buffers = given.buffers()
        buffers.fill(given, cache.rows.num_columns)
        graph = StepGraph(given.tokens.device, model.graph_memory)
        cache.rows.next_valid = buffers.valid
        output = graph.capture(lambda: forward(_arguments(inputs, buffers)))
        # Nothing has run: the host counts columns when the step is replayed.
        _restore(saved)
        tensors = {name: value for name, value in output.items() if value is not cache}
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise TypeError(f"the model's output holds more than tensors: {', '.join(tensors)}")
        self.num_captures += 1
        model.graph_memory.captured_kinds.add(self._kind)
        return _Captured(self._kind, graph, buffers, type(output), tensors)

    def _replay(self, cache: LeanKCache, inputs: dict[str, Any], given: _Inputs, captured: _Captured) -> Any:
        captured.inputs.fill(given, cache.rows.num_columns)
        captured.graph.replay()
        cache.advance(given.num_columns)
        self.num_replays += 1
        output = {
            name: _asked_for(name, tensor, inputs, given).clone() for name, tensor in captured.output.items()
        }
        return captured.output_type(**output, past_key_values=cache)

    @staticmethod
    def _warm_up(
        cache: LeanKCache, inputs: dict[str, Any], given: _Inputs, forward: Callable[[dict[str, Any]], Any]
    ) -> Any:
        """Run several columns as they will be captured, with the padding."""
        buffers = given.buffers()
        buffers.fill(given, cache.rows.num_columns)
        cache.rows.next_valid = buffers.valid
        output = forward(_arguments(inputs, buffers))
        cache.advance(given.num_columns - buffers.num_columns)
        return type(output)(
            **{
                name: _asked_for(name, value, inputs, given) if isinstance(value, torch.Tensor) else value
                for name, value in output.items()
            }
        )


def _arguments(inputs: dict[str, Any], buffers: _Inputs) -> dict[str, Any]:
    """Return arguments of a forward pass that reads buffers; it keeps all logits."""
    keep = {"logits_to_keep": 0} if "logits_to_keep" in inputs else {}
    return {**inputs, **keep, buffers.name: buffers.tokens, "position_ids": buffers.position_ids}


def _asked_for(name: str, tensor: torch.Tensor, inputs: dict[str, Any], given: _Inputs) -> torch.Tensor:
    """Return of an output `[B, captured columns, n]` the step's own, and of logits those that are kept."""
    columns = tensor[:, : given.num_columns]
    return columns[:, -inputs["logits_to_keep"] :] if name == "logits" else columns


def _host_state(cache: LeanKCache) -> list[tuple[Any, dict[str, Any]]]:
    """Return what the host knows of a cache; tensors in it by reference."""
    parts = [cache.rows, *cache.layers, *(layer.store for layer in cache.pruned_layers)]
    # Layers of transformers may hold their states in dictionaries.
    return [
        (part, {name: dict(held) if isinstance(held, dict) else held for name, held in vars(part).items()})
        for part in parts
    ]


def _restore(saved: list[tuple[Any, dict[str, Any]]]) -> None:
    for part, values in saved:
        vars(part).clear()
        vars(part).update(values)
