"""Shared dense prefill of a batch of prompts, from which any number of caches continue.

Prefill is dense whatever is pruned, so one serves the dense model and every choice of channels: keys and
values stay whole (`prune="deferred"`) in a LeanK cache, and each variant decodes from a fork of it that
shares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from leank_convert._runtime.configuration_leank import CACHE
from leank_convert._runtime.tools import concatenate, fork
from leank_convert.errors import NotFiniteError
from leank_convert.windows import Windows

# Of a padded batch, lest the feed-forward layers' intermediate results take more than the cache does.
_TOKENS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Prefill:
    """A batch of prompts, run once."""

    model: Any  # the LeanK model that ran it
    # Its LeanK cache, every layer's keys and values [B, H_kv, S, D] pending; is never decoded on.
    cache: Any
    attention_mask: Tensor  # 1 where a column is real [B, S]; padding is on the left
    next_token: Tensor  # the greedy token after each prompt [B, 1]
    # Per layer the last queries after RoPE [B, H, W, D]; none if they were not asked for.
    queries: tuple[Tensor, ...] = ()

    def fork(self, windows: Windows | None = None) -> Any:
        """A LeanK cache that goes on from the prompts, with the model's windows or others."""
        return fork(self.cache, **({} if windows is None else windows.sizes))

    @property
    def keys_and_values(self) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, of all columns, after RoPE; each [B, H_kv, S, D]."""
        return [layer.pending for layer in self.cache.pruned_layers]


@torch.no_grad()
def run_prefill(model: Any, input_ids: Tensor, attention_mask: Tensor, *, query_window: int = 0) -> Prefill:
    """Run a batch of prompts [B, S], padded on the left, densely; keeps as many of their last queries."""
    if bool(attention_mask.all()):
        return _run(model, input_ids, query_window)
    # Padding needs a mask of S x S for every row, which fills the memory and which flash attention does not
    # take. Rows of one length by themselves need none.
    parts = [_run(model, ids, query_window) for ids in _without_padding(input_ids, attention_mask)]
    cache = concatenate([part.cache for part in parts])
    next_token = torch.cat([part.next_token for part in parts])
    queries = tuple(
        _stack_left_padded(layer) for layer in zip(*(part.queries for part in parts), strict=True)
    )
    return Prefill(model, cache, attention_mask, next_token, queries)


@torch.no_grad()
def prefill_stock(model: Any, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Cache]:
    """Run prompts [B, S], padded on the left, as `run_prefill`: the greedy next tokens [B, 1], the cache."""

    def run(ids: Tensor, mask: Tensor) -> tuple[Tensor, Cache]:
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions_of(mask),
            logits_to_keep=1,
            use_cache=True,
        )
        return likeliest(output.logits[:, -1]), output[CACHE]

    if bool(attention_mask.all()):
        return run(input_ids, attention_mask)
    tokens, caches = [], []
    for ids, real in zip(input_ids, attention_mask.bool(), strict=True):
        alone = ids[real][None]
        token, cache = run(alone, torch.ones_like(alone))
        # Some layer may hold fewer columns, such as one with a sliding window.
        if type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return run(input_ids, attention_mask)
        tokens.append(token)
        caches.append(cache)
    joined = DynamicCache()
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        names = "keys", "values"
        keys, values = (_stack_left_padded([getattr(layer, name) for layer in layers]) for name in names)
        joined.update(keys, values, index)
        for layer in layers:  # one layer is held twice, not all
            layer.keys = layer.values = None
    return torch.cat(tokens), joined


def pad_left(prompts: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Stack prompts [N] to ids and padding mask [B, S]."""
    ones = [torch.ones_like(prompt) for prompt in prompts]
    ids, real = (pad_sequence(list(rows), batch_first=True, padding_side="left") for rows in (prompts, ones))
    return ids.to(device), real.to(device)


def positions_of(attention_mask: Tensor) -> Tensor:
    """Positions [B, S] counted from each row's first real token."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def likeliest(logits: Tensor) -> Tensor:
    """The most likely tokens [B, 1] by logits [B, vocabulary]; NotFiniteError if some are NaN."""
    if bool(logits.isnan().any()):
        raise NotFiniteError("logits of the model are NaN")
    return logits.argmax(-1, keepdim=True)


@torch.no_grad()
def decode_token(model: Any, cache: Any, token: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Feed one token a row [B, 1] to a cache that holds all before it.

    Returned are logits of the next [B, vocabulary], and the padding mask with the fed column [B, S + 1].
    """
    attention_mask = torch.cat([attention_mask, torch.ones_like(token)], dim=1)
    logits = model(
        input_ids=token,
        attention_mask=attention_mask,
        position_ids=positions_of(attention_mask)[:, -1:],
        **{CACHE: cache},
    ).logits
    return logits[:, -1], attention_mask


def _stack_left_padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of [1, H, N, D], as many columns of zeros before each as make it as long as the longest."""
    longest = max(row.shape[2] for row in rows)
    return torch.cat([functional.pad(row, (0, 0, longest - row.shape[2], 0)) for row in rows])


def _without_padding(input_ids: Tensor, attention_mask: Tensor) -> Iterator[Tensor]:
    """Neighbouring rows of one length together [b, N], no more than `_TOKENS_AT_ONCE`."""
    rows = [ids[real] for ids, real in zip(input_ids, attention_mask.bool(), strict=True)]
    for length, group in groupby(rows, key=len):
        yield from torch.split(torch.stack(list(group)), max(1, _TOKENS_AT_ONCE // length))


def _run(model: Any, input_ids: Tensor, query_window: int) -> Prefill:
    """Run prompts of one length [B, S]."""
    cache, attention_mask = model.build_cache("deferred"), torch.ones_like(input_ids)
    with _recorded_queries(model, query_window) as queries:
        output = model(
            input_ids=input_ids,
            position_ids=positions_of(attention_mask),
            cache=cache,
            logits_to_keep=1,
        )
    return Prefill(model, cache, attention_mask, likeliest(output.logits[:, -1]), tuple(queries))


@contextmanager
def _recorded_queries(model: Any, num_queries: int) -> Iterator[list[Tensor]]:
    """Collect every pruned layer's last queries of the forward pass within this context."""
    queries: list[Tensor] = []
    if not num_queries:
        yield queries
        return
    pruned = model.config.leank.get("layers", range(model.config.num_hidden_layers))
    name = model.config._attn_implementation
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def record(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx in pruned:
            queries.append(query[:, :, -num_queries:].clone())
        return attend(module, query, *args, **kwargs)

    # The cache keeps no queries: nothing but a method under evaluation asks for them.
    AttentionInterface.register(name, record)
    try:
        yield queries
    finally:
        AttentionInterface.register(name, attend)
