"""Scaling factors and gates: initial values, loss terms and learning rates.

Scaling factors in [0, 1] are one per layer, KV head and channel; gates, one per head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def ones(shape: Sequence[int], device: torch.device) -> Tensor:
    """Factors or gates of the dense model, from which training starts, float32 of a shape."""
    return torch.ones(*shape, dtype=torch.float32, device=device, requires_grad=True)


def straight_through(scaling_factors: Tensor, channel_mask: Tensor) -> Tensor:
    """The mask as exact zeros and ones, whose gradient is handed to the scaling factors unchanged.

    Pruned channels get theirs too, so a channel can come back. The exception is a head without any channel:
    it does not see the middle, so its factors get a gradient of zero, and it comes back only when its rank
    rises because those of other heads sink.

    All are [L, H_kv, D].
    """
    return channel_mask + (scaling_factors - scaling_factors.detach())


def distillation_loss(teacher: Tensor, student: Tensor, owners: Tensor) -> Tensor:
    """Mean over questions of the mean over tokens and hidden dims of the squared difference, in float32.

    Final-norm hidden states are [R, hidden_size]; `owners` [R] say which question each token answers, counted
    from 0, none left out; -1 for padding.
    """
    by_token = (teacher.float() - student.float()).square().mean(-1)
    counts = (owners[:, None] == owners).sum(-1) * (owners.max() + 1)  # as no `bincount`, without waiting
    weights = torch.where(owners < 0, 0.0, 1 / counts)
    return (by_token * weights.to(by_token.device, non_blocking=True)).sum()


def l1_penalty(scaling_factors: Tensor) -> Tensor:
    """Mean absolute scaling factor over the whole model, a scalar."""
    return scaling_factors.abs().mean()


def learning_rate_factor(step: int, num_steps: int) -> float:
    """What a stage's learning rate is multiplied by at a step, counted from 0.

    It rises over the first fifth of the steps, falls over the last, and never goes under a tenth.
    """
    ramp = num_steps / 5
    return max(0.1, min(1.0, (step + 1) / ramp, (num_steps - step) / ramp))
