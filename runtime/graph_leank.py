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

What a captured step presumes of the model and of its arguments is in model_state_leank, the graph itself in
capture_leank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.utils import logging

from .capture_leank import StepGraph
from .configuration_leank import CACHE
from .fused_step_leank import fuse_weights, fused_forward
from .kernel_key_leank import MAX_DRAFT
from .model_state_leank import ModelState, why_step_is_eager

if TYPE_CHECKING:
    from .cache_leank import LeanKCache

logger = logging.get_logger(__name__)

_Forward = Callable[[dict[str, Any]], Any]
_FIRST_OF_ITS_KIND = "the first step of its kind"

# Columns of the steps that are captured; kernels are compiled for such numbers too.
_COLUMNS = (1, 2, 4, 8, 16, MAX_DRAFT)


@dataclass(frozen=True)
class _Inputs:
    """The tensors that a decode step reads, apart from the cache."""

    name: str  # `input_ids` or `inputs_embeds`
    tokens: torch.Tensor  # `[B, d]` or `[B, d, hidden]`
    position_ids: torch.Tensor | None  # `[B, d]` or `[1, d]`; None: behind the cache's length
    valid: torch.Tensor | None  # columns that are real `[B, d]`; None if all are

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


class _Call(NamedTuple):
    """A step of a model on a cache: arguments of its forward pass, and the tensors among them."""

    model: Any
    cache: LeanKCache
    inputs: dict[str, Any]
    given: _Inputs

    def fill(self, buffers: _Inputs) -> None:
        """Copy the step's tensors into memory for such."""
        buffers.fill(self.given, self.cache.rows.num_columns)

    def make_on(self, buffers: _Inputs, forward: _Forward) -> Any:
        """Run a forward pass that reads buffers, and keeps all logits."""
        self.cache.rows.next_valid = buffers.valid
        keep = {"logits_to_keep": 0} if "logits_to_keep" in self.inputs else {}
        own = {buffers.name: buffers.tokens, "position_ids": buffers.position_ids}
        return forward({**self.inputs, **keep, **own})

    def asked_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return of an output `[B, captured columns, n]` the step's own, and of logits those kept."""
        columns = tensor[:, : self.given.num_columns]
        return columns[:, -self.inputs["logits_to_keep"] :] if name == "logits" else columns


@dataclass(frozen=True)
class _Captured:
    """A captured step."""

    kind: tuple[Any, ...]  # what steps have in common that it serves
    graph: StepGraph  # what it launches
    inputs: _Inputs  # memory that it reads
    output_type: type  # class of the model's output
    output: dict[str, torch.Tensor]  # memory that it writes, by name


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

    @property
    def is_fused(self) -> bool:
        """Whether the model's steps run as `fused_forward`."""
        return self._model is not None and self._model.is_fused

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
        forward: _Forward,
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
        call = _Call(model, cache, inputs, _Inputs(name, inputs[name], inputs["position_ids"], valid))
        self._num_columns = count = call.given.captured_columns
        self.why_eager = self._why_eager(call)
        is_new, step = self.why_eager == _FIRST_OF_ITS_KIND, forward
        if (self.why_eager is None or is_new) and self.is_fused:
            step = functools.partial(fused_forward, model, cache)
        if self.why_eager is None:
            captured = self._captured.get(count) or self._capture(call, step)
            if captured is not None:
                self._captured[count] = captured
                return self._replay(call, captured)
            is_new = count not in self._failures
        if is_new and count > 1:
            return _warm_up(call, step)
        cache.rows.next_valid = None if valid is None else valid.to(torch.bool)
        return (step if is_new else forward)(inputs)

    def _why_eager(self, call: _Call) -> str | None:
        """Return why a step is not replayed; drop a capture that does not hold any more."""
        model, cache, inputs, given = call
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
            rows.padding is not None and rows.windows.sink_size + rows.windows.recent_size == 0,
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

    def _capture(self, call: _Call, forward: _Forward) -> _Captured | None:
        """Capture a step without running it; None, and the cache as it was, if that fails."""
        saved = _host_state(call.cache)
        for attempt in (1, 2):
            try:
                return self._try_capture(call, forward)
            except Exception as error:
                _restore(saved)
                if isinstance(error, torch.OutOfMemoryError) and attempt == 1:
                    # A capture cannot take over memory that is only cached. Refused while another captures.
                    with contextlib.suppress(RuntimeError):
                        torch.cuda.empty_cache()
                    continue
                failure = f"capturing failed: {type(error).__name__}: {error}"
                kinds = call.model.graph_memory.captured_kinds
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
                call.cache.rows.forget_step()
        return None

    def _try_capture(self, call: _Call, forward: _Forward) -> _Captured:
        saved, buffers = _host_state(call.cache), call.given.buffers()
        call.fill(buffers)
        graph = StepGraph(buffers.tokens.device, call.model.graph_memory)
        output = graph.capture(lambda: call.make_on(buffers, forward))
        # Nothing has run: the host counts columns when the step is replayed.
        _restore(saved)
        tensors = {name: value for name, value in output.items() if value is not call.cache}
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise TypeError(f"the model's output holds more than tensors: {', '.join(tensors)}")
        self.num_captures += 1
        call.model.graph_memory.captured_kinds.add(self._kind)
        return _Captured(self._kind, graph, buffers, type(output), tensors)

    def _replay(self, call: _Call, captured: _Captured) -> Any:
        call.fill(captured.inputs)
        # Before the launch: an interrupt comes behind it, when the device has added them already.
        call.cache.advance(call.given.num_columns)
        try:
            captured.graph.replay()
        except Exception:
            call.cache.advance(-call.given.num_columns)
            raise
        self.num_replays += 1
        output = {name: call.asked_for(name, held).clone() for name, held in captured.output.items()}
        return captured.output_type(**output, **{CACHE: call.cache})


def _warm_up(call: _Call, forward: _Forward) -> Any:
    """Run several columns as they will be captured, with the padding."""
    buffers = call.given.buffers()
    call.fill(buffers)
    output = call.make_on(buffers, forward)
    call.cache.advance(call.given.num_columns - buffers.num_columns)
    own = {
        name: call.asked_for(name, value) if isinstance(value, torch.Tensor) else value
        for name, value in output.items()
    }
    return type(output)(**own)


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
