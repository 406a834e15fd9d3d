"""A whole decode step as one CUDA graph, captured from the model's own forward pass, replayed per token.

A decode step of a large model is a thousand short kernels, and the host needs longer to launch them than the
device to run them. A step of one column always does the same to the same memory (lengths live on the device,
the cache is updated in place), so it is captured once and launched as a whole after that. A model's first
step of a kind runs as it is, which loads and compiles what there is to load; the next one is captured. Where
a later step differs from what was captured, it is captured anew, after such a step of its own if its kind is
new to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.utils import logging

from .capture_leank import ModelState, StepGraph, why_step_is_eager
from .rows_leank import RowState

logger = logging.get_logger(__name__)


class CachedStep(Protocol):
    """What a graph needs of the cache that it advances."""

    rows: RowState
    layers: Any

    def addresses(self) -> tuple[int, ...]:
        """Return numbers that change with the cache's tensors."""


@dataclass(frozen=True)
class _Inputs:
    """The tensors that a decode step reads, apart from the cache.

    Attributes:
        name: `input_ids` or `inputs_embeds`.
        tokens: `[B, 1]` or `[B, 1, hidden]`.
        position_ids: `[B, 1]` or `[1, 1]`; None: the cache's length.
        valid: Rows whose column is real `[B, 1]`; None if all are.
    """

    name: str
    tokens: torch.Tensor
    position_ids: torch.Tensor | None
    valid: torch.Tensor | None

    def signature(self) -> tuple[Any, ...]:
        """Return what must be equal for one capture to serve several steps."""
        position = self.position_ids
        return (
            self.name,
            self.tokens.shape,
            self.tokens.dtype,
            self.tokens.device,
            None if position is None else (position.shape, position.dtype),
            None if self.valid is None else self.valid.shape,
        )

    def buffers(self) -> _Inputs:
        """Return memory for such inputs, that stays where it is."""
        device, position = self.tokens.device, self.position_ids
        # Not of inference mode: it is written in whatever mode a later step runs in.
        with torch.inference_mode(False):
            return _Inputs(
                self.name,
                torch.empty(self.tokens.shape, dtype=self.tokens.dtype, device=device),
                torch.empty((1, 1), dtype=torch.long, device=device)
                if position is None
                else torch.empty(position.shape, dtype=position.dtype, device=device),
                None
                if self.valid is None
                else torch.empty(self.valid.shape, dtype=torch.bool, device=device),
            )

    def fill(self, inputs: _Inputs, length: int) -> None:
        """Copy `inputs` of the same signature into this memory; `length` is the cache's."""
        assert self.position_ids is not None
        self.tokens.copy_(inputs.tokens)
        if inputs.position_ids is None:
            self.position_ids.fill_(length)
        else:
            self.position_ids.copy_(inputs.position_ids)
        if self.valid is not None and inputs.valid is not None:
            self.valid.copy_(inputs.valid)


