"""Fused attention with its log-sum-exp, so that the parts of a split softmax can be merged.

PyTorch's fused kernels compute it where they run: cuDNN's, which is nearly twice as fast on Hopper, else
FlashAttention. Their public function keeps the log-sum-exp to itself, so the operators behind it are called.
Elsewhere plain torch does it in blocks of keys. Letters as in `attention`; N queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

# Scores that exist at a time in plain torch.
_MAX_SCORES = 1 << 24


def fused_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False
) -> Literal["cudnn", "flash"] | None:
    """The fused kernel that takes these tensors here, by PyTorch's own rules; None for none."""
    if not query.is_cuda:
        return None
    params = SDPAParams(query, key, value, None, 0.0, is_causal, query.shape[1] != key.shape[1])
    if can_use_cudnn_attention(params):
        return "cudnn"
    return "flash" if can_use_flash_attention(params) else None


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention by a fused kernel, or in plain torch; not differentiable by itself.

    Queries are [B, H, N, D], keys and values [B, H_kv, S, D]; in plain torch H_kv must be H. Causal, query i
    sees keys up to i: only where a fused kernel takes the tensors. The output [B, H, N, D] is in the query's
    dtype from a fused kernel and at least float32 from plain torch, the log-sum-exp of the logits [B, H, N]
    at least float32.
    """
    kernel = fused_kernel(query, key, value, is_causal=is_causal)
    if kernel == "cudnn":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scaling
        )
        return found[0], found[1].view(query.shape[:3])
    if kernel == "flash":
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scaling
        )
        return found[0], found[1][..., : query.shape[2]]
    assert not is_causal
    return _attend_in_blocks(query, key, value, scaling)


def query_gradient(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """Gradient of a split attention for the queries [B, H, N, D] of one part of its keys [B, H, S, D].

    With output and log-sum-exp of the WHOLE softmax, what a backward pass over some of the keys computes is
    those keys' exact share of the gradient. `lse` [B, H, N] is infinite where the part is not seen.
    """
    kernel = fused_kernel(query, key, value)
    if kernel is None:
        dtype = _compute_dtype(query)
        gradient, query, output = gradient.to(dtype), query.to(dtype) * scaling, output.to(dtype)
        mean = (gradient * output).sum(-1, keepdim=True)
        result = torch.zeros_like(query)
        for start, stop in _blocks(query, key):
            keys = key[:, :, start:stop].to(dtype)
            weights = (query @ keys.mT).sub_(lse[..., None]).exp_()
            result += weights.mul_((gradient @ value[:, :, start:stop].to(dtype).mT).sub_(mean)) @ keys
        return result * scaling
    # PyTorch keeps cuDNN's plans by the strides of Q, K and V alone: one plan serves any gradient and output,
    # so all must be laid out alike.
    gradient, output = (part.to(query.dtype).contiguous() for part in (gradient, output))
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of a dropout of 0
    tensors, sizes = (gradient, query, key, value, output), (query.shape[2], key.shape[2])
    operators: Any = torch.ops.aten
    rest: tuple[Any, ...]
    if kernel == "cudnn":
        backward = operators._scaled_dot_product_cudnn_attention_backward
        rest = (lse[..., None], seed, seed, None, None, None, *sizes, 0.0, False)
    else:
        backward = operators._scaled_dot_product_flash_attention_backward
        rest = (lse, None, None, *sizes, 0.0, False, seed, seed)
    found = backward(*tensors, *rest, scale=scaling)
    gradient_of_query: Tensor = found[0]
    return gradient_of_query


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[int, int]]:
    size = max(_MAX_SCORES // (query.shape[0] * query.shape[1] * query.shape[2]), 1)
    for start in range(0, key.shape[2], size):
        yield start, min(start + size, key.shape[2])


def _compute_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    dtype = _compute_dtype(query)
    query = query.to(dtype) * scaling
    output = torch.zeros_like(query)
    lse = torch.full_like(query[..., 0], float("-inf"))
    for start, stop in _blocks(query, key):
        scores = query @ key[:, :, start:stop].to(dtype).mT
        both = torch.logaddexp(lse, scores.logsumexp(-1))
        output *= torch.exp(lse - both)[..., None]
        output += scores.sub_(both[..., None]).exp_() @ value[:, :, start:stop].to(dtype)
        lse = both
    return output, lse
