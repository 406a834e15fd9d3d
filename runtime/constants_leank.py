"""Constants of a layer's cache: the mean taken off keys, and FP8 scales.

Softmax does not see what is added to all keys alike: q·(k - c) differs from q·k by one number per query. So
the mean of keys comes off every key before it is stored. Channels of large constant parts, which biases leave
behind, then round as others do, and a channel that is pruned counts as its mean, not as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .fp8_leank import key_scale_of, scale_of


class Constants(NamedTuple):
    """What a layer's keys and values are stored by, each `[1 or B, H_kv, D]`, fp32, or None.

    `key_mean` comes off every key, after rotary embedding. In FP8 stored keys are multiplied by `key_scale`,
    one for all channels of a head, and stored values by `value_scale`.
    """

    key_mean: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Constants:
        """Return the same with `change` made to each that there is."""
        return Constants(*(None if constant is None else change(constant) for constant in self))

    def take(self, rows: torch.Tensor) -> Constants:
        """Return those of some rows `[n]`; those of all rows stay."""
        return self.map(lambda constant: constant.index_select(0, rows) if len(constant) > 1 else constant)


def centre(keys: torch.Tensor, key_mean: torch.Tensor | None) -> torch.Tensor:
    """Return keys as they are stored: less the mean, in fp32 from their own dtype, and rounded once."""
    if key_mean is None:
        return keys
    return (keys.to(torch.promote_types(keys.dtype, torch.float32)) - key_mean).to(keys.dtype)


def choose_constants(
    keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor | None, kv_dtype: str, model: Constants
) -> Constants:
    """Return a prompt's constants: the model's, and where a rounded cache lacks some, every row's own.

    The prompt's keys and values are `[B, H_kv, S, D]`, its `real` columns `[B, S]`, None if all are; scales
    that the model has are of keys less its mean, if it has one. A row of nothing but padding, whose prompt
    comes in later chunks, has the constants of all rows together.
    """
    model = model.map(lambda constant: constant.to(keys.device, torch.float32))
    if kv_dtype == "auto":
        return Constants(model.key_mean)
    if kv_dtype == "fp8" and model.key_scale is not None:
        return model
    is_empty = None if real is None else ~real.any(1)[:, None, None]
    key_mean = _mean(keys, real, is_empty) if model.key_mean is None else model.key_mean
    if kv_dtype == "int4":
        return Constants(key_mean)
    largest_key = _largest(keys, real, is_empty, key_mean)
    largest_value = _largest(values, real, is_empty, torch.zeros_like(key_mean[:1]))
    return Constants(key_mean, key_scale_of(largest_key), scale_of(largest_value))


def _mean(states: torch.Tensor, real: torch.Tensor | None, is_empty: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of every row's channels `[B, H, D]`, zero where it is not finite."""
    if real is None or is_empty is None:
        mean = states.mean(2, dtype=torch.float32)
    else:
        rows = zip(states, ~real[:, None, :, None], strict=True)
        sums = torch.stack([row.masked_fill(padding, 0).sum(1, dtype=torch.float32) for row, padding in rows])
        counts = real.sum(1)[:, None, None]
        mean = torch.where(is_empty, sums.sum(0) / counts.sum(), sums / counts)
    return mean.masked_fill(~mean.isfinite(), 0)


def _largest(
    states: torch.Tensor, real: torch.Tensor | None, is_empty: torch.Tensor | None, mean: torch.Tensor
) -> torch.Tensor:
    """Return how far every row's channels are from `mean` at most `[B, H, D]`, without a copy of them all."""
    if real is None or is_empty is None:
        return torch.maximum(states.amax(2) - mean, mean - states.amin(2))
    rows = zip(states, ~real[:, None, :, None], strict=True)
    extremes = [
        (row.masked_fill(padding, -torch.inf).amax(1), row.masked_fill(padding, torch.inf).amin(1))
        for row, padding in rows
    ]
    highest, lowest = (torch.stack(parts) for parts in zip(*extremes, strict=True))
    largest = torch.maximum(highest - mean, mean - lowest).masked_fill(is_empty, 0)
    return torch.where(is_empty, largest.amax(0), largest)
