"""`bin/benchmark memory`: bytes of the cache, peak of a prefill, the largest batch, beside the dense model.

The largest batch is found by trying: rows are allocated and decoded, not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from bin.benchmarks.generate import call_generate
from bin.benchmarks.measuring import peak_bytes, release_memory, synchronize
from bin.benchmarks.random_models import COMPILED, DENSE, OURS, Setup, checked_models, random_prompt
from bin.benchmarks.tables import RATIO, SHARE, Column, Report, write
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.head_layout import count_cache_bytes

_COLUMNS = {
    "rows": Column("batch", "{:.0f}"),
    "by bytes": Column("predicted_by_bytes", "{:.0f}"),
    "MB a row": Column("row_bytes", "{:,.1f}", 1e6),
    "of dense": Column("ratio", RATIO),
}
# Prompt and new tokens of the row whose cache is counted; batch and prompt of the prefill.
_SIZES, _TOY_SIZES = ((32768, 128), (4, 32768)), ((180, 12), (2, 64))
_DECODED_STEPS = 8  # enough that a step is run eagerly, captured and replayed


def benchmark_memory(
    setup: Setup, *, largest: Sequence[tuple[int, int]], limit: float | None
) -> dict[str, Any]:
    """Count a row's cache, measure the peak of a prefill and find largest batches.

    `largest` are prompt and new tokens of each batch. Weights and cache may take `limit` GB in a search, None
    for all there are.
    """
    report = Report(setup.device, setup.describe())
    results: dict[str, Any] = {}
    most = None if limit is None else round(limit * 1e9)
    allocated, prefill = _TOY_SIZES if setup.is_toy else _SIZES
    lengths = [sum(case) for case in largest] + [allocated[0]]
    with checked_models({OURS: setup}, max(lengths), report) as models:
        # Plain torch holds more during a step, so fewer rows fit.
        label = OURS if models.attention == COMPILED else f"{OURS} ({models.attention})"
        sides = {OURS: models.ours, DENSE: models.dense}
        if models.check["ok"]:
            results["allocated"] = count_allocated(report, models.ours, setup, *allocated)
            results["prefill"] = measure_prefill(report, sides, *prefill)
            results["largest_batch"] = [find_batches(sides, *case, limit=most) for case in largest]
            _print_batches(report, results["largest_batch"], label)
    return report.document("memory", **models.facts, **results)


def count_allocated(
    report: Report, model: Any, setup: Setup, num_prompt: int, num_new: int
) -> dict[str, Any]:
    """Count a row's cache as a `generate` call leaves it.

    A whole window is a constant; what the append-only store allocates is divided by the tokens that it holds.
    """
    *_, cache = call_generate(model, random_prompt(model, 1, num_prompt), num_new)
    memory, num_tokens = cache.memory(), cache.get_seq_length()
    regions = {name: value for name, value in asdict(memory).items() if isinstance(value, dict)}
    beyond = memory.kept_keys.allocated + memory.kept_values.allocated
    dense = memory.dense_keys + memory.dense_values
    mask, head_dim = setup.mask, setup.geometry.facts.head_dim
    ideal = count_cache_bytes(mask.widths, head_dim, model.dtype.itemsize, setup.kv_dtype, mask.stored_values)
    release_memory(model.device)
    whole = memory.total.allocated / dense
    report.line(
        f"cache of one row, prompt {num_prompt}, {num_new} new tokens: {beyond / num_tokens:,.0f} bytes a "
        f"token allocated beyond the window, {beyond / dense:.4f} of {dense / num_tokens:,.0f} dense (by "
        f"widths {1 - ideal.saved:.4f}); {whole:.4f} with it"
    )
    return {
        "prompt": num_prompt,
        "new": num_new,
        "tokens": num_tokens,
        "regions": regions,
        "dense_bytes_per_token": dense / num_tokens,
        "allocated_bytes_per_token_beyond_window": beyond / num_tokens,
        "share_of_dense_beyond_window": beyond / dense,
        "ideal_share_beyond_window": 1 - ideal.saved,
        "share_of_dense_with_window": whole,
    }


def measure_prefill(
    report: Report, sides: dict[str, Any], batch_size: int, num_prompt: int
) -> dict[str, Any]:
    """Peak of what is allocated during a prefill, beyond what was allocated before it; null on the CPU."""
    result: dict[str, Any] = {"batch": batch_size, "prompt": num_prompt}
    prompt = random_prompt(sides[OURS], batch_size, num_prompt)
    for name, side in sides.items():
        release_memory(prompt.device)
        peak, before = peak_bytes(prompt.device, partial(side, prompt, use_cache=True, logits_to_keep=1))
        result[name] = {"peak_bytes": None if peak is None else peak - before}
    release_memory(prompt.device)
    ours, theirs = (result[name]["peak_bytes"] for name in sides)
    result["share_of_dense"] = ours / theirs if ours and theirs else None
    report.line(
        f"prefill of {batch_size} x {num_prompt} tokens, peak beyond the weights, cache included: leank "
        f"{write(ours, unit=1e9)} GB, dense {write(theirs, unit=1e9)} GB, "
        f"{write(result['share_of_dense'], SHARE)} of it"
    )
    return result


class Trial:
    """Tries batches of rows of one prompt with one model, within `limit` bytes for weights and cache, if any.

    A row is prefilled up to the last few of all tokens, repeated layer by layer, and decoded: a batch that
    fits has been decoded at its final length. `row_bytes` is what one row's cache takes there.
    """

    def __init__(self, model: Any, num_prompt: int, num_new: int, limit: int | None) -> None:
        self._model, self._device = model, model.device
        self._length = num_prompt + num_new
        # A call may ask for fewer new tokens than are decoded here.
        num_steps = min(_DECODED_STEPS, num_new)
        tokens = random_prompt(model, 1, self._length)
        self._prompt, self._new = tokens[:, :-num_steps], tokens[:, -num_steps:]
        weights = sum(weight.nbytes for weight in model.parameters())
        self._left = None if limit is None else limit - weights
        self.row_bytes = count_bytes(self._decode(1))
        release_memory(self._device)

    def predict(self) -> int:
        """How many rows the bytes of one suggest."""
        free = torch.cuda.mem_get_info(self._device)[0] if self._left is None else self._left
        return max(free // self.row_bytes, 1)

    def fits(self, batch_size: int) -> bool:
        """Try a batch."""
        held = None
        with suppress(torch.OutOfMemoryError):
            held = count_bytes(self._decode(batch_size))
        release_memory(self._device)
        return held is not None and (self._left is None or held <= self._left)

    def _decode(self, batch_size: int) -> Any:
        """Repeat the row and decode to the end; returns the cache."""
        if hasattr(self._model, "build_cache"):
            cache = self._model.build_cache()
            cache.reserve(self._length)
        else:
            cache = DynamicCache(config=self._model.config)
        self._model(self._prompt, logits_to_keep=1, **{CACHE: cache})
        cache.batch_repeat_interleave(batch_size)
        for column in range(self._new.shape[1]):
            token = self._new[:, column : column + 1].repeat(batch_size, 1)
            self._model(token, use_cache=True, **{CACHE: cache})
        synchronize(self._device)
        return cache


def count_bytes(cache: Any) -> int:
    """The bytes that a cache holds."""
    if hasattr(cache, "memory"):
        return int(cache.memory().total.allocated)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def find_largest(fits: Callable[[int], bool], guess: int) -> tuple[int, dict[int, bool]]:
    """Find the largest count that fits, 0 if not even 1 does, and all that were tried, from a guess on.

    What fits is taken to have no gaps.
    """
    tried: dict[int, bool] = {}
    low, high, stride = 0, None, 1  # low fits, high does not
    count = max(guess, 1)
    while high is None or high - low > 1:
        tried[count] = fits(count)
        low, high = (count, high) if tried[count] else (low, count)
        if high is not None and low > 0:
            count = (low + high) // 2
        else:  # away from the guess, ever faster
            count = low + stride if high is None else max(high - stride, 1)
            stride *= 2
    return low, tried


def find_batches(
    sides: dict[str, Any], num_prompt: int, num_new: int, *, limit: int | None
) -> dict[str, Any]:
    """The largest batch of both models for one prompt length and number of new tokens."""
    result: dict[str, Any] = {"prompt": num_prompt, "new": num_new}
    for name, model in sides.items():
        trial = Trial(model, num_prompt, num_new, limit)
        predicted = trial.predict()
        found, tried = find_largest(trial.fits, predicted)
        facts = {"batch": found, "predicted_by_bytes": predicted, "row_bytes": trial.row_bytes}
        result[name] = {**facts, "tried": {str(count): tried[count] for count in sorted(tried)}}
    ours, theirs = (result[name]["batch"] for name in sides)
    return {**result, "ratio": ours / theirs if theirs else None}


def _print_batches(report: Report, found: Sequence[dict[str, Any]], label: str) -> None:
    rows = [
        (
            f"{label if name == OURS else name}, {case['prompt']} + {case['new']}",
            case[name] | {"ratio": case["ratio"] if name == OURS else 1.0},
        )
        for case in found
        for name in (OURS, DENSE)
    ]
    notes = ["rows: tried, one more does not fit; by bytes: free memory over one row's bytes, not tried"]
    report.table("largest batch, of rows of one prompt, decoded together to the end", _COLUMNS, rows, notes)
