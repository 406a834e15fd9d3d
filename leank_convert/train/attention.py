"""Attention of a training step, registered with transformers as `leank_train`.

A step runs the model three times (`passes`): over the context, over the questions and answers asked on it,
both dense and without gradient, and over the answers alone, with gradient. Only there do the scaling factors
act, and only on keys between sink and recent window (the paper's section "Training stage 1"). Which pass runs
is a keyword argument of the model's forward, which transformers hands down to the attention function, so
nothing is patched or global.

Letters: H query heads, H_kv KV heads, G = H / H_kv, D head_dim, P context tokens, T tokens that follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from leank_convert.train.packing import Rows
from leank_convert.train.split_attention import Pair, Regions, StoredContext, Student, split_attention
from leank_convert.train.windowed import causal_attention

ATTENTION_NAME = "leank_train"


class ContextIsStored(Exception):  # noqa: N818 - no error: what would follow is not needed
    """Ends the dense pass over a block: nothing reads what the last layer makes of the context."""


# What looks on at a block's attention in layers with full attention: the layer's place among them, queries
# [1, H, N, D], all keys and values so far [1, H_kv, S, D], the softmax scale, logits of sinks [H] or None.
Observer = Callable[[int, Tensor, Pair, float, Tensor | None], None]


# Softmax does not see what is added to all keys alike: q·(k - c) differs from q·k by one number per query.
# So the mean comes off every cached key before it is stored, and a dropped channel counts as its mean, not as
# zero. A sink's logit stands in the softmax beside the keys' and has to fall by that number, too.


def centre_keys(key: Tensor, key_mean: Tensor) -> Tensor:
    """Keys after RoPE [..., H_kv, N, D] less their mean [H_kv, D], rounded once, as they are stored."""
    return (key - key_mean.to(key.device, torch.float32)[:, None]).to(key.dtype)


def _lower_sinks(sinks: Tensor, query: Tensor, key_mean: Tensor, scaling: float) -> Tensor:
    """Logits of sinks [H] beside keys less their mean [H_kv, D], which depend on the query: [1, H, N]."""
    compute = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // len(key_mean)
    of_heads = key_mean.to(query.device, compute)[:, None].expand(-1, groups, -1).flatten(0, 1)
    left_out: Tensor = (query.to(compute) @ of_heads[..., None])[..., 0]
    return sinks.to(compute)[:, None] - scaling * left_out


@dataclass(frozen=True)
class ContextPass:
    """The dense pass over the context, which fills it."""

    context: StoredContext
    observe: Observer | None = None


@dataclass(frozen=True)
class MeasuringPass:
    """A dense pass that keeps nothing and shows what layers with full attention attend with."""

    measure: Callable[[Any, Tensor, Tensor], None]  # takes a module, its queries [H, N, D], keys [H_kv, N, D]


@dataclass(frozen=True)
class FollowingPass:
    """A pass over tokens that follow the context: questions and answers dense, or answers with gradient."""

    context: StoredContext  # the stored context; takes the questions' keys and values in the dense pass
    num_questions: int  # tokens of questions; those of answers follow them
    regions: Regions  # how the pass's tokens see the context and one another
    # The same in layers with a sliding window, which are dense; None without any.
    window_regions: Regions | None
    rows: Rows | None  # questions and answers in layers with linear attention, None without any
    student: Student | None = None  # what the answers are computed with; None for the dense pass


def training_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    leank_pass: ContextPass | MeasuringPass | FollowingPass,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Dispatch one layer's attention, by transformers' signature: [1, N, H, D], and no attention weights.

    Queries are [1, H, N, D], keys and values [1, H_kv, N, D]. What is seen follows from the pass, not from
    `attention_mask`, and dropout is ignored. In a layer with a `sliding_window` a query sees so many tokens,
    itself among them; None stands for all. `s_aux` are logits of attention sinks [H], which fall by what
    centred keys leave out.

    Raises:
        ContextIsStored: When a block of the context has reached the last layer.
    """
    if isinstance(leank_pass, MeasuringPass):
        if sliding_window is None:
            leank_pass.measure(module, query[0], key[0])
        return causal_attention(module, query, key, value, scaling, sliding_window, s_aux), None
    layer: int = module.layer_idx
    context = leank_pass.context
    if context.key_mean is not None and sliding_window is None:
        key_mean = context.key_mean[_place(module)]
        key = centre_keys(key, key_mean)
        if s_aux is not None:
            s_aux = _lower_sinks(s_aux, query, key_mean, scaling)
    if isinstance(leank_pass, ContextPass):
        context.store(layer, key, value)
        if leank_pass.observe is not None and sliding_window is None:
            stored = context.load(layer, context.num_seen + key.shape[2])
            leank_pass.observe(_place(module), query, stored, scaling, s_aux)
        if layer == module.config.num_hidden_layers - 1:
            raise ContextIsStored
        before = context.load(layer, context.num_seen) if context.num_seen else None
        return causal_attention(module, query, key, value, scaling, sliding_window, s_aux, before), None
    regions = leank_pass.regions if sliding_window is None else leank_pass.window_regions
    assert regions is not None
    student = leank_pass.student
    if student is None:
        num = leank_pass.num_questions
        context.questions[layer] = key[:, :, :num], value[:, :, :num]
    else:
        asked = context.questions[layer]
        key, value = (torch.cat(parts, dim=2) for parts in zip(asked, (key, value), strict=True))
    load = partial(context.load, layer)
    attend_with = partial(split_attention, query, key, value, load, regions, scaling, sinks=s_aux)
    if student is None or sliding_window is not None:
        return attend_with(), None
    return _answer_attention(attend_with, student.of_layer(_place(module))), None


# The context pass may run through compiled layers (`fusion`); what is fused already stays out of them.
AttentionInterface.register(
    ATTENTION_NAME,
    torch.compiler.disable(training_attention),  # type: ignore[no-untyped-call]
)


def _place(module: Any) -> int:
    """Which of the layers with full attention it is: factors, gates and means are of those alone."""
    layer: int = module.layer_idx
    kinds = getattr(module.config, "layer_types", None)
    return layer if kinds is None else kinds[:layer].count("full_attention")


def _answer_attention(attend_with: Callable[..., Tensor], student: Student) -> Tensor:
    """Attention of the answers' N tokens with a layer's factors and gates: [1, N, H, D]."""
    output = attend_with(student=student)
    if student.gates is None:
        return output
    compute = torch.promote_types(output.dtype, torch.float32)
    gates = student.gates.to(output.device, compute)
    streaming = attend_with(student=replace(student, sees_middle=torch.zeros_like(gates, dtype=torch.bool)))
    shares = gates.repeat_interleave(output.shape[2] // len(gates))[:, None]
    return torch.lerp(streaming.to(compute), output.to(compute), shares).to(output.dtype)
