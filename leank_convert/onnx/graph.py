"""The graph: one for prompt chunks, decode steps and later turns, traced through transformers' model code.

docs/formats.md names inputs and outputs, and says what whoever runs the graph does with its buffers. What a
slot without a token holds is multiplied by 0, so it must be finite.

A cached key lacks the mean of keys, where the mask has one. Its lanes are its channels in `channel_order`: a
head's kept ones first, so that a pruned key is the first w lanes of the whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from leank_convert.onnx.leank_onnx_cache import Bucket
from leank_convert.onnx.pruned_model import PrunedModel

_ATTENTION = "leank_onnx"
# Far below any logit, and finite in float16 too: a row without any token yet must not become NaN.
_HIDDEN = -6e4
_MAX_TRIAL_SLOTS = 4096
# What a step is given beside the cache, integers all, and the sizes of each.
STEP_INPUTS = {
    "input_ids": ["batch", "new_tokens"],
    "past_lengths": ["batch"],
    "pruned_lengths": ["batch"],
    "logits_index": ["batch", "logits"],
}


@dataclass
class _Step:
    """What the layers of one step share: what hides slots and later tokens, and the new keys and values.

    By layer, `windows` and, by bucket, `pruned` are (keys, values).
    """

    model: StepModel
    windows: list[tuple[Tensor, Tensor]]
    pruned: list[dict[str, tuple[Tensor, Tensor | None]]]
    window_bias: Tensor
    pruned_bias: Tensor
    new_bias: Tensor
    present: list[Tensor] = field(default_factory=list)


class StepModel(nn.Module):
    """One step of a pruned model as a function of its cache."""

    def __init__(self, pruned: PrunedModel) -> None:
        super().__init__()
        self.model = pruned.model
        self.sink_size = pruned.windows.sink_size
        self.buckets = pruned.buckets
        identity = torch.arange(pruned.channel_masks.shape[-1])
        self.key_mean: Tensor | None
        self.register_buffer("key_mean", pruned.key_mean, persistent=False)
        for layer, order in enumerate(pruned.channel_order):
            lanes = None if order.equal(identity.expand_as(order)) else order
            self.register_buffer(f"lanes_{layer}", lanes, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        past_lengths: Tensor,
        pruned_lengths: Tensor,
        logits_index: Tensor,
        cache: Sequence[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, K, V], and each layer's new keys [B, H_kv, Q, D] and values [B, H_kv, D, Q]."""
        batch, num_new = input_ids.shape
        windows, pruned = self._split(cache)
        # Without a pruned region its bias is read by nobody.
        num_pruned = next((keys.shape[2] for layer in pruned for keys, _ in layer.values()), 0)
        past, new = past_lengths[:, None], torch.arange(num_new)
        groups = self.model.config.num_attention_heads // self.model.config.num_key_value_heads
        dtype = self.model.dtype
        causal = _bias(new[None] <= new[:, None], dtype)[None].expand(groups, num_new, num_new)
        held = _held(past, pruned_lengths[:, None], cache[0].shape[2], self.sink_size)
        step = _Step(
            self,
            windows,
            pruned,
            _bias(held, dtype)[:, None, None],
            _bias(torch.arange(num_pruned)[None] < pruned_lengths[:, None], dtype)[:, None, None],
            causal.reshape(groups * num_new, num_new),
        )
        hidden = self.model.model(
            input_ids=input_ids,
            position_ids=past + new[None],
            # Not used: the cache's lengths say what is seen. Without one the model would build its own.
            attention_mask=torch.zeros(batch, 1, num_new, num_new, dtype=dtype),
            use_cache=False,
            leank_step=step,
        ).last_hidden_state
        hidden = hidden.gather(1, logits_index[:, :, None].expand(-1, -1, hidden.shape[2]))
        logits = self.model.lm_head(hidden)
        scaling = getattr(self.model.config, "logits_scaling", None)  # Granite's
        return logits if scaling is None else logits / scaling, step.present

    def _split(self, cache: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
        """`_Step.windows` and `_Step.pruned` of buffers in the order of `cache_shapes`."""
        buffers, windows, pruned = iter(cache), [], []
        for buckets in self.buckets:
            windows.append((next(buffers), next(buffers)))
            pruned.append(
                {
                    bucket.name: (next(buffers), None if bucket.value_width == 0 else next(buffers))
                    for bucket in buckets
                    if bucket.width
                }
            )
        return windows, pruned


def cache_shapes(
    pruned: PrunedModel, batch: Any, window_slots: Any, pruned_slots: Any
) -> dict[str, list[Any]]:
    """Names and shapes of the cache's inputs, in the graph's order; sizes may be numbers or names."""
    _, heads, head_dim = pruned.channel_masks.shape
    shapes: dict[str, list[Any]] = {}
    for layer, buckets in enumerate(pruned.buckets):
        regions = [("window", Bucket(head_dim, slice(0, heads)), window_slots)]
        regions += [(f"pruned.{bucket.name}", bucket, pruned_slots) for bucket in buckets if bucket.width]
        for region, bucket, slots in regions:
            for part, shape in zip(("key", "value"), bucket.shapes(batch, slots, head_dim), strict=True):
                if 0 not in shape:  # V of which nothing is kept
                    shapes[f"past_key_values.{layer}.{region}.{part}"] = shape
    return shapes


def trial_sizes(sink_size: int, recent_size: int, flush_size: int) -> tuple[int, int, int]:
    """Slots, tokens and pruned tokens of a row to try a graph on: a full window, of a huge one a part."""
    num_slots = sink_size + recent_size + flush_size
    if num_slots <= _MAX_TRIAL_SLOTS:
        return num_slots, sink_size + recent_size + 3, 3
    num_slots = _MAX_TRIAL_SLOTS + (sink_size == _MAX_TRIAL_SLOTS)  # the graph divides by the difference
    return num_slots, num_slots, max(min(num_slots - sink_size, 3), 0)


def _held(past: Tensor, pruned: Tensor, num_slots: int, sink_size: int) -> Tensor:
    """Which window slots hold a token that is still seen whole, bool [B, S]; lengths are [B, 1]."""
    slot = torch.arange(num_slots)[None]
    # Behind the sink a slot holds the last token that maps to it. One not written yet gives a token within
    # the sink, which the lower bound hides.
    ring = torch.full((1, 1), num_slots - sink_size, dtype=torch.long)
    token = torch.where(slot < sink_size, slot, past - 1 - torch.remainder(past - 1 - slot, ring))
    return (token < past) & ((slot < sink_size) | (token >= sink_size + pruned))


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(seen, 0.0, _HIDDEN).to(dtype)


def attend_in_regions(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    leank_step: _Step,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over [window | new tokens | pruned]: query [B, H, Q, D], key and value [B, H_kv, Q, D]."""
    step, model, layer = leank_step, leank_step.model, int(module.layer_idx)  # type: ignore[arg-type]
    buckets, lanes = model.buckets[layer], getattr(model, f"lanes_{layer}")
    batch, num_heads, num_new, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = num_heads // kv_heads
    if model.key_mean is not None:  # all keys lose the same, which softmax does not see
        key = (key.float() - model.key_mean[layer][:, None]).to(key.dtype)
    if lanes is not None:
        query = _reorder(query, lanes.repeat_interleave(groups, dim=0))
        key = _reorder(key, lanes)
    value = value.transpose(2, 3)
    step.present += [key, value]

    query = (query * scaling).reshape(batch, kv_heads, groups * num_new, head_dim)
    window_keys, window_values = step.windows[layer]
    num_slots = window_keys.shape[2]
    in_window = query @ window_keys.transpose(2, 3) + step.window_bias
    in_new = query @ key.transpose(2, 3) + step.new_bias
    whole, pruned = [], []
    for bucket in buckets:
        heads = bucket.heads
        logits = [in_window[:, heads], in_new[:, heads]]
        pruned_keys, pruned_values = step.pruned[layer].get(bucket.name, (None, None))
        if pruned_keys is not None:
            kept = query[:, heads, :, : bucket.width] @ pruned_keys.transpose(2, 3)
            logits.append(kept + step.pruned_bias)
        weights = torch.cat(logits, -1).softmax(-1, dtype=torch.float32).to(query.dtype)
        whole.append(weights[..., : num_slots + num_new])
        if pruned_values is not None:
            share = _weigh(pruned_values, weights[..., num_slots + num_new :])
            dropped = head_dim - share.shape[2]
            pruned.append(pad(share, (0, 0, 0, dropped)) if dropped else share)
        elif pruned_keys is not None:
            pruned.append(torch.zeros_like(query[:, heads]).transpose(2, 3))
    weights = _join(whole)
    output = _weigh(window_values, weights[..., :num_slots]) + _weigh(value, weights[..., num_slots:])
    if pruned:
        # Heads of width 0 come first, and see nothing of the pruned region.
        empty = 0 if buckets[0].width else buckets[0].heads.stop
        rest = output[:, empty:] + _join(pruned)
        output = torch.cat([output[:, :empty], rest], 1) if empty else rest
    output = output.transpose(2, 3).reshape(batch, num_heads, num_new, head_dim)
    return output.transpose(1, 2).contiguous(), None


def _weigh(values: Tensor, weights: Tensor) -> Tensor:
    """[B, n, D, M] of values [B, n, D, N]: in this order onnxruntime reads the values where they lie."""
    return values @ weights.transpose(2, 3)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _reorder(states: Tensor, lanes: Tensor) -> Tensor:
    """Put the channels of [B, heads, Q, D] in the order [heads, D]: one gather over heads and channels."""
    batch, heads, num_new, head_dim = states.shape
    index = (lanes + torch.arange(heads)[:, None] * head_dim).flatten()
    flat = states.transpose(1, 2).flatten(2).index_select(2, index)
    return flat.view(batch, num_new, heads, head_dim).transpose(1, 2)


@contextmanager
def attending(model: Any, attend: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Let a model attend by a function of transformers' signature, which makes its own mask, for a while."""
    AttentionInterface.register(_ATTENTION, attend)
    AttentionMaskInterface.register(_ATTENTION, lambda **_: None)
    before = model.config._attn_implementation
    model.config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = before
