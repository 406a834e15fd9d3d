"""CUDA graphs for training steps of small models, which Python cannot launch fast enough.

Questions and answers are few tokens, but their passes and the backward pass are thousands of kernels. While
the context runs on the GPU, no more than about a thousand of them can be launched ahead. So they are
recorded, once for each size of a padded sample, and launched at once from then on. Of a model so small that
the context pass, too, takes less time than its launches, that one is recorded as well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.architectures import ModelFacts
from leank_convert.data import TrainingSample
from leank_convert.train.linear import linear_layers
from leank_convert.train.packing import PackedSample, Sizes, pack_sample, padded_sizes
from leank_convert.train.passes import distil, distil_answers, rotates_by_length, run_context_pass
from leank_convert.train.split_attention import StoredContext, Student

# Operations of a context pass's weights that take about as long as its launches: 0.1 s for 32 layers.
_MOST_OPERATIONS = 4e13

# Of contexts that are not captured themselves: padding costs them nothing but the keys at their end that are
# masked query by query.
_STEPS_PER_OCTAVE = 16

# Of questions and answers; each holds some ten thousand kernels' arguments.
_MOST_GRAPHS = 64

_Found = TypeVar("_Found")


def is_bound_by_host(model: PreTrainedModel, longest: int) -> bool:
    """Whether a context pass of so many tokens takes less time than its launches, and can be captured."""
    operations = 2.0 * model.num_parameters() * longest
    return model.device.type == "cuda" and not _depends_on_padding(model) and operations <= _MOST_OPERATIONS


def _depends_on_padding(model: PreTrainedModel) -> bool:
    """Whether padding would change what a context gives: rotations by its length, or a state at its end."""
    return rotates_by_length(model) or bool(linear_layers(model))


def _gradient(loss: Tensor, learned: Tensor, model: PreTrainedModel) -> Tensor:
    """A loss's gradient, of which float16 rounds nothing to 0.

    The loss is a mean over tokens and hidden dims, and float16 ends at 6e-8.
    """
    scale = 4096.0 if model.dtype == torch.float16 else 1.0
    (gradient,) = torch.autograd.grad(scale * loss, learned)
    return gradient / scale


class Gradients:
    """Adds up the gradients of samples; by graphs where one CUDA device holds model and context.

    The model is loaded with `attention.ATTENTION_NAME`, and the longest sample has `longest` tokens. `spread`
    says whether the model lies on several devices, `offload` whether contexts wait in host memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        longest: int,
        *,
        spread: bool = False,
        offload: bool = False,
    ) -> None:
        device = model.device
        # Whether there are graphs.
        self.captures = not (device.type != "cuda" or spread or offload or _depends_on_padding(model))
        self._captures_context = self.captures and is_bound_by_host(model, longest)
        self._model, self._facts, self._longest, self._offload = model, facts, longest, offload
        # What comes off all keys, float32 [L, H_kv, D] where the model is; set before the first sample, as
        # graphs read it where it lies.
        self.key_mean: Tensor | None = None
        self._room: StoredContext | None = None
        self._known: set[tuple[Sizes, bool, bool]] = set()
        self._known_contexts: set[int] = set()
        self._contexts: dict[int, tuple[Tensor, _Graph[StoredContext]]] = {}
        self._answers: dict[tuple[Sizes, bool, bool], _Answers] = {}
        # A sample whose context runs ahead, or has run.
        self._ahead: tuple[TrainingSample, PackedSample, StoredContext] | None = None
        if self.captures:
            self._stream, self._context_stream = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def add(self, sample: TrainingSample, student: Student, weight: float) -> Tensor:
        """Add a sample's gradient, times a weight, to what the student is made of.

        The loss that it returns is a scalar without a graph, which would keep the context alive beside the
        next one.
        """
        found = self._launch(sample, student)
        if found is None:
            self._known.add(self._kind(self._sizes(sample), student))
            loss = self._run(sample, student)
            gradient = _gradient(weight * loss, student.learned, self._model)
            student.learned.backward(gradient)  # type: ignore[no-untyped-call]
            return loss.detach()
        loss, gradient = found
        student.learned.backward(weight * gradient)  # type: ignore[no-untyped-call]
        return loss.clone()  # graphs that are launched next may use its memory

    def run_ahead(self, sample: TrainingSample) -> None:
        """Launch the context pass of the sample that comes next, which no step changes anything of.

        It takes the room of the last sample's context when that was answered, and runs while the host does
        the rest of its step. Where memory does not suffice, the sample's own step says so. What is to be
        captured first waits for that step, too.
        """
        sizes = self._sizes(sample)
        if not self.captures or (self._captures_context and sizes.context not in self._contexts):
            return
        self._context_stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(self._context_stream), suppress(torch.OutOfMemoryError):
            packed = pack_sample(sample, sizes)
            self._ahead = sample, packed, self._store(sample, packed)

    @torch.no_grad()
    def loss(self, sample: TrainingSample, student: Student) -> Tensor:
        """A sample's loss alone; as `add`."""
        found = self._launch(sample, student)
        return self._run(sample, student) if found is None else found[0].clone()

    def _run(self, sample: TrainingSample, student: Student) -> Tensor:
        if not self.captures:
            packed = pack_sample(sample)
            return distil(self._model, packed, student, key_mean=self.key_mean, offload=self._offload)
        packed, context = self._prepare(sample)
        self._wait_for_context()
        return distil_answers(self._model, context, packed.to(self._model.device), student)

    @staticmethod
    def _kind(sizes: Sizes, student: Student) -> tuple[Sizes, bool, bool]:
        """What runs the same kernels."""
        return sizes, student.gates is not None, student.value_factors is not None

    def _sizes(self, sample: TrainingSample) -> Sizes:
        if self._captures_context:
            return padded_sizes(sample, self._longest)
        return padded_sizes(sample, self._longest, _STEPS_PER_OCTAVE)

    def _launch(self, sample: TrainingSample, student: Student) -> tuple[Tensor, Tensor] | None:
        """A sample's loss and gradient by a graph; None where nothing is captured, or not yet.

        What is new is run as written for once, so that libraries choose their kernels outside a capture.
        """
        key = self._kind(self._sizes(sample), student)
        if not self.captures or key not in self._known:
            return None
        packed, context = self._prepare(sample)
        graph = self._answers.pop(key, None)
        if graph is None:
            if len(self._answers) == _MOST_GRAPHS:
                del self._answers[next(iter(self._answers))]
            graph = _Answers(self._model, context, packed, student, self._capture)
        self._answers[key] = graph  # the last to go
        graph.take(packed, student)  # which the context may still run beside
        self._wait_for_context()
        return graph.captured.launch()

    def _prepare(self, sample: TrainingSample) -> tuple[PackedSample, StoredContext]:
        """A sample with its context, which may have been run ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is sample:
            return ahead[1:]
        self._wait_for_context()
        packed = pack_sample(sample, self._sizes(sample))
        return packed, self._store(sample, packed)

    def _wait_for_context(self) -> None:
        torch.cuda.current_stream(self._model.device).wait_stream(self._context_stream)

    def _store(self, sample: TrainingSample, packed: PackedSample) -> StoredContext:
        """Run the context pass into the room that all contexts share, where graphs find them."""
        model, size = self._model, packed.sizes.context
        if self._room is None:
            self._room = StoredContext(self._longest, key_mean=self.key_mean)
            shape = (2, 1, self._facts.num_key_value_heads, self._longest, self._facts.head_dim)
            for layer in range(self._facts.num_hidden_layers):
                zeros = torch.zeros(shape, dtype=model.dtype, device=model.device)
                zeros.record_stream(self._context_stream)
                self._room.store(layer, *zeros)
        context = self._room.first(size)
        if not self._captures_context:
            context.clear(len(sample.prefix_ids))  # of an earlier context, which need not be finite
            return run_context_pass(model, _to_device(sample.prefix_ids, model), context)
        if size not in self._known_contexts:
            self._known_contexts.add(size)
            return run_context_pass(model, packed.context_ids.to(model.device), context)
        if size not in self._contexts:
            input_ids = packed.context_ids.to(model.device)
            graph = self._capture(lambda: run_context_pass(model, input_ids, context))
            self._contexts[size] = input_ids, graph
        input_ids, graph = self._contexts[size]
        input_ids.copy_(_to_device(packed.context_ids, model))
        return graph.launch()

    def _capture(self, function: Callable[[], _Found]) -> _Graph[_Found]:
        self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with suppress(torch.OutOfMemoryError):  # its traceback would hold what the capture took
            return _Graph(function, self._stream, self._pool)
        # What was freed outside of captures is not given back to the device within one.
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()  # that of a capture that broke off takes no other
        return _Graph(function, self._stream, self._pool)


class _Graph(Generic[_Found]):
    """What a function launches, and what it found, in the same place every time."""

    def __init__(self, function: Callable[[], _Found], stream: torch.cuda.Stream, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._found = function()
            except BaseException:
                with suppress(RuntimeError):  # which would stand for what broke the capture off
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def launch(self) -> _Found:
        self._graph.replay()
        return self._found


class _Answers:
    """Loss and gradient of samples of one size, for whatever student of one kind."""

    def __init__(
        self,
        model: PreTrainedModel,
        context: StoredContext,
        packed: PackedSample,
        student: Student,
        capture: Callable[[Callable[[], tuple[Tensor, Tensor]]], _Graph[tuple[Tensor, Tensor]]],
    ) -> None:
        self._packed = packed.to(model.device)
        own: dict[str, Any] = {name: part.detach().clone() for name, part in _changing(student).items()}
        self._student = replace(student, **own)
        learned = self._student.learned.requires_grad_()

        @torch.enable_grad()
        def differentiate() -> tuple[Tensor, Tensor]:
            loss = distil_answers(model, context, self._packed, self._student)
            return loss.detach(), _gradient(loss, learned, model)

        self.captured = capture(differentiate)

    def take(self, packed: PackedSample, student: Student) -> None:
        self._packed.row.copy_(packed.row)
        with torch.no_grad():
            for name, part in _changing(student).items():
                getattr(self._student, name).copy_(part)


def _to_device(tokens: Tensor, model: PreTrainedModel) -> Tensor:
    """Copy them when their turn comes, which the host does not wait for."""
    return tokens.pin_memory().to(model.device, non_blocking=True)


def _changing(student: Student) -> dict[str, Tensor]:
    """What differs from one student to the next of its kind."""
    names = "scaling_factors", "sees_middle", "gates", "value_factors"
    return {name: part for name in names if (part := getattr(student, name)) is not None}
