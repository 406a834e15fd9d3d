"""Fused attention with its log-sum-exp, so that the parts of a split softmax can be merged.

PyTorch's fused kernels compute it where they run: cuDNN's, which is nearly twice as fast on Hopper, else
FlashAttention. Their public function keeps the log-sum-exp to itself, so the operators behind it are called.
The gradient has a kernel of its own. Elsewhere plain torch does both in blocks of keys. Letters as in
`attention`; N queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

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
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mean: Tensor, lse: Tensor, *, scaling: float
) -> Tensor:
    """Gradient of a split attention for the queries [B, H, N, D] of one part of its keys [B, H, S, D].

    With `mean` [B, H, N, 1], the product of the WHOLE softmax's output with its gradient, and its log-sum-exp
    [B, H, N], what is computed over some of the keys is their exact share of the gradient. `lse` is infinite
    where the part is not seen. The same tensors give the same bits.
    """
    if fused_kernel(query, key, value) is not None and find_spec("triton") is not None:
        from leank_convert.train import gradient_kernel

        return gradient_kernel.launch(gradient.to(query.dtype), query, key, value, mean, lse, scaling)
    dtype = _compute_dtype(query)
    gradient, query = gradient.to(dtype), query.to(dtype) * scaling
    result = torch.zeros_like(query)
    for start, stop in _blocks(query, key):
        keys = key[:, :, start:stop].to(dtype)
        weights = (query @ keys.mT).sub_(lse[..., None]).exp_()
        result += weights.mul_((gradient @ value[:, :, start:stop].to(dtype).mT).sub_(mean)) @ keys
    return result * scaling


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
