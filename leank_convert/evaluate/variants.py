"""Variants that decode from a prefill: dense, LeanK, ThinK, rounded caches, and published baselines by name.

ThinK (Xu et al., arXiv 2407.21018) keeps, of each head, the channels i of the largest ||Q_i K_i^T||_F, whose
square is sum_w q_wi^2 · sum_s k_si^2: Q the prompt's last queries, K all its keys, both after RoPE. A KV
head's channels serve its G query heads alike, so their sums are added. This is what kvpress's `ThinKPress`
does; ThinK's own code repeats the keys for every query head and chooses for each. Columns of padding are no
queries and no keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from leank_convert.errors import LeanKError
from leank_convert.evaluate.loading import EvaluatedModel
from leank_convert.evaluate.names import (
    DENSE,
    PER_HEAD_BUDGET,
    ROUNDED,
    THINK,
    WINDOW,
    check_names,
    load_baselines,
)
from leank_convert.evaluate.prefill import Prefill
from leank_convert.windows import Windows

QUERY_WINDOW = 32  # as many as ThinK's code takes
# ThinK's own: no sink, the prompt's last 32 tokens, and what is decoded, here up to 128 tokens of it.
THINK_WINDOWS = Windows(sink_size=0, recent_size=32, flush_size=128)


class Variant(Protocol):
    """One way to go on from a prefill."""

    name: str  # of its column
    windows: Windows | None  # tokens that stay whole, None for the checkpoint's
    query_window: int  # how many of the prompt's last queries it looks at

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """The model and the cache to decode with; the prefill stays as it is."""


@dataclass
class Dense:
    """All keys and values, in the stock class."""

    model: Any  # the stock model on the same weights
    name: str = DENSE
    windows: Windows | None = None
    query_window: int = 0

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """A dense cache of the prompts' keys and values."""
        cache = DynamicCache()
        for index, layer in enumerate(prefill.fork().layers):
            if hasattr(layer, "pending"):
                cache.update(*layer.pending, index)
            else:  # it is not pruned, and the stock class's already
                cache.layers.append(layer)
        return self.model, cache


@dataclass
class Masked:
    """A LeanK cache that keeps the same channels for every prompt; None stands for the checkpoint's own."""

    name: str
    channel_masks: Tensor | None = None  # kept channels in the checkpoint's head order, bool [L, H_kv, D]
    windows: Windows | None = None
    query_window: int = 0
    kv_dtype: str | None = None  # what keys and values are stored in
    # By the runtime's names (`key_mean`, of FP8 `key_scale`, `value_scale`), each [L, H_kv, D] in that order.
    constants: Mapping[str, Tensor] | None = None
    prune_values: bool = True  # where the checkpoint does

    def start(self, prefill: Prefill) -> tuple[Any, Any]:
        """A fork of the prefill's cache with these channels."""
        cache = prefill.fork(self.windows)
        if self.kv_dtype is not None:
            cache.kv_dtype = self.kv_dtype
        if self.channel_masks is not None:
            for layer, mask in zip(cache.pruned_layers, self.channel_masks, strict=True):
                layer.set_channel_mask(mask.to(prefill.model.device), prune_values=self.prune_values)
        if self.constants is not None:
            for place, layer in enumerate(cache.pruned_layers):
                own = {name: constant[place][None].float() for name, constant in self.constants.items()}
                layer.model_constants = layer.model_constants._replace(**own)
        return prefill.model, cache


