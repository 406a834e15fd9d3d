"""Attention of a training step, registered with transformers as `leank_train`.

A step runs the model twice. The dense pass over context and answer, without gradient, leaves every layer's
context keys and values in a `StoredContext`. The answer pass feeds the answer tokens alone, with gradient,
and attends to what was stored; only there do the scaling factors act, and only on keys between sink and
recent window (the paper's section "Training stage 1"). Which pass runs is a keyword argument of the model's
forward, which transformers hands down to the attention function, so nothing is patched or global.

Letters: B batch, H query heads, H_kv KV heads, G = H / H_kv, D head_dim, P context tokens, A answer tokens,
S = P + A.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION_NAME = "leank_train"


@dataclass(frozen=True)
class Windows:
    """The regions that keep every channel.

    Attributes:
        sink_size: First tokens of the sequence.
        recent_size: Tokens before the query's own.
    """

    sink_size: int
    recent_size: int


@dataclass
class StoredContext:
    """Keys and values of the context tokens, filled by the dense pass and read by the answer pass.

    Attributes:
        num_tokens: P.
        num_seen: Tokens of earlier blocks, where the dense pass runs in blocks.
        keys: Per layer, after RoPE [B, H_kv, P, D].
        values: Per layer [B, H_kv, P, D].
    """

    num_tokens: int
    num_seen: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the context's part of one block; return what the block attends to.

        Args:
            layer: Which layer.
            key: [B, H_kv, N, D], tokens `num_seen` … `num_seen + N` of context and answer.
            value: The same.

        Returns:
            Keys and values of this block and all before it [B, H_kv, num_seen + N, D].
        """
        start, stop = self.num_seen, self.num_seen + key.shape[2]
        if start == 0 and stop >= self.num_tokens:
            self.keys[layer], self.values[layer] = (
                key[:, :, : self.num_tokens],
                value[:, :, : self.num_tokens],
            )
            return key, value
        attended = []
        for kept, new in ((self.keys, key), (self.values, value)):
            if start == 0:
                kept[layer] = new.new_empty(*new.shape[:2], self.num_tokens, new.shape[3])
            inside = min(stop, self.num_tokens) - start
            kept[layer][:, :, start : start + inside] = new[:, :, :inside]
            answer = new[:, :, inside:]
            stored = kept[layer][:, :, : start + inside]
            attended.append(torch.cat([stored, answer], dim=2) if answer.shape[2] else stored)
        return attended[0], attended[1]


@dataclass(frozen=True)
class AnswerPass:
    """What the answer pass attends with.

    Attributes:
        context: The stored context.
        windows: Sink and recent window.
        scaling_factors: Stage 1's factors, or stage 2's zeros and ones [L, H_kv, D].
        sees_middle: Bool [L, H_kv]: False for a head without channels, whose middle is at minus infinity;
            None if every head sees it (stage 1, where factors of 0 still leave logits of 0).
    """

    context: StoredContext
    windows: Windows
    scaling_factors: Tensor
    sees_middle: Tensor | None = None


def training_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    leank_pass: StoredContext | AnswerPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dispatch one layer's attention; transformers' attention signature.

    Args:
        module: The attention module, which knows its `layer_idx` and `config`.
        query: [B, H, N, D].
        key: [B, H_kv, N, D].
        value: [B, H_kv, N, D].
        attention_mask: None: sequences of a batch have one length.
        scaling: The model's softmax scale.
        dropout: Ignored: the model is in eval mode.
        leank_pass: A `StoredContext` to fill (dense pass), or the `AnswerPass`.
        **kwargs: What else the model's family passes.

    Returns:
        [B, N, H, D], and None for the attention weights.
    """
    if leank_pass is None or scaling is None or attention_mask is not None:
        raise TypeError(f"attention `{ATTENTION_NAME}` needs `leank_pass` and `scaling`, and takes no mask")
    layer: int = module.layer_idx
    if isinstance(leank_pass, StoredContext):
        key, value = leank_pass.store(layer, key, value)
        if layer == module.config.num_hidden_layers - 1:
            return _last_dense_layer(query, key, value, leank_pass.num_tokens, scaling), None
        if query.shape[2] == key.shape[2]:
            output, _ = sdpa_attention_forward(
                module, query, key, value, None, scaling=scaling, is_causal=True
            )
            return output, None
        return _block_attention(query, key, value, scaling), None
    # Recomputed in the backward pass: the [G·A, S] scores of one layer exist at a time, not those of all.
    output = checkpoint(
        answer_attention,
        query,
        key,
        value,
        leank_pass.context.keys[layer],
        leank_pass.context.values[layer],
        leank_pass.scaling_factors[layer],
        None if leank_pass.sees_middle is None else leank_pass.sees_middle[layer],
        leank_pass.windows,
        scaling,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return output, None


AttentionInterface.register(ATTENTION_NAME, training_attention)


def _block_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of the last N of S tokens: [B, H, N, D] over [B, H_kv, S, D] to [B, N, H, D]."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    # The bias stands for a mask that flash attention never forms; PyTorch has it for CUDA alone.
    mask = (
        causal_lower_right(num_queries, num_keys)
        if query.is_cuda
        else torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(
            num_keys - num_queries
        )
    )
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2)


def _last_dense_layer(query: Tensor, key: Tensor, value: Tensor, num_context: int, scaling: float) -> Tensor:
    """Dense attention of the answer's queries alone: [B, N, H, D], zero at the context's.

    Nothing reads what the last layer makes of the context, and its attention is most of a short model's time.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    num_answer = max(key.shape[2] - num_context, 0)
    context = query.new_zeros(()).expand(batch, num_queries - num_answer, num_heads, head_dim)
    if not num_answer:
        return context
    answer = answer_attention(
        query[:, :, -num_answer:],
        key[:, :, num_context:],
        value[:, :, num_context:],
        key[:, :, :num_context],
        value[:, :, :num_context],
        key.new_ones(key.shape[1], key.shape[3]),
        None,
        Windows(sink_size=key.shape[2], recent_size=0),
        scaling,
    )
    return torch.cat([context, answer], dim=1)


def answer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    scaling_factors: Tensor,
    sees_middle: Tensor | None,
    windows: Windows,
    scaling: float,
) -> Tensor:
    """Attention of answer tokens over context and answer; differentiable, float32 inside at least.

    For the query at position p and the key at j <= p the logit is `scaling * q·k` if j < sink_size or
    j >= p - recent_size, and `scaling * (q ⊙ scaling_factors)·k` otherwise. Scaling the query instead of the
    key needs no copy of the keys, and query heads are folded onto their KV head, so neither keys nor values
    are repeated.

    Args:
        query: Answer queries after RoPE [B, H, A, D].
        key: Answer keys [B, H_kv, A, D].
        value: Answer values [B, H_kv, A, D].
        context_key: [B, H_kv, P, D].
        context_value: [B, H_kv, P, D].
        scaling_factors: This layer's factors [H_kv, D].
        sees_middle: This layer's heads [H_kv] that see the middle; None for all.
        windows: Sink and recent window.
        scaling: The model's softmax scale.

    Returns:
        [B, A, H, D] in the query's dtype.
    """
    batch, num_heads, num_answer, head_dim = query.shape
    num_kv_heads, num_context = context_key.shape[1], context_key.shape[2]
    compute = torch.promote_types(query.dtype, torch.float32)
    rows = (batch, num_kv_heads, num_heads // num_kv_heads * num_answer, head_dim)
    full_query = query.to(compute).reshape(rows) * scaling
    scaled_query = full_query * scaling_factors.to(compute)[:, None]
    hidden = None if sees_middle is None else ~sees_middle[:, None, None]
    positions = torch.arange(num_context, num_context + num_answer, device=query.device)
    # Row g·A + a of a KV head is query head g's answer token a.
    row_position = positions.repeat(num_heads // num_kv_heads)[:, None]

    def middle_scores(keys: Tensor) -> Tensor:
        scores = scaled_query @ keys
        return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))

    scores = []
    for start, stop, kind in _key_blocks(num_context, num_answer, windows):
        source, offset = (context_key, 0) if start < num_context else (key, num_context)
        keys = source[:, :, start - offset : stop - offset].to(compute).transpose(2, 3)
        if kind == "full":
            block = full_query @ keys
        elif kind == "middle":
            block = middle_scores(keys)
        else:
            is_recent = torch.arange(start, stop, device=query.device) >= row_position - windows.recent_size
            block = torch.where(is_recent, full_query @ keys, middle_scores(keys))
        if offset:
            block = block.masked_fill(
                torch.arange(start, stop, device=query.device) > row_position, float("-inf")
            )
        scores.append(block)
    weights = torch.cat(scores, dim=-1).softmax(-1)
    output = weights[..., :num_context] @ context_value.to(compute)
    output = output + weights[..., num_context:] @ value.to(compute)
    return output.view(batch, num_heads, num_answer, head_dim).transpose(1, 2).to(query.dtype)


def _key_blocks(
    num_context: int, num_answer: int, windows: Windows
) -> Iterator[tuple[int, int, Literal["full", "middle", "mixed"]]]:
    """Cut the keys [0, S) where their region changes, and where context ends and answer begins.

    A `mixed` block is recent for some of the answer's queries and middle for others.
    """
    end = num_context + num_answer
    # A key at or beyond `always_recent` is recent for every query, one before `never_recent` for none.
    never_recent = max(num_context - windows.recent_size, 0)
    always_recent = max(end - 1 - windows.recent_size, 0)
    sink = windows.sink_size
    for start, stop in pairwise(sorted({0, min(sink, end), never_recent, always_recent, num_context, end})):
        if start < sink or start >= always_recent:
            yield start, stop, "full"
        elif start < never_recent:
            yield start, stop, "middle"
        else:
            yield start, stop, "mixed"
