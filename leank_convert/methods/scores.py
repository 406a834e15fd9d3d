"""What each method that trains nothing takes for a channel's worth: [L, H_kv, D], higher is better."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from leank_convert.architectures import ModelFacts
from leank_convert.methods.statistics import AttentionStatistics


def static_norm(statistics: AttentionStatistics) -> Tensor:
    """The norm ratio r_i, averaged over prompts: the LeanK paper's static baseline (its section 2.2)."""
    return statistics.channel_norms


def double_sparsity(statistics: AttentionStatistics) -> Tensor:
    """The mean of |q_i k_i| of each token's query with its own key, averaged over prompts.

    This is how Double Sparsity (Yang et al., arXiv 2408.07092) finds its outlier channels offline: kind `qk`,
    "Method 1", of `config/offline_calibration.py` in its repository, github.com/andy-yang-1/DoubleSparse.
    There it is ranked per query head; here a KV head's channels are shared by G of them, whose mean is taken.
    """
    return statistics.product_magnitudes


def high_frequency_ratio(statistics: AttentionStatistics) -> Tensor:
    """The negated ratio w_hf, equal for all channels of a head: heads with the highest go (section 5.2)."""
    head_dim = statistics.channel_norms.shape[-1]
    return -statistics.high_frequency_ratio[..., None].expand(-1, -1, head_dim)


def random(facts: ModelFacts, seed: int) -> Tensor:
    """Independent uniform numbers, a function of the seed and the model's shape."""
    shape = (facts.num_hidden_layers, facts.num_key_value_heads, facts.head_dim)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


# By the name of a recipe's `method`.
MEASURED: Mapping[str, Callable[[AttentionStatistics], Tensor]] = {
    "static-norm": static_norm,
    "double-sparsity": double_sparsity,
    "high-frequency-ratio": high_frequency_ratio,
}
