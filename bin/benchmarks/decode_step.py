"""One decode step by itself: what it has to read; ours, replayed; the stock model's, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutputWithPast

from bin.benchmarks.decode_attention import count_attention_bytes, pruned_length
from bin.benchmarks.measuring import Timing, capture, time_replays
from bin.benchmarks.random_models import Setup
from leank_convert._runtime.configuration_leank import CACHE

# SDPA, for which transformers makes no mask: it knows none for this name. For SDPA's own, release 5.17 makes
# one while a graph is captured, though a single query needs none, and repeats K and V because there is one.
UNMASKED_SDPA = "leank_benchmark_sdpa"
AttentionInterface.register(UNMASKED_SDPA, sdpa_attention_forward)

_REPLAYS = 20
# Steps that a cache has room for behind the prompt: those that lead to a capture, and replays that append.
_ROOM = 64
_STEPS_TO_CAPTURE = 2  # the first of a kind warms up, the next one is captured


def count_step_bytes(model: Any, setup: Setup, batch_size: int, num_tokens: int) -> dict[str, int]:
    """Count what a decode step has to read, each byte once: weights, and keys and values by the mask.

    The step's own token is the last of each row's `num_tokens`. Of the embedding's table it reads next to
    nothing, unless that is the head's too.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = (weight for weight in model.parameters() if weight is not embedding or weight is head)
    head_dim, pruned = setup.geometry.facts.head_dim, pruned_length(num_tokens, setup.windows)
    tokens = batch_size * num_tokens, batch_size * pruned
    # A chunk is one channel: what a kernel pads is its own affair.
    cached = (
        count_attention_bytes(widths, head_dim, 1, *tokens, setup.stored_bytes, values)
        for widths, values in zip(setup.layout.widths, setup.value_widths, strict=True)
    )
    return {
        "weights": sum(weight.nbytes for weight in read),
        "cache": sum(sum(regions.values()) for regions in cached),
    }


def time_own_step(model: Any, prompt: Tensor, num_drafted: int = 0) -> Timing:
    """Time the step of a LeanK model behind a prompt `[B, S]`: replays of the graph that it captured.

    It verifies so many drafted tokens, all of which stay in the cache.
    """
    cache = model.build_cache()
    cache.reserve(prompt.shape[1] + _ROOM * (1 + num_drafted))
    model(prompt, logits_to_keep=1, **{CACHE: cache})
    tokens = prompt[:, -1:].repeat(1, 1 + num_drafted)

    def step() -> None:
        model(tokens, **{CACHE: cache})

    for _ in range(_STEPS_TO_CAPTURE):
        step()
    return time_replays(cache.graph.captured_step, step, model.device, rounds=_REPLAYS)


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer `[B, H_kv, capacity, D]`, written in place and seen up to their length."""

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity, self.length = capacity, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens `[B, H_kv, S, D]`; return all there are."""
        if self.keys is None or self.values is None:
            batch_size, num_heads, _, head_dim = key_states.shape
            shape = batch_size, num_heads, self.capacity, head_dim
            self.keys, self.values = key_states.new_empty(shape), value_states.new_empty(shape)
            self.is_initialized = True
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.length


class GraphedDense:
    """The stock model over a preallocated cache, called like a model; on a GPU each of its steps is a graph.

    A step is told how many tokens there are by shapes alone, and a mask over room to spare would cost time:
    it is captured at exactly its length.

    Args:
        dense: The stock model, loaded with `UNMASKED_SDPA`: its rows have no padding.
        backend: What attends in steps.
    """

    def __init__(self, dense: Any, backend: SDPBackend) -> None:
        self._dense, self._backend = dense, backend
        self._is_on_gpu = dense.device.type == "cuda"

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        """Run a prompt `[B, S]`, or a step `[B, 1]` behind one."""
        if options.get(CACHE) is None:
            capacity = input_ids.shape[1] + _ROOM
            options[CACHE] = Cache(layers=[PreallocatedLayer(capacity) for _ in self._dense.model.layers])
            return self._dense(input_ids, **options)
        graph, step, logits = self._capture(input_ids, options[CACHE])
        if graph is None:
            step()
        else:
            graph.replay()
        return CausalLMOutputWithPast(logits=logits[-1].clone(), **{CACHE: options[CACHE]})

    def time_step(self, prompt: Tensor) -> Timing:
        """Time the step behind a prompt `[B, S]`, by replays if it was captured."""
        cache = self(prompt, logits_to_keep=1)[CACHE]
        graph, step, _ = self._capture(prompt[:, -1:], cache)
        return time_replays(graph, step, prompt.device, rounds=_REPLAYS)

    def _capture(self, token: Tensor, cache: Cache) -> tuple[Any, Callable[[], None], list[Tensor]]:
        """The graph of a step `[B, 1]`, None on the CPU; the step, which may run repeatedly; its logits."""
        length = cache.get_seq_length()
        position = torch.full((1, 1), length, device=token.device)
        logits: list[Tensor] = []

        def step() -> None:
            for layer in cache.layers:
                assert isinstance(layer, PreallocatedLayer)
                layer.length = length
            with sdpa_kernel(self._backend) if self._is_on_gpu else nullcontext():
                logits[:] = [self._dense(token, position_ids=position, **{CACHE: cache}).logits]

        return capture(step, step) if self._is_on_gpu else None, step, logits
