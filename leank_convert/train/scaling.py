"""What training learns: scaling factors in [0, 1] per layer, KV head and channel, or gates, one per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts


def initial_scaling_factors(facts: ModelFacts, device: torch.device) -> Tensor:
    """All ones, float32 [L, H_kv, D]: training starts from the dense model."""
    shape = (facts.num_hidden_layers, facts.num_key_value_heads, facts.head_dim)
    return torch.ones(shape, dtype=torch.float32, device=device, requires_grad=True)


def initial_gates(facts: ModelFacts, device: torch.device) -> Tensor:
    """All ones, float32 [L, H_kv, 1]: every head sees the middle as the dense model does."""
    shape = (facts.num_hidden_layers, facts.num_key_value_heads, 1)
    return torch.ones(shape, dtype=torch.float32, device=device, requires_grad=True)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scaling_factors: Tensor, channel_mask: Tensor) -> Tensor:
        return channel_mask.to(scaling_factors.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


def straight_through(scaling_factors: Tensor, channel_mask: Tensor) -> Tensor:
    """The mask as exact zeros and ones, whose gradient is handed to the scaling factors unchanged.

    Pruned channels get theirs too, so a channel can come back. The exception is a head without any channel:
    it does not see the middle, so its factors get a gradient of zero, and it comes back only when its rank
    rises because those of other heads sink.

    Args:
        scaling_factors: Float [L, H_kv, D].
        channel_mask: Bool [L, H_kv, D].

    Returns:
        Float [L, H_kv, D] of zeros and ones.
    """
    result: Tensor = _StraightThrough.apply(scaling_factors, channel_mask)  # type: ignore[no-untyped-call]
    return result
