"""Sliding-window attention and attention with sinks, which SDPA lacks.

A sink is a logit of each query head that takes its share of the softmax and adds no value; beside centred
keys every query has another. Not differentiable: the passes that are, have `split_attention`. Letters as in
`attention`; S keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from leank_convert.train.fused import attend, fused_kernel

# Queries of a block: at least so many, and up to four times as many where as many are in a window anyway.
_BLOCK_SIZE = 256


def causal_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of N tokens over themselves [1, N, H, D].

    Queries are [1, H, N, D], keys and values [1, H_kv, N, D]. A query sees up to `window` tokens, itself
    among them, or all before it; sinks are logits [H] or [1, H, N].
    """
    if window is None and sinks is None:
        output, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)
        return output
    if window is None and sinks is not None and fused_kernel(query, key, value, is_causal=True):
        output, lse = attend(query, key, value, scaling=scaling, is_causal=True)
        return beside_sinks(output, lse, sinks).transpose(1, 2)
    return masked_attention(query, key, value, scaling, window, sinks)


def beside_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Give sinks, logits [H] or [1, H, N], their share of a softmax, by its output [1, H, N, D] and lse."""
    return output * torch.sigmoid(lse - of_queries(sinks, lse.shape[-1]))[..., None].to(output.dtype)


def of_queries(sinks: Tensor, num_queries: int) -> Tensor:
    """The logits of sinks [H] or [1, H, N] as those of every query [1, H, N]."""
    return sinks if sinks.ndim == 3 else sinks[None, :, None].expand(-1, -1, num_queries)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention of the last N of S tokens [1, H_kv, S, D], in plain torch, a block of queries at a time."""
    num_heads, num_queries = query.shape[1:3]
    if sinks is not None:
        sinks = of_queries(sinks, num_queries)
    num_keys, groups = key.shape[2], num_heads // key.shape[1]
    compute = torch.promote_types(query.dtype, torch.float32)
    position = torch.arange(num_keys, device=query.device)
    outputs = []
    size = max(_BLOCK_SIZE, min(window or 0, 4 * _BLOCK_SIZE))
    for start in range(num_keys - num_queries, num_keys, size):
        stop = min(start + size, num_keys)
        first = 0 if window is None else max(start - window + 1, 0)
        own = slice(start - num_keys + num_queries, stop - num_keys + num_queries)
        block = query[:, :, own].to(compute)
        folded = block.unflatten(1, (-1, groups))  # type: ignore[no-untyped-call]
        keys, values = (states[:, :, None, first:stop].to(compute) for states in (key, value))
        age = position[start:stop, None] - position[first:stop]
        hidden = age < 0 if window is None else (age < 0) | (age >= window)
        scores = ((folded * scaling) @ keys.mT).masked_fill_(hidden, float("-inf")).flatten(1, 2)
        lse = scores.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks[..., own].to(compute))
        weights = scores.sub_(lse[..., None]).exp_().unflatten(1, (-1, groups))
        outputs.append((weights @ values).flatten(1, 2))
    return torch.cat(outputs, dim=2).transpose(1, 2).to(query.dtype)
