"""Scores of channels by methods that train nothing: [L, H_kv, D], higher is better."""

from __future__ import annotations

import torch
from torch import Tensor

from leank_convert.methods.calibration import Calibration


def static_norm(calibration: Calibration) -> Tensor:
    """The norm ratio r_i, averaged over prompts: the LeanK paper's static baseline (its section 2.2)."""
    return calibration.statistics().channel_norms


def double_sparsity(calibration: Calibration) -> Tensor:
    """The mean of |q_i k_i| of each token's query with its own key, averaged over prompts.

    This is how Double Sparsity (Yang et al., arXiv 2408.07092) finds its outlier channels offline: kind `qk`,
    "Method 1", of `config/offline_calibration.py` in its repository, github.com/andy-yang-1/DoubleSparse.
    There it is ranked per query head; here a KV head's channels are shared by G of them, whose mean is taken.
    """
    return calibration.statistics().product_magnitudes


def high_frequency_ratio(calibration: Calibration) -> Tensor:
    """The negated ratio w_hf, equal for all channels of a head: heads with the highest go (section 5.2)."""
    return -calibration.statistics().high_frequency_ratio[..., None].expand(calibration.shape)


def random(calibration: Calibration) -> Tensor:
    """Independent uniform numbers, a function of the recipe's seed and the model's shape."""
    return torch.rand(calibration.shape, generator=torch.Generator().manual_seed(calibration.recipe.seed))
