"""One decode step by itself: what it has to read; ours, replayed; the stock model's, as a CUDA graph."""

from __future__ import annotations

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
        count_attention_bytes(widths, head_dim, 1, *tokens, setup.stored_bytes)
        for widths in setup.layout.widths
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
        self.capacity = capacity
        self.length = 0

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


class GraphedStep:
    """A step of the stock model `[B, 1]` behind what a cache holds, captured on a GPU; it may run repeatedly.

    `backend` attends there. It is told how many tokens there are by shapes alone, and a mask over room to
    spare would cost time, so a step is captured at exactly its length.
    """

    def __init__(self, dense: Any, token: Tensor, cache: Cache, backend: SDPBackend) -> None:
        self._dense, self._token, self._cache, self._backend = dense, token, cache, backend
        self._length = cache.get_seq_length()
        self._position = torch.full((1, 1), self._length, device=token.device)
        self._on_gpu = token.device.type == "cuda"
        self._logits: Tensor | None = None
        self._graph = capture(self._forward, self._keep) if self._on_gpu else None

    def run(self) -> Tensor:
        """Run it `[B, 1, vocabulary]`, by a replay if it was captured."""
        if self._graph is None:
            return self._forward()
        self._graph.replay()
        assert self._logits is not None
        return self._logits.clone()

    def time(self) -> Timing:
        """Time it, by replays if it was captured."""
        return time_replays(self._graph, self._forward, self._token.device, rounds=_REPLAYS)

    def _forward(self) -> Tensor:
        for layer in self._cache.layers:
            assert isinstance(layer, PreallocatedLayer)
            layer.length = self._length
        with sdpa_kernel(self._backend) if self._on_gpu else nullcontext():
            output = self._dense(self._token, position_ids=self._position, **{CACHE: self._cache})
        logits: Tensor = output.logits
        return logits

    def _keep(self) -> None:
        self._logits = self._forward()


class GraphedDense:
    """The stock model over a preallocated cache, called like a model; each of its steps is a graph.

    Args:
        dense: The stock model, loaded with `UNMASKED_SDPA`: its rows have no padding.
        backend: What attends in steps.
    """

    def __init__(self, dense: Any, backend: SDPBackend) -> None:
        self._dense, self._backend = dense, backend

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        """Run a prompt `[B, S]`, or a step `[B, 1]` behind one."""
        if options.get(CACHE) is not None:
            held = {CACHE: options[CACHE]}
            logits = GraphedStep(self._dense, input_ids, options[CACHE], self._backend).run()
            return CausalLMOutputWithPast(logits=logits, **held)
        capacity = input_ids.shape[1] + _ROOM
        options[CACHE] = Cache(layers=[PreallocatedLayer(capacity) for _ in self._dense.model.layers])
        return self._dense(input_ids, **options)

    def time_step(self, prompt: Tensor) -> Timing:
        """Time the step behind a prompt `[B, S]`."""
        cache = self(prompt, logits_to_keep=1)[CACHE]
        return GraphedStep(self._dense, prompt[:, -1:], cache, self._backend).time()
