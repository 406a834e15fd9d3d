"""Keys and values in eight bits: e4m3 numbers, and scales per channel that are powers of two.

stored = clamp(x / scale, -448, 448), rounded to nearest even. A scale that is a power of two divides and
multiplies without rounding. So queries take the scales of keys and outputs those of values, and what is
stored is read as it lies; no token has a scale of its own. All that moves what is stored moves bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
SCALE_NAMES = ("key_scale", "value_scale")
"""Buffers of an attention module, each `[H_kv, D]`, in a checkpoint that holds scales."""
_LARGEST = 448.0
# Powers of two that fp16 has as well, whatever a model's buffers are cast to.
_EXPONENTS = (-14, 15)


class Scales(NamedTuple):
    """What stored keys and values of a layer are multiplied by.

    Attributes:
        keys: Per channel, after rotary embedding; one for both channels of a pair `[1 or B, H_kv, D]`, fp32.
        values: Per channel `[1 or B, H_kv, D]`, fp32.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Scales:
        """Return both with `change` made to them."""
        return Scales(change(self.keys), change(self.values))


def choose_scales(keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor | None) -> Scales:
    """Choose the scales of every row of a prompt by its largest numbers.

    Args:
        keys: `[B, H_kv, S, D]`.
        values: `[B, H_kv, S, D]`.
        real: Columns that are no padding `[B, S]`, bool; None if all are.

    Returns:
        Scales per row; a row of nothing but padding, whose prompt comes in later chunks, has those of all
        rows together.
    """
    largest_key, largest_value = (_largest(states, real) for states in (keys, values))
    if real is not None:
        is_empty = ~real.any(1)[:, None, None]
        largest_key, largest_value = (
            torch.where(is_empty, largest.amax(0), largest) for largest in (largest_key, largest_value)
        )
    pairs = torch.maximum(*largest_key.chunk(2, dim=-1))
    return Scales(scale_of(pairs.repeat(1, 1, 2)), scale_of(largest_value))


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """Return 2^ceil(log2(2 * largest / 448)): the scale of channels, with room for numbers twice as large.

    Args:
        largest: Largest absolute number of every channel; one of zeros, or that is not finite, gets 1.
    """
    largest = largest.float()
    fraction, exponent = torch.frexp(largest / (_LARGEST / 2))
    exponent = (exponent - (fraction == 0.5).int()).clamp(*_EXPONENTS)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return torch.where((largest > 0) & largest.isfinite(), scale, 1)


def _largest(states: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Return the largest absolute number of every row's channels `[B, H, D]`, without a copy of them all."""
    if real is not None:
        rows = zip(states, ~real[:, None, :, None], strict=True)
        states_of_rows = [row.masked_fill(padding, 0) for row, padding in rows]
        return torch.stack([torch.maximum(row.amax(1), -row.amin(1)) for row in states_of_rows])
    return torch.maximum(states.amax(2), -states.amin(2))


def quantise(states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return numbers as they are stored, given their scales; NaN stays NaN."""
    return (states.float() / scale).clamp(-_LARGEST, _LARGEST).to(FP8)


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """Return FP8 numbers as the bytes that they are, others as they are: few operators know FP8."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def check_scales(scales: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check the scales of a checkpoint, those of all layers at once.

    Args:
        scales: Of keys and of values of every layer `[H_kv, D]`.

    Raises:
        ValueError: If one is no power of two that every dtype has, or is offloaded.
    """
    for number, layer in enumerate(scales):
        for name, scale in zip(SCALE_NAMES, layer, strict=True):
            if scale.is_meta:
                raise ValueError(
                    f"layer {number}: `{name}` is offloaded and cannot be read; load the model without "
                    "`offload_buffers`"
                )
    # On one device, which layers need not be.
    layers = torch.stack([torch.stack([scale.float().cpu() for scale in layer]) for layer in scales])
    fraction, exponent = torch.frexp(layers)
    low, high = _EXPONENTS
    wrong = ((fraction != 0.5) | (exponent <= low) | (exponent > high + 1)).nonzero()
    if len(wrong):
        layer, place = wrong[0, :2].tolist()
        value = float(layers[tuple(wrong[0])])
        raise ValueError(
            f"layer {layer}: `{SCALE_NAMES[place]}` holds {value}, which is no power of two from 2^{low} to "
            f"2^{high}; copy or export the checkpoint again"
        )
