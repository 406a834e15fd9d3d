"""Whole calls of `generate`: how long they take, up to the first logits, and from token to token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from bin.benchmarks.measuring import Stopwatch, synchronize


def time_generate(model: Any, prompt: Tensor, num_new: int, rounds: int) -> dict[str, Any]:
    """Figures of several calls of `generate`; medians."""
    calls = []
    for _ in range(rounds):
        call = generate(model, prompt, num_new)
        graph = getattr(call.cache, "graph", None)
        # A cache goes before the next one comes.
        calls.append(replace(call, cache=None))
        del call
    seconds = median(call.seconds for call in calls)
    figures = {
        "rounds": rounds,
        "step_milliseconds": median(gap for call in calls for gap in call.step_milliseconds),
        "generate_seconds": seconds,
        "decode_seconds": median(call.seconds - call.prefill_seconds for call in calls),
        "prefill_share": median(call.prefill_seconds / call.seconds for call in calls),
        "tokens_per_second": prompt.shape[0] * num_new / seconds,
    }
    if graph is None:
        return figures
    replayed = {"captures": graph.num_captures, "replays": graph.num_replays, "why_eager": graph.why_eager}
    return {**figures, "graph": replayed}


class _StepClock(LogitsProcessor):
    """Marks the moment between a step's forward pass and the choice of its token."""

    def __init__(self, device: torch.device) -> None:
        self.stopwatch = Stopwatch(device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.stopwatch.mark()
        return scores


@dataclass(frozen=True)
class Generation:
    """One call of `generate`: the whole of it, up to the first logits, from token to token; its cache."""

    seconds: float
    prefill_seconds: float
    step_milliseconds: Sequence[float]
    cache: Any


def generate(model: Any, prompt: Tensor, num_new: int) -> Generation:
    """Call `generate`, greedy, on a prompt `[B, S]` for `num_new` tokens."""
    clock = _StepClock(model.device)
    synchronize(model.device)
    began = time.perf_counter()
    clock.stopwatch.mark()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        pad_token_id=0,
        return_dict_in_generate=True,
        logits_processor=LogitsProcessorList([clock]),
    )
    synchronize(model.device)
    seconds = time.perf_counter() - began
    prefill, *steps = clock.stopwatch.gaps()
    return Generation(seconds, prefill / 1e3, steps, output.past_key_values)
