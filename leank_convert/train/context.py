"""What the dense passes of a step leave for the answer pass: keys and values, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass
class StoredContext:
    """Keys and values after RoPE of a context, and of the questions asked on it.

    Attributes:
        num_tokens: P, tokens of the context.
        offload: Whether they wait in host memory, pinned where there is a GPU.
        num_seen: Tokens of earlier blocks, while the context is filled block by block.
        questions: Per layer, keys and values of the questions' own tokens [1, H_kv, T, D], answers excluded.
    """

    num_tokens: int
    offload: bool = False
    num_seen: int = 0
    questions: dict[int, Pair] = field(default_factory=dict)
    _pairs: dict[int, Pair] = field(default_factory=dict)
    # Block by block: only whole tensors are copied between host and device without a detour.
    _offloaded: dict[int, list[Pair]] = field(default_factory=dict)
    _devices: dict[int, torch.device] = field(default_factory=dict)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep one block [1, H_kv, N, D], tokens `num_seen` … `num_seen + N`."""
        start, stop = self.num_seen, self.num_seen + key.shape[2]
        if self.offload:
            self._devices[layer] = key.device
            self._offloaded.setdefault(layer, []).append((_to_host(key), _to_host(value)))
            return
        if layer not in self._pairs:
            if stop == self.num_tokens:
                self._pairs[layer] = key, value
                return
            shape = (*key.shape[:2], self.num_tokens, key.shape[3])
            self._pairs[layer] = key.new_empty(shape), value.new_empty(shape)
        for kept, new in zip(self._pairs[layer], (key, value), strict=True):
            kept[:, :, start:stop] = new

    def load(self, layer: int, stop: int | None = None) -> Pair:
        """Keys and values of the tokens before `stop`, an end of a block [1, H_kv, stop, D]; None for all."""
        if not self.offload:
            key, value = (kept[:, :, :stop] for kept in self._pairs[layer])
            return key, value
        device = self._devices[layer]
        blocks = self._offloaded[layer]
        if stop is not None:
            ends = accumulate(block[0].shape[2] for block in blocks)
            blocks = [block for block, end in zip(blocks, ends, strict=True) if end <= stop]
        keys = torch.cat([block[0].to(device, non_blocking=True) for block in blocks], dim=2)
        values = torch.cat([block[1].to(device, non_blocking=True) for block in blocks], dim=2)
        return keys, values


def _to_host(tensor: Tensor) -> Tensor:
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return kept.copy_(tensor, non_blocking=True)
