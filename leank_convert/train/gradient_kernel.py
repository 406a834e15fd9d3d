"""Triton kernel for the gradient of queries, three products in place of a whole backward pass's five.

PyTorch's fused kernels compute those of keys and values as well, and add up a query's in whatever order their
blocks end. Here a block has some queries and one stretch of keys, and stretches are added up in order: the
same tensors give the same bits. Triton comes with PyTorch for CUDA on Linux.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEYS = 32  # a block's at a time
_LOG2_E = tl.constexpr(1.4426950408889634)


def launch(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mean: Tensor, lse: Tensor, scaling: float
) -> Tensor:
    """Gradient [B, H, N, D] in float32, as `fused.query_gradient`; the first four have one 16-bit dtype."""
    rest = (mean.flatten().float(), lse.flatten().float())
    tensors = [tensor.flatten(0, 1) for tensor in (gradient, query, key, value)]
    (heads, num_queries, head_dim), num_keys = tensors[1].shape, key.shape[2]
    properties = torch.cuda.get_device_properties(query.device)
    channels = triton.next_power_of_2(head_dim)
    # As many rows as shared memory has room for: Hopper and Blackwell of data centres have twice as much.
    is_large = properties.major in (9, 10)
    rows = (128 if is_large else 64) // (2 if channels > 128 else 1)
    blocks = triton.cdiv(num_queries, rows)
    stretches = min(2 * properties.multi_processor_count // (blocks * heads), num_keys // (4 * _KEYS))
    stretch = triton.cdiv(num_keys, max(stretches, 1) * _KEYS) * _KEYS
    parts = query.new_empty(triton.cdiv(num_keys, stretch), *tensors[1].shape, dtype=torch.float32)
    with torch.cuda.device(query.device):
        _query_gradient[(blocks, heads, len(parts))](
            *(*tensors, *rest, parts),
            *(size for tensor in tensors for size in tensor.stride()[:2]),
            *(num_queries, num_keys, stretch, scaling),
            head_dim=head_dim,
            channels=channels,
            block_rows=rows,
            block_keys=_KEYS,
            num_warps=8 if rows == 128 else 4,
            num_stages=3 if is_large else 2,
        )
    return parts.sum(0).view(query.shape)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "stretch"])
def _query_gradient(
    gradient,
    query,
    key,
    value,
    mean,
    lse,
    parts,
    gradient_head,
    gradient_row,
    query_head,
    query_row,
    key_head,
    key_row,
    value_head,
    value_row,
    num_queries,
    num_keys,
    stretch,
    scaling,
    head_dim: tl.constexpr,
    channels: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    """One stretch of keys' part of a block of queries' gradient; strides are of heads [H] and rows."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    channel = tl.arange(0, channels)
    is_row, is_channel = row < num_queries, (channel < head_dim)[None]
    is_own = is_row[:, None] & is_channel
    q = tl.load(query + head * query_head + row[:, None] * query_row + channel[None], is_own, 0.0)
    g = tl.load(gradient + head * gradient_head + row[:, None] * gradient_row + channel[None], is_own, 0.0)
    centre = tl.load(mean + head * num_queries + row, is_row, 0.0)[:, None]
    log_sum = tl.load(lse + head * num_queries + row, is_row, float("inf"))[:, None] * _LOG2_E
    found = tl.full((block_rows, channels), 0.0, tl.float32)
    start = part * stretch
    for first in range(start, tl.minimum(start + stretch, num_keys), block_keys):
        token = first + tl.arange(0, block_keys).to(tl.int64)[:, None]
        is_seen = (token < num_keys) & is_channel
        k = tl.load(key + head * key_head + token * key_row + channel[None], is_seen, 0.0)
        v = tl.load(value + head * value_head + token * value_row + channel[None], is_seen, 0.0)
        weights = tl.exp2(tl.dot(q, tl.trans(k)) * (scaling * _LOG2_E) - log_sum)
        to_scores = weights * (tl.dot(g, tl.trans(v)) - centre)
        found = tl.dot(to_scores.to(k.dtype), k, found)
    place = (part * tl.num_programs(1) + head) * num_queries + row
    tl.store(parts + place[:, None] * head_dim + channel[None], found * scaling, is_own)
