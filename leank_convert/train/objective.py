"""What training minimises, and at what rate."""

from __future__ import annotations

import torch
from torch import Tensor


def distillation_loss(teacher: Tensor, student: Tensor, owners: Tensor) -> Tensor:
    """Mean over questions of the mean over tokens and hidden dims of the squared difference, in float32.

    Args:
        teacher: Final-norm hidden states of the dense model at the answer tokens [R, hidden_size].
        student: Those of the pruned model, same shape.
        owners: Which question each token answers [R], counted from 0, none left out; on the CPU.

    Returns:
        A scalar.
    """
    by_token = (teacher.float() - student.float()).square().mean(-1)
    counts = torch.bincount(owners)
    weights = 1 / (counts[owners] * len(counts))
    return (by_token * weights.to(by_token.device, non_blocking=True)).sum()


def l1_penalty(scaling_factors: Tensor) -> Tensor:
    """Mean absolute scaling factor over the whole model, a scalar."""
    return scaling_factors.abs().mean()


def learning_rate_factor(step: int, num_steps: int) -> float:
    """What the stage's learning rate is multiplied by at a step.

    It rises over the first fifth of the steps, falls over the last, and never goes under a tenth.

    Args:
        step: Counted from 0.
        num_steps: Steps of the stage.
    """
    ramp = num_steps / 5
    return max(0.1, min(1.0, (step + 1) / ramp, (num_steps - step) / ramp))
