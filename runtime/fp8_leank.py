"""FP8 cache format: e4m3 numbers and power-of-two scales, of keys per head, of values per channel.

stored = clamp(x / scale, -448, 448), rounded to nearest even. A scale that is a power of two divides and
multiplies without rounding. So queries take the scales of keys and outputs those of values, and what is
stored is read as it lies; no token has a scale of its own. All that moves what is stored moves bytes.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
SCALE_NAMES = ("key_scale", "value_scale")
"""Buffers of an attention module, each `[H_kv, D]`, in a checkpoint that holds scales."""
_LARGEST = 448.0
EXPONENTS = (-14, 15)
"""Least and greatest scale: powers of two that fp16 has as well, whatever a model's buffers are cast to."""


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    """Return 2^ceil(log2(2 * largest / 448)): the scale of channels, with room for numbers twice as large.

    A channel whose largest absolute number is zero or not finite gets 1.
    """
    largest = largest.float()
    fraction, exponent = torch.frexp(largest / (_LARGEST / 2))
    exponent = (exponent - (fraction == 0.5).int()).clamp(*EXPONENTS)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return torch.where((largest > 0) & largest.isfinite(), scale, 1)


def key_scale_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the scale of keys by the largest number of each channel `[..., D]`: one for all of a head.

    Rotation turns a channel's numbers into its partner's as positions grow. Which that is differs by family.
    """
    finite = largest.masked_fill(~largest.isfinite(), 0)
    return scale_of(finite.amax(-1, keepdim=True).expand_as(largest))


def quantise(states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return numbers as they are stored, given their scales; NaN stays NaN."""
    return (states.float() / scale).clamp(-_LARGEST, _LARGEST).to(FP8)


def reread(states: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return numbers as they are read once they were stored, by scales or as they come."""
    return states if scale is None else (quantise(states, scale).float() * scale).to(states.dtype)


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """Return FP8 numbers as the bytes that they are, others as they are: few operators know FP8."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool
