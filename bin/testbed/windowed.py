"""Attention of a model with mixed layers while it is trained: a sliding window costs what is in it.

A mask over all pairs would make layers that see 32 tokens slower than those that see everything. So the
sequence is cut into blocks as long as the window: each sees itself and the one before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION_NAME = "testbed_windowed"


def windowed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally, in a layer with a sliding window within it; padding is on the right alone.

    Args:
        module: The attention module, for SDPA's grouped-query settings.
        query: [B, H, T, D].
        key: [B, H_kv, T, D].
        value: The same.
        attention_mask: None.
        scaling: The softmax scale.
        sliding_window: How many tokens a query of this layer sees, itself among them; None for all.
        **kwargs: What else transformers passes.

    Returns:
        [B, T, H, D], and None for the attention weights.
    """
    batch, _, length, _ = query.shape
    if sliding_window is None or length <= sliding_window:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)
    missing = -length % sliding_window
    blocks = (length + missing) // sliding_window
    query = _cut(pad(query, (0, 0, 0, missing)), sliding_window, sliding_window)
    key, value = (
        _cut(pad(states, (0, 0, sliding_window, missing)), 2 * sliding_window, sliding_window)
        for states in (key, value)
    )
    place = torch.arange(2 * sliding_window, device=query.device)
    age = place[sliding_window:, None] - place
    seen = ((age >= 0) & (age < sliding_window)).repeat(blocks, 1, 1)
    seen[0] &= place >= sliding_window  # nothing is before the first block
    seen = seen[:, None].repeat(batch, 1, 1, 1)
    output, _ = sdpa_attention_forward(module, query, key, value, seen, scaling=scaling)
    return output.reshape(batch, -1, *output.shape[2:])[:, :length], None


def _cut(states: Tensor, size: int, step: int) -> Tensor:
    """Blocks of [B, H, T, D], each so many tokens after the last: [B · blocks, H, size, D]."""
    return states.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1).contiguous()


# Layers are compiled; a length for which blocks differ would compile them anew.
AttentionInterface.register(
    ATTENTION_NAME,
    torch.compiler.disable(windowed_attention),  # type: ignore[no-untyped-call]
)
