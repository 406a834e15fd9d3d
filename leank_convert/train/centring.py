"""Centred keys: what attention computes with keys less a constant, their mean.

Softmax does not see what is added to all keys alike: q·(k - c) differs from q·k by one number per query. So
the mean comes off every cached key before it is stored, and a channel that is dropped counts as its mean, not
as zero. A sink's logit stands in the softmax beside the keys' and has to fall by that number, too. Letters as
in `attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def centre_keys(key: Tensor, key_mean: Tensor) -> Tensor:
    """Keys after RoPE [..., H_kv, N, D] less their mean [H_kv, D], rounded once, as they are stored."""
    return (key - key_mean.to(key.device, torch.float32)[:, None]).to(key.dtype)


def lower_sinks(sinks: Tensor, query: Tensor, key_mean: Tensor, scaling: float) -> Tensor:
    """Logits of sinks [H] beside keys less their mean [H_kv, D], which depend on the query: [1, H, N]."""
    compute = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // len(key_mean)
    of_heads = key_mean.to(query.device, compute)[:, None].expand(-1, groups, -1).flatten(0, 1)
    left_out: Tensor = (query.to(compute) @ of_heads[..., None])[..., 0]
    return sinks.to(compute)[:, None] - scaling * left_out