@dataclass(frozen=True)
class _Captured:
    """A captured step.

    Attributes:
        graph: What it launches.
        inputs: Memory that it reads.
        output_type: Class of the model's output.
        output: Memory that it writes, by name.
    """

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
        self._failure: str | None = None
        self.forget()

    def __reduce__(self) -> tuple[type[DecodeGraph], tuple[bool]]:
        """Copy as one that has captured nothing: the copy of a cache lies elsewhere."""
        return DecodeGraph, (self.enabled,)

    def forget(self) -> None:
        """Drop what was captured."""
        self._key: tuple[Any, ...] | None = None
        self._model: ModelState | None = None
        self._captured: _Captured | None = None

    def run(
        self,
        model: Any,
        cache: CachedStep,
        inputs: dict[str, Any],
        valid: torch.Tensor | None,
        forward: Callable[[dict[str, Any]], Any],
    ) -> Any:
        """Run a decode step of one column on a cache that is split and has room for it.

        Args:
            model: The model.
            cache: The cache that this belongs to.
            inputs: Arguments of the model's forward pass, without cache and attention mask.
            valid: Rows whose column is real `[B, 1]`, of any dtype; None if all are.
            forward: Runs the model's forward pass on such arguments.

        Returns:
            What `forward` returns; tensors in it are the caller's.
        """
        name = "input_ids" if inputs["inputs_embeds"] is None else "inputs_embeds"
        given = _Inputs(name, inputs[name], inputs["position_ids"], valid)
        self.why_eager = self._why_eager(model, cache, inputs, given)
        if self.why_eager is None and self._captured is None:
            self._captured = self._capture(model, cache, inputs, given, forward)
        if self._captured is None or self.why_eager is not None:
            cache.rows.next_valid = None if valid is None else valid.to(torch.bool)
            return forward(inputs)
        return self._replay(cache, given, self._captured)

    def _why_eager(self, model: Any, cache: CachedStep, inputs: dict[str, Any], given: _Inputs) -> str | None:
        """Return why a step is not replayed; drop a capture that does not hold any more."""
        if not self.enabled:
            return "`use_graphs` is off"
        if self._failure is not None:
            return self._failure
        reason = why_step_is_eager(model, inputs, given.tokens)
        if reason is not None:
            return reason
        device, rows = given.tokens.device, cache.rows
        kind = (
            given.signature(),
            inputs.get("logits_to_keep"),
            # Only without a window does it matter whether a row may have been empty so far.
            rows.padding is not None and rows.sink_size + rows.recent_size == 0,
            torch.is_inference_mode_enabled(),
            StepGraph.stream_of(device),
        )
        key = (id(model), kind, cache.addresses())
        if key != self._key or self._model is None or not self._model.holds():
            self.forget()
            self._key, self._model = key, ModelState(model, device)
            if kind not in model.graph_memory.captured_kinds:
                # Libraries set themselves up in it, which is not allowed during a capture.
                return self._model.why_eager or "the first step of its kind"
        if self._model.why_eager is not None:
            return self._model.why_eager
        if self._captured is None and any(layer.kernels is None for layer in cache.layers):
            return "plain torch serves a layer"
        return None

    def _capture(
        self,
        model: Any,
        cache: CachedStep,
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
                if self._key is not None and self._key[1] in kinds:
                    # Perhaps a warm-up was wanted after all: this step is one, and the next is captured.
                    kinds.discard(self._key[1])
                    self.why_eager = failure
                    break
                self._failure = failure
                logger.warning_once(
                    f"a decode step could not be captured as a CUDA graph ({type(error).__name__}: {error}); "
                    "decoding goes on without, slower; `model.build_cache(use_graphs=False)` turns this off"
                )
                self.why_eager = self._failure
                self.forget()
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
        cache: CachedStep,
        inputs: dict[str, Any],
        given: _Inputs,
        forward: Callable[[dict[str, Any]], Any],
    ) -> _Captured:
        saved = _host_state(cache)
        buffers = given.buffers()
        buffers.fill(given, cache.rows.num_columns)
        graph = StepGraph(given.tokens.device, model.graph_memory)
        arguments = {**inputs, given.name: buffers.tokens, "position_ids": buffers.position_ids}
        cache.rows.next_valid = buffers.valid
        output = graph.capture(lambda: forward(arguments))
        # Nothing has run: the host counts the column when the step is replayed.
        _restore(saved)
        tensors = {name: value for name, value in output.items() if value is not cache}
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise TypeError(f"the model's output holds more than tensors: {', '.join(tensors)}")
        self.num_captures += 1
        assert self._key is not None
        model.graph_memory.captured_kinds.add(self._key[1])
        return _Captured(graph, buffers, type(output), tensors)

    def _replay(self, cache: CachedStep, given: _Inputs, captured: _Captured) -> Any:
        captured.inputs.fill(given, cache.rows.num_columns)
        captured.graph.replay()
        cache.rows.advance()
        for layer in cache.layers:
            layer.num_columns += 1
        self.num_replays += 1
        output = {name: tensor.clone() for name, tensor in captured.output.items()}
        return captured.output_type(**output, past_key_values=cache)


def _host_state(cache: CachedStep) -> list[tuple[Any, dict[str, Any]]]:
    """Return what the host knows of a cache; tensors in it by reference."""
    parts = [cache.rows, *cache.layers, *(layer.store for layer in cache.layers)]
    return [(part, dict(vars(part))) for part in parts]


def _restore(saved: list[tuple[Any, dict[str, Any]]]) -> None:
    for part, values in saved:
        vars(part).clear()
        vars(part).update(values)
