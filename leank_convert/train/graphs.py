"""A sample's loss and gradient as one CUDA graph, for models whose passes the host cannot launch fast enough.

Three passes and their backward pass are some ten thousand kernels. A small model's take less time than Python
and CUDA need to launch them, so they are recorded, once for each size of a padded sample, and launched
at once from then on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.data import TrainingSample
from leank_convert.recipe import Recipe
from leank_convert.train.packing import PackedSample, Sizes, pack_sample, padded_sizes
from leank_convert.train.passes import Student, distil, rotates_by_length

# What a prefill may take, in floating-point operations of its weights: with more, it lasts longer than the
# host needs to launch a step, which is about 0.3 s for 32 layers.
_MOST_OPERATIONS = 4e13


def is_bound_by_host(model: PreTrainedModel, recipe: Recipe) -> bool:
    """Whether a training step is worth a graph, and can be one."""
    return (
        model.device.type == "cuda"
        and recipe.model.device_map is None
        and not recipe.offload_context
        and not rotates_by_length(model)
        and 2.0 * model.num_parameters() * recipe.data.max_length <= _MOST_OPERATIONS
    )


class Gradients:
    """Adds up the gradients of samples: by a graph where the host is the limit, else pass by pass.

    Args:
        model: A causal language model loaded with `attention.ATTENTION_NAME`.
        recipe: Its longest sample, and where model and contexts lie.

    Attributes:
        captures: Whether graphs are captured.
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        self.captures = is_bound_by_host(model, recipe)
        self._model = model
        self._offload = recipe.offload_context
        self._known: set[Sizes] = set()
        self._graphs: dict[tuple[Sizes, bool], _Graph] = {}
        if self.captures:
            self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def add(self, sample: TrainingSample, student: Student, weight: float) -> Tensor:
        """Add a sample's gradient to what the student is made of.

        Args:
            sample: Context and questions.
            student: What learns.
            weight: What loss and gradient are multiplied by for the gradient.

        Returns:
            The loss, a scalar without a graph, which would keep the context alive beside the next one.
        """
        if not self.captures:
            loss = distil(self._model, pack_sample(sample), student, offload=self._offload)
            (weight * loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        sizes = padded_sizes(sample)
        packed = pack_sample(sample, sizes)
        # Run as it is for once, so that libraries choose their kernels outside a capture.
        if sizes not in self._known:
            self._known.add(sizes)
            loss = distil(self._model, packed.to(self._model.device), student)
            (weight * loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        key = sizes, student.gates is not None
        if key not in self._graphs:
            self._graphs[key] = _Graph(self._model, packed, student, self._stream, self._pool)
        loss, gradient = self._graphs[key].replay(packed, student)
        student.learned.backward(weight * gradient)  # type: ignore[no-untyped-call]
        return loss


class _Graph:
    """Loss and gradient of samples of one size, for whatever student of one kind."""

    def __init__(
        self,
        model: PreTrainedModel,
        packed: PackedSample,
        student: Student,
        stream: torch.cuda.Stream,
        pool: Any,
    ) -> None:
        device = model.device
        self._packed = packed.to(device)
        self._student = replace(
            student,
            scaling_factors=student.scaling_factors.detach().clone(),
            sees_middle=_sees_middle(student).clone(),
            gates=None if student.gates is None else student.gates.detach().clone(),
        )
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                learned = self._student.learned.requires_grad_()
                loss = distil(model, self._packed, self._student)
                (gradient,) = torch.autograd.grad(loss, learned)
                self._found = loss.detach(), gradient
            finally:
                self._graph.capture_end()

    def replay(self, packed: PackedSample, student: Student) -> tuple[Tensor, Tensor]:
        self._packed.row.copy_(packed.row)
        with torch.no_grad():
            self._student.scaling_factors.copy_(student.scaling_factors)
            if self._student.sees_middle is not None:
                self._student.sees_middle.copy_(_sees_middle(student))
            if self._student.gates is not None and student.gates is not None:
                self._student.gates.copy_(student.gates)
        self._graph.replay()
        return self._found


def _sees_middle(student: Student) -> Tensor:
    """Which heads see the middle [L, H_kv]: one graph serves students of which all do, and others."""
    if student.sees_middle is not None:
        return student.sees_middle
    return torch.ones_like(student.scaling_factors[..., 0], dtype=torch.bool)
