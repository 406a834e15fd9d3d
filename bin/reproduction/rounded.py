"""Prompts whose keys or values alone are rounded: what each of the two costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from bin.baselines.int4 import assign_chunks
from bin.baselines.int4 import quantise as round_to_int4
from bin.benchmarks.rounded_cache import round_to_fp8
from leank_convert._runtime.fp8_leank import scale_of
from leank_convert.evaluate.prefill import Prefill
from leank_convert.windows import Windows


@dataclass
class RoundedPrompt:
    """A LeanK cache in the model's dtype, of prompts of which keys or values were rounded before."""

    name: str  # what its column is called
    channel_masks: Tensor  # kept channels in the checkpoint's head order, bool [L, H_kv, D]
    key_mean: Tensor  # what comes off keys before, in the same order [L, H_kv, D]
    kv_dtype: str  # `fp8`, by scales of every prompt's channels, or `int4`
    keys: bool = True  # whether keys are rounded; else values are
    windows: Windows | None = None
    query_window: int = 0

    def start(self, prefill: Prefill) -> tuple[Any, Cache]:
        """The model, and a fork of the prefill's cache with rounded prompts."""
        cache = prefill.fork()
        for place, layer in enumerate(cache.pruned_layers):
            keys, values = layer.pending
            mask = self.channel_masks[place].to(keys.device)
            mean = self.key_mean[place].to(keys.device, torch.float32)
            layer.set_channel_mask(mask)
            layer.model_constants = layer.model_constants._replace(key_mean=mean[None])
            if self.keys:
                centred = (keys.float() - mean[:, None]).to(keys.dtype)
                keys = (self._rounded(centred, mask).float() + mean[:, None]).to(keys.dtype)
            else:
                values = self._rounded(values, torch.ones_like(mask))
            layer.pending = keys, values
        return prefill.model, cache

    def _rounded(self, states: Tensor, mask: Tensor) -> Tensor:
        """What a rounded cache gives back of states [B, H_kv, S, D]."""
        if self.kv_dtype == "int4":
            return torch.cat([round_to_int4(row[None], assign_chunks(mask)) for row in states])
        return round_to_fp8(states, scale_of(states.abs().amax(2, keepdim=True)))
