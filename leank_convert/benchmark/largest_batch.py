"""The largest batch that fits, found by trying: rows are allocated, joined and decoded, not counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from leank_convert.benchmark.environment import release_memory
from leank_convert.benchmark.models import random_prompt

_DECODED_STEPS = 8  # enough that a step is run eagerly, captured and replayed


def find_largest(fits: Callable[[int], bool], guess: int) -> tuple[int, dict[int, bool]]:
    """Find the largest count that fits, starting near a guess; what fits is taken to have no gaps.

    Args:
        fits: Tries a count, from 1 up.
        guess: Where it is expected.

    Returns:
        The count, 0 if not even 1 fits, and every count that was tried.
    """
    tried: dict[int, bool] = {}

    def try_count(count: int) -> bool:
        if count not in tried:
            tried[count] = fits(count)
        return tried[count]

    low, high, stride = 0, None, 1  # low fits, high does not
    count = max(guess, 1)
    while high is None or high - low > 1:
        if try_count(count):
            low = count
        else:
            high = count
        if high is None:
            count, stride = low + stride, 2 * stride
        elif low == 0 and high > 1:
            count, stride = max(high - stride, 1), 2 * stride
        else:
            count = (low + high) // 2
    return low, tried


class Side(Protocol):
    """A model and the cache it decodes from.

    Attributes:
        model: The model.
    """

    model: Any

    def prefill(self, prompt: Tensor, num_tokens: int) -> Any:
        """Return a cache with one row, of which it is known that it will have `num_tokens` tokens."""

    def copy_row(self, row: Any) -> Any:
        """Return another cache with the same row."""

    def join(self, rows: list[Any], num_tokens: int) -> Any:
        """Make one cache of many, which are empty afterwards, with room for `num_tokens` tokens a row."""

    def count_bytes(self, cache: Any) -> int:
        """Count the bytes that a cache holds."""


class LeanKSide:
    """Ours: rows become one `LeanKCache`, with room for every token that will come."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, prompt: Tensor, num_tokens: int) -> Any:
        """Return a cache with one row."""
        cache = self.model.build_cache()
        cache.reserve(num_tokens)
        self.model(prompt, past_key_values=cache, logits_to_keep=1)
        return cache

    def copy_row(self, row: Any) -> Any:
        """Return another cache with the same row."""
        return copy.deepcopy(row)

    def join(self, rows: list[Any], num_tokens: int) -> Any:
        """Make one cache of many, layer by layer."""
        return type(rows[0]).concatenate(rows, num_tokens)

    def count_bytes(self, cache: Any) -> int:
        """Count the bytes that a cache holds."""
        return int(cache.memory().total.allocated)


class DenseSide:
    """The dense model: rows become one `DynamicCache`, which grows by itself."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def prefill(self, prompt: Tensor, num_tokens: int) -> Any:
        """Return a cache with one row."""
        return self.model(prompt, use_cache=True, logits_to_keep=1).past_key_values

    def copy_row(self, row: Any) -> Any:
        """Return another cache with the same row."""
        return copy.deepcopy(row)

    def join(self, rows: list[Any], num_tokens: int) -> Any:
        """Make one cache of many, layer by layer."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for index in range(len(rows[0].layers)):
            for name in ("keys", "values"):
                joined = torch.cat([getattr(row.layers[index], name) for row in rows])
                for row in rows:
                    setattr(row.layers[index], name, None)
                if name == "keys":
                    keys = joined
            layer: Any = cache.layers[index]
            layer.lazy_initialization(keys, joined)
            layer.keys, layer.values = keys, joined
        return cache

    def count_bytes(self, cache: Any) -> int:
        """Count the bytes that a cache holds."""
        tensors = [states for layer in cache.layers for states in (layer.keys, layer.values)]
        return sum(states.numel() * states.element_size() for states in tensors)


@dataclass
class Trial:
    """Tries batches of rows of one prompt on one side.

    A row is prefilled up to the last few of all tokens and copied, and becomes the batch's last row itself: a
    batch that fits has been decoded at its final length, and nothing but the batch was held.

    Attributes:
        side: The model and its cache.
        num_prompt: Prompt tokens.
        num_new: New tokens.
        limit: Bytes that weights and cache may take together; None for what the device has.
        row_bytes: Bytes of one row's cache at the final length.
    """

    side: Side
    num_prompt: int
    num_new: int
    limit: int | None
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        length = self.num_prompt + self.num_new
        # A call may ask for fewer new tokens than are decoded here.
        num_steps = min(_DECODED_STEPS, self.num_new)
        tokens = random_prompt(self.side.model, 1, length)
        self._prompt, self._new = tokens[:, :-num_steps], tokens[:, -num_steps:]
        self.row_bytes = self.side.count_bytes(self._decode(1))
        release_memory(self.side.model.device)

    def predict(self) -> int:
        """How many rows the bytes of one suggest."""
        device = self.side.model.device
        if self.limit is not None:
            free = self.limit - _weight_bytes(self.side.model)
        else:
            free, _ = torch.cuda.mem_get_info(device)
        return max(free // self.row_bytes, 1)

    def fits(self, batch_size: int) -> bool:
        """Try a batch."""
        held = None
        with suppress(torch.OutOfMemoryError):
            held = self.side.count_bytes(self._decode(batch_size))
        release_memory(self.side.model.device)
        if held is None:
            return False
        return self.limit is None or held + _weight_bytes(self.side.model) <= self.limit

    def _decode(self, batch_size: int) -> Any:
        """Join copies of the row and decode to the end; returns the cache."""
        model = self.side.model
        num_tokens = self.num_prompt + self.num_new
        row = self.side.prefill(self._prompt, num_tokens)
        rows = [self.side.copy_row(row) for _ in range(batch_size - 1)] + [row]
        cache = self.side.join(rows, num_tokens)
        for column in range(self._new.shape[1]):
            token = self._new[:, column : column + 1].repeat(batch_size, 1)
            model(token, past_key_values=cache, use_cache=True)
        if self.side.model.device.type == "cuda":
            torch.cuda.synchronize(self.side.model.device)
        return cache


def _weight_bytes(model: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())
