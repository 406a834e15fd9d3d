"""Ways to run and time decoding: `generate` as users call it, a bare loop, replays of one captured step."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from leank_convert.benchmark.timing import Stopwatch, synchronize

_WARM_UP_STEPS = 6
_REPLAYS = 24


class _StepClock(LogitsProcessor):
    """Marks the moment between a step's forward pass and the choice of its token."""

    def __init__(self, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.stopwatch.mark()
        return scores


@dataclass(frozen=True)
class Generation:
    """One call of `generate`.

    Attributes:
        seconds: The whole call, prefill included, wall clock.
        step_milliseconds: From each token to the next, without the first.
        tokens: What came out, new tokens only `[B, new]`.
        cache: The cache as the call left it.
    """

    seconds: float
    step_milliseconds: tuple[float, ...]
    tokens: Tensor
    cache: Any


def generate(model: Any, prompt: Tensor, num_new: int, *, cache: Any = None) -> Generation:
    """Call `generate`, greedy, for exactly `num_new` tokens.

    Args:
        model: The model.
        prompt: Token ids `[B, S]`.
        num_new: New tokens.
        cache: A cache to fill; None for the one that the model builds.
    """
    clock = _StepClock(model.device)
    given = {} if cache is None else {"past_key_values": cache}
    synchronize(model.device)
    began = time.perf_counter()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        pad_token_id=0,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([clock]),
        **given,
    )
    synchronize(model.device)
    seconds = time.perf_counter() - began
    tokens = output.sequences[:, prompt.shape[1] :]
    return Generation(seconds, tuple(clock.stopwatch.gaps()), tokens, output.past_key_values)


def time_loop(model: Any, cache: Any, token: Tensor, num_steps: int) -> float:
    """Median milliseconds of a step of a bare loop: forward pass, then the token of the largest logit.

    Args:
        model: The model.
        cache: A cache that holds a prompt.
        token: The next token of every row `[B, 1]`.
        num_steps: Timed steps.
    """
    stopwatch = Stopwatch(model.device)
    for step in range(_WARM_UP_STEPS + num_steps):
        if step >= _WARM_UP_STEPS:
            stopwatch.mark()
        token = _next_token(model, cache, token)
    stopwatch.mark()
    return median(stopwatch.gaps())


def time_replay(model: Any, cache: Any, token: Tensor) -> float | None:
    """Median milliseconds of a decode step's own CUDA graph, replayed back to back.

    The step is captured here, so that nothing of the runtime's own replay is measured. A replay appends its
    token as the step did: `cache` is of no use afterwards.

    Args:
        model: A LeanK model.
        cache: Its cache, with a prompt.
        token: The next token of every row `[B, 1]`.

    Returns:
        None where there is no CUDA device.
    """
    if model.device.type != "cuda":
        return None
    cache.use_graphs = False
    # The host does not know of replayed tokens, so room for them is made before.
    cache.reserve(cache.get_seq_length() + _WARM_UP_STEPS + _REPLAYS + 2)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_STEPS):
            token = _next_token(model, cache, token)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _next_token(model, cache, token)
    stopwatch = Stopwatch(model.device)
    for _ in range(_REPLAYS):
        stopwatch.mark()
        graph.replay()
    stopwatch.mark()
    return median(stopwatch.gaps())


def _next_token(model: Any, cache: Any, token: Tensor) -> Tensor:
    logits: Tensor = model(token, past_key_values=cache, use_cache=True).logits
    return logits[:, -1:].argmax(-1)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a `TimeoutError` in what runs inside after some seconds; only in the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
