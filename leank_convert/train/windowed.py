"""Causal attention over a context, also in a sliding window and with sinks, which SDPA lacks.

A sink is a logit of each query head that takes its share of the softmax and adds no value; beside centred
keys every query has another. Not differentiable: the passes that are, have `split_attention`. Letters as in
`attention`; S keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
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
    before: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of N tokens over themselves and, if there are any, all `before` them: [1, N, H, D].

    Queries are [1, H, N, D], keys and values [1, H_kv, N, D]. A query sees up to `window` tokens, itself
    among them, or all before it; sinks are logits [H] or [1, H, N].
    """
    is_plain = window is None and sinks is None
    if is_plain and before is None:
        output, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)
        return output
    fuses = window is None and fused_kernel(query, key, value, is_causal=True)
    if fuses and (before is None or fused_kernel(query, *before)):
        output, lse = attend(query, key, value, scaling=scaling, is_causal=True)
        if before is not None:
            earlier, earlier_lse = attend(query, *before, scaling=scaling)
            # The merge of two softmaxes, in one pass over the outputs.
            share = torch.sigmoid(lse - earlier_lse).to(output.dtype)
            output, lse = torch.lerp(earlier, output, share[..., None]), torch.logaddexp(lse, earlier_lse)
        if sinks is not None:
            output = beside_sinks(output, lse, sinks)
        return output.transpose(1, 2)
    if before is not None:
        kept = slice(None if window is None else -window, None)
        both = zip(before, (key, value), strict=True)
        key, value = (torch.cat([earlier[:, :, kept], own], dim=2) for earlier, own in both)
    if not is_plain:
        return masked_attention(query, key, value, scaling, window, sinks)
    num_queries, num_keys = query.shape[2], key.shape[2]
    # The bias stands for a mask that PyTorch's kernels never form; it has it for CUDA alone.
    mask = (
        causal_lower_right(num_queries, num_keys)
        if query.is_cuda
        else query.new_ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    )
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2)


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
