"""What the dense passes of a step leave for the answer pass: keys and values, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass
class StoredContext:
    """Keys and values after RoPE of a context, and of the questions asked on it.

    Attributes:
        num_tokens: P, tokens of the context.
        offload: Whether they wait in host memory, in pinned memory where there is a GPU.
        num_seen: Tokens of earlier blocks, while the context is filled block by block.
        questions: Per layer, keys and values of the questions' own tokens [1, H_kv, T, D], answers excluded.
    """

    num_tokens: int
    offload: bool = False
    num_seen: int = 0
    questions: dict[int, Pair] = field(default_factory=dict)
    _pairs: dict[int, Pair] = field(default_factory=dict)
    _devices: dict[int, torch.device] = field(default_factory=dict)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep one block [1, H_kv, N, D], tokens `num_seen` … `num_seen + N`."""
        start, stop = self.num_seen, self.num_seen + key.shape[2]
        if layer not in self._pairs:
            self._devices[layer] = key.device
            if stop == self.num_tokens and not self.offload:
                self._pairs[layer] = key, value
                return
            self._pairs[layer] = self._allocate(key), self._allocate(value)
        for kept, new in zip(self._pairs[layer], (key, value), strict=True):
            kept[:, :, start:stop].copy_(new, non_blocking=True)

    def load(self, layer: int, start: int, stop: int) -> Pair:
        """Keys and values of tokens `start` … `stop` [1, H_kv, stop - start, D], on the layer's device."""
        device = self._devices[layer]
        key, value = (kept[:, :, start:stop].to(device, non_blocking=True) for kept in self._pairs[layer])
        return key, value

    def _allocate(self, like: Tensor) -> Tensor:
        shape = (*like.shape[:2], self.num_tokens, like.shape[3])
        if not self.offload:
            return like.new_empty(shape)
        return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
