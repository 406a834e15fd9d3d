"""Statistics of a model's channels from one dense pass over a prompt: queries and keys after RoPE.

Letters: L layers, H query heads, H_kv KV heads, G = H / H_kv, N tokens, W tokens of the observation window,
D head_dim. Channels i and i + D/2 are one RoPE pair in most families, whose frequency falls with i.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank_convert.errors import NotFiniteError
from leank_convert.families import ARCHITECTURES
from leank_convert.train.attention import MeasuringPass, centre_keys

# Queries of the paper's observation window, "the last part of the input"; as many as ThinK takes.
OBSERVATION_WINDOW = 32


class AttentionStatistics(NamedTuple):
    """Statistics of one prompt, float32 on the CPU."""

    # The paper's r_i (appendix "Quantifying K Channel Staticity"): ||Q_i K_i^T|| / ||Q K^T|| in the Frobenius
    # norm, Q the last 32 queries, K all keys; the mean over a KV head's G query heads [L, H_kv, D].
    channel_norms: Tensor
    # The paper's w_hf (section "High Frequency Ratio of Each Head"): ||q_high K_high^T|| / ||q K^T||, q the
    # prompt's last query, "high" the faster half of the RoPE pairs; one ratio over the G query heads, whose
    # logits are stacked [L, H_kv].
    high_frequency_ratio: Tensor
    # The mean over tokens and the G query heads of |q_i k_i|, each token's query with its own key [L, H_kv,
    # D].
    product_magnitudes: Tensor


@torch.no_grad()
def measure_attention(
    model: PreTrainedModel, input_ids: Tensor, key_mean: Tensor | None = None
) -> AttentionStatistics:
    """Measure a dense pass over a prompt [N], keys less a mean [L, H_kv, D]; may raise NotFiniteError.

    The model is loaded with `attention.ATTENTION_NAME`.
    """
    layers: list[AttentionStatistics] = []

    def measure(module: Any, query: Tensor, key: Tensor) -> None:
        high = _fast_channels(module, key.shape[-1]).to(key.device)
        if key_mean is not None:
            key = centre_keys(key, key_mean[len(layers)])
        # By KV head: the products of a long prompt, in float32, are the largest thing there is.
        grouped = query.reshape(key.shape[0], -1, *query.shape[1:])
        heads = [_measure_head(*head, high) for head in zip(grouped, key, strict=True)]
        layers.append(AttentionStatistics(*(torch.stack(found).cpu() for found in zip(*heads, strict=True))))

    with torch.compiler.set_stance("force_eager"):
        model.base_model(input_ids[None].to(model.device), use_cache=False, leank_pass=MeasuringPass(measure))
    statistics = AttentionStatistics(*map(torch.stack, zip(*layers, strict=True)))
    for name, values in statistics._asdict().items():
        if not bool(torch.isfinite(values).all()):
            raise NotFiniteError(f"`{name}` of a prompt of {len(input_ids)} tokens is not finite")
    return statistics


def high_frequency_channels(head_dim: int, *, rotated: int, interleaved: bool) -> Tensor:
    """Bool [D]: True for the faster half of the RoPE pairs; channels that are not rotated are in none.

    The first R channels are, as `rotated` says. Pairs are i and i + R/2, or if interleaved 2i and 2i + 1.
    """
    channel = torch.arange(head_dim)
    pair = channel // 2 if interleaved else channel % max(rotated // 2, 1)
    return (channel < rotated) & (pair < rotated // 4)


def _fast_channels(module: Any, head_dim: int) -> Tensor:
    if not getattr(module, "use_rope", True):  # SmolLM3's layers without rotation
        return torch.zeros(head_dim, dtype=torch.bool)
    family = ARCHITECTURES.get(module.config.model_type)
    ropes = module.config.rope_parameters
    rotated = int(head_dim * ropes.get("full_attention", ropes).get("partial_rotary_factor", 1))
    interleaved = family is not None and family.interleaved_pairs
    return high_frequency_channels(head_dim, rotated=rotated, interleaved=interleaved)


def _measure_head(queries: Tensor, keys: Tensor, high: Tensor) -> AttentionStatistics:
    """Norm ratios [D], high-frequency ratio and product magnitudes [D] of queries [G, N, D], keys [N, D]."""
    keys = keys.float()
    window = queries[:, -OBSERVATION_WINDOW:].float()
    # The outer product of two vectors has the product of their norms.
    channels = torch.linalg.vector_norm(window, dim=1) * torch.linalg.vector_norm(keys, dim=0)
    logits = window @ keys.T  # [G, W, N]
    norms = channels / torch.linalg.vector_norm(logits, dim=(1, 2))[:, None]

    high_logits = window[:, -1, high] @ keys[:, high].T
    ratio = torch.linalg.vector_norm(high_logits) / torch.linalg.vector_norm(logits[:, -1])

    products = torch.stack([(query.float() * keys).abs().mean(0) for query in queries])
    return AttentionStatistics(norms.mean(0), ratio, products.mean(0))
