"""Attention sinks: a logit per query head that takes a share of the softmax and adds no value.

To a fused kernel a sink is one more token ahead of all others, with a value of zeros. Its key is two channels
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
    s_aux: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by transformers' SDPA, with sinks of logits `s_aux` `[H]`, by transformers' name for them.

    Queries are `[B, H, Q, D]`, keys and values `[B, H_kv, S, D]`; the mask tells which pairs are seen
    `[B, 1, Q, S]`, None: causally, or all by a single query. Returns `[B, Q, H, D]` and no attention weights.
    """
    num_columns, head_dim = query.shape[2:]
    scaling = head_dim**-0.5 if scaling is None else scaling
    is_square = attention_mask is None and num_columns > 1
    if is_square:
        query = pad(query, (0, 0, 1, 0))  # SDPA's causal mask wants a query for the sink too
    elif attention_mask is not None:
        attention_mask = pad(attention_mask, (1, 0), value=True)
    states = add_sink_token(query, key, value, s_aux[None, :, None], scaling)
    output, _ = sdpa_attention_forward(module, *states, attention_mask, scaling=scaling, **kwargs)
    return output[:, int(is_square) :, :, :head_dim].contiguous(), None


def sinks_beside(
    query: torch.Tensor, sinks: torch.Tensor, key_mean: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return the logits of sinks `[H]` beside keys that lack their mean, `[B or 1, H, Q or 1]`.

    A sink's logit is no product with a key. So it falls by what all others fall by, which each query
    `[B, H, Q, D]` has its own of. `key_mean` is `[1 or B, H_kv, D]`, None if keys are as they come.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    logits = sinks.to(dtype)[None, :, None]
    if key_mean is None:
        return logits
    grouped = query.to(dtype).view(len(query), key_mean.shape[1], -1, *query.shape[2:])
    share = grouped @ key_mean.to(dtype)[:, :, None, :, None]  # [B, H_kv, G, Q, 1]
    return logits - scaling * share.view(query.shape[:3])


def add_sink_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put the token that stands for the sinks before all others, and its channels behind all others.

    Queries `[B, H, Q, D]` become `[B, H, Q, D + 8]`, keys and values `[B, H_kv, S, D]`
    `[B, H_kv, S + 1, D + 8]`; sinks are `[B or 1, H, Q or 1]`, and `scaling` is the factor on logits of other
    keys.
    """
    logits = sinks.to(torch.promote_types(query.dtype, torch.float32)) / scaling
    high = logits.to(query.dtype)
    low = (logits - high).to(query.dtype)  # two channels hold what one in half precision would round
    own = torch.stack([high, low], dim=-1).expand(*query.shape[:3], 2)
    query = torch.cat([query, pad(own, (0, _NUM_CHANNELS - 2))], dim=-1)
    head_dim = key.shape[3]
    key, value = (pad(states, (0, _NUM_CHANNELS, 1, 0)) for states in (key, value))
    key[:, :, 0, head_dim : head_dim + 2] = 1
    return query, key, value
