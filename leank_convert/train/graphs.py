"""A sample's loss and gradient as one CUDA graph, for models whose passes the host cannot launch fast enough.

Three passes and their backward pass are some ten thousand kernels. A small model's take less time than Python
and CUDA need to launch them, so they are recorded, once for each size of a padded sample, and launched
at once from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.data import TrainingSample
from leank_convert.recipe import Recipe
from leank_convert.train.packing import PackedSample, Sizes, pack_sample, padded_sizes
from leank_convert.train.passes import rotates_by_length

# What a prefill may take, in floating-point operations of its weights: with more, it lasts longer than the
# host needs to launch a step, which is about 0.3 s for 32 layers.
_MOST_OPERATIONS = 4e13

Differentiate = Callable[[PackedSample], tuple[Tensor, Tensor]]
"""A sample's loss and its gradient."""


def is_bound_by_host(model: PreTrainedModel, recipe: Recipe) -> bool:
    """Whether a training step is worth a graph, and can be one."""
    return (
        model.device.type == "cuda"
        and recipe.model.device_map is None
        and not recipe.offload_context
        and not rotates_by_length(model)
        and 2.0 * model.num_parameters() * recipe.data.max_length <= _MOST_OPERATIONS
    )


class Steps:
    """Loss and gradient of samples: captured where the host is the limit, from a size's second sample on.

    What `differentiate` reads beside the sample has to stay where it is: a graph knows addresses.

    Args:
        model: A causal language model loaded with `attention.ATTENTION_NAME`.
        recipe: Its longest sample, and where model and contexts lie.

    Attributes:
        captures: Whether anything is captured.
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        self.captures = is_bound_by_host(model, recipe)
        self._device = model.device
        self._known: set[Sizes] = set()
        self._graphs: dict[tuple[int, Sizes], _Graph] = {}
        if self.captures:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def differentiate(
        self, sample: TrainingSample, stage: int, differentiate: Differentiate
    ) -> tuple[Tensor, Tensor]:
        """Compute a sample's loss and gradient, which hold until the next call.

        Args:
            sample: Context and questions.
            stage: Samples of one size and stage share a graph.
            differentiate: What is run, or captured.
        """
        if not self.captures:
            return differentiate(pack_sample(sample))
        sizes = padded_sizes(sample)
        packed = pack_sample(sample, sizes)
        # Run as it is for once, so that libraries choose their kernels outside a capture.
        if sizes not in self._known:
            self._known.add(sizes)
            return differentiate(packed.to(self._device))
        graph = self._graphs.get((stage, sizes))
        if graph is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            graph = _Graph(packed.to(self._device), differentiate, self._stream, self._pool)
            self._graphs[stage, sizes] = graph
        return graph.replay(packed)


class _Graph:
    def __init__(
        self, packed: PackedSample, differentiate: Differentiate, stream: torch.cuda.Stream, pool: Any
    ) -> None:
        self._packed = packed
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Not torch.cuda.graph: it collects garbage and empties the allocator's cache.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._found = differentiate(packed)
            finally:
                self._graph.capture_end()

    def replay(self, packed: PackedSample) -> tuple[Tensor, Tensor]:
        self._packed.row.copy_(packed.row)
        self._graph.replay()
        return self._found
