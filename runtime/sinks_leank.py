"""Attention sinks: a logit of each query head that takes its share of the softmax, and adds no value.

To a fused kernel a sink is one more token ahead of all others, with a value of zeros. Its key is one channel
more, in which other keys hold zero and queries the sink's logit: so that heads of a group share it as they
share any key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Fused kernels take heads of a multiple of eight channels.
_NUM_CHANNELS = 8


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    s_aux: torch.Tensor | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by transformers' SDPA, with sinks where the model has some.

    Args:
        module: The attention module, for SDPA's grouped-query settings.
        query: `[B, H, Q, D]`.
        key: `[B, H_kv, S, D]`.
        value: `[B, H_kv, S, D]`.
        attention_mask: Pairs that are seen `[B, 1, Q, S]`, bool; None: causally, or all by a single query.
        s_aux: The logits of the sinks `[H]`, by transformers' name for them.
        scaling: Factor on the other logits; 1/√D if None.
        **kwargs: Passed on to SDPA.

    Returns:
        Output `[B, Q, H, D]` and no attention weights.
    """
    if s_aux is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None
    num_columns, head_dim = query.shape[2:]
    scaling = head_dim**-0.5 if scaling is None else scaling
    is_square = attention_mask is None and num_columns > 1
    if is_square:
        query = pad(query, (0, 0, 1, 0))  # SDPA's causal mask wants a query for the sink too
    elif attention_mask is not None:
        attention_mask = pad(attention_mask, (1, 0), value=True)
    states = add_sink_token(query, key, value, s_aux, scaling)
    output, _ = sdpa_attention_forward(module, *states, attention_mask, scaling=scaling, **kwargs)
    return output[:, int(is_square) :, :, :head_dim].contiguous(), None


def add_sink_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put the token that stands for the sinks before all others, and its channel behind all others.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, H_kv, S, D]`.
        value: `[B, H_kv, S, D]`.
        sinks: `[H]`.
        scaling: Factor on the logits.

    Returns:
        `[B, H, Q, D + 8]`, and twice `[B, H_kv, S + 1, D + 8]`.
    """
    logits = (sinks.to(query) / scaling)[None, :, None, None].expand(*query.shape[:3], 1)
    query = torch.cat([query, pad(logits, (0, _NUM_CHANNELS - 1))], dim=-1)
    head_dim = key.shape[3]
    key, value = (pad(states, (0, _NUM_CHANNELS, 1, 0)) for states in (key, value))
    key[:, :, 0, head_dim] = 1
    return query, key, value