@dataclass
class ThinK:
    """Channels that ThinK's rule chooses for each prompt."""

    # The share that every head drops, rounded down to channels; or how many channels each head keeps, int64
    # [L, H_kv] in the CHECKPOINT's head order. With a mask's widths it shows what the choice is worth apart
    # from them.
    budget: float | Tensor
    windows: Windows | None = None
    query_window: int = QUERY_WINDOW
    name: str = THINK

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Tensor) and not 0 <= self.budget < 1:
            raise LeanKError(
                f"`{self.name}`: pruning ratio {self.budget} is not at least 0 and below 1",
                hint="ThinK keeps at least one channel of every head",
            )

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """The model, and a cache that will keep what this prompt's queries choose."""
        cache, widths = prefill.fork(self.windows), self.budget
        keys_of_layers = [keys for keys, _ in prefill.keys_and_values]
        if not isinstance(widths, Tensor):
            _, num_heads, _, head_dim = keys_of_layers[0].shape
            widths = torch.full((len(keys_of_layers), num_heads), kept_channels(head_dim, widths))
        for layer, queries, keys, kept in zip(
            cache.pruned_layers, prefill.queries, keys_of_layers, widths, strict=True
        ):
            window = queries[:, :, -self.query_window :]
            chosen = choose_channels(window, keys, prefill.attention_mask, kept)
            layer.set_channel_mask(chosen, prune_values=isinstance(self.budget, Tensor))  # ThinK's V is whole
        return prefill.model, cache


def find_variants(names: Sequence[str], evaluated: EvaluatedModel) -> list[Variant]:
    """What answers besides the dense model and the pruned cache, of some names several; as `check_names`."""
    check_names(names)
    factories = {**OTHERS, **load_baselines(names)}
    return [variant for name in dict.fromkeys(names) for variant in factories[name](evaluated)]


def rounded_variant(name: str, channel_masks: Tensor, key_mean: Tensor | None) -> Masked:
    """A LeanK cache in FP8 or int4 by its name: on all channels, with `leank+` on the kept ones [L, H_kv, D].

    Then `key_mean` [L, H_kv, D] comes off its keys, both in the checkpoint's head order.
    """
    kv_dtype = name.removeprefix("leank+")
    if name == kv_dtype:
        return Masked(name, torch.ones_like(channel_masks), kv_dtype=kv_dtype, prune_values=False)
    constants = None if key_mean is None else {"key_mean": key_mean}
    return Masked(name, channel_masks, kv_dtype=kv_dtype, constants=constants)


def _round(name: str, evaluated: EvaluatedModel) -> list[Variant]:
    return [rounded_variant(name, evaluated.channel_masks, evaluated.key_mean)]


OTHERS: dict[str, Callable[[EvaluatedModel], list[Variant]]] = {
    WINDOW: lambda evaluated: [Masked(WINDOW, torch.zeros_like(evaluated.channel_masks))],
    THINK: lambda evaluated: [ThinK(evaluated.leank["pruning_ratio"], THINK_WINDOWS)],
    PER_HEAD_BUDGET: lambda evaluated: [ThinK(torch.tensor(evaluated.leank["widths"]), name=PER_HEAD_BUDGET)],
    **{name: partial(_round, name) for name in ROUNDED},
}
"""What `--also` takes, beside the baselines of a checkout."""


def kept_channels(head_dim: int, pruning_ratio: float) -> int:
    """Channels of a head that ThinK keeps: it rounds down what it drops."""
    # A ratio such as 0.29 is below itself in binary: 0.29 of 100 channels are 29.
    return head_dim - math.floor(head_dim * pruning_ratio + 1e-9)


def choose_channels(queries: Tensor, keys: Tensor, attention_mask: Tensor, widths: Tensor) -> Tensor:
    """Choose each head's channels for each row by ThinK's rule; of equal ones the first; bool [B, H_kv, D].

    By the prompt's last queries [B, H, W, D] and its keys [B, H_kv, S, D], both after RoPE; the mask [B, S]
    is 1 where a column is real, and heads keep `widths` [H_kv].
    """
    batch_size, num_heads, num_columns, head_dim = keys.shape
    real = attention_mask.to(keys.device, torch.float32)
    # By head: in float32, a long prompt's keys are the largest thing there is.
    key_sums = torch.stack(
        [torch.einsum("bs,bsd->bd", real, keys[:, head].float().square()) for head in range(num_heads)], dim=1
    )
    window = real[:, num_columns - queries.shape[2] :]
    squares = torch.einsum("bw,bhwd->bhd", window, queries.float().square())
    query_sums = squares.view(batch_size, num_heads, -1, head_dim).sum(2)
    order = (query_sums * key_sums).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1) < widths.to(keys.device)[:, None]
