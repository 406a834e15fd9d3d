"""int4 in plain torch: K and V of every token in four bits, rotated before.

Of each token's K a head's channels lie in chunks of 32, kept and dropped ones in chunks of their own, the
last of either as small as it comes out; V lies in chunks of 32 channels, too. A chunk has a minimum and a
step in the model's dtype. Prefill reads nothing rounded; its tokens are rounded after it, any later one as it
is appended. What is rounded is held as what it stands for, and counted as what it would take.

A Hadamard matrix within each chunk spreads large channels over it. As it is orthogonal, queries that are
rotated alike give the scores that they gave before, and outputs are rotated back; as no chunk has kept and
dropped channels, pruning drops what it dropped before. Of a smaller chunk it rotates the powers of two that
its size is the sum of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bin.baselines.compared_cache import ComparedLayer, Prompts

BITS, CHUNK_SIZE = 4, 32


class HadamardLayer(ComparedLayer):  # type: ignore[no-untyped-call]
    """A layer whose tokens are rotated and rounded, all of them."""

    def __init__(self, prompts: Prompts) -> None:
        super().__init__(prompts)
        self._key_chunks = assign_chunks(self.channel_mask)
        self._value_chunks = assign_chunks(torch.ones_like(self.channel_mask))
        self._of_keys, self._of_values = hadamard(self._key_chunks), hadamard(self._value_chunks)
        for keys, values in zip(self.keys, self.values, strict=True):
            rounded = self._rounded(keys[None], values[None])
            keys.copy_(rounded[0][0])
            values.copy_(rounded[1][0])

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append one token a row [B, H_kv, 1, D], rounded."""
        super().append(*self._rounded(key_states, value_states))

    def enter(self, query: Tensor) -> Tensor:
        """Rotate queries as keys were."""
        return query @ self._of_keys

    def leave(self, out: Tensor) -> Tensor:
        """Rotate outputs back, as values were."""
        return out @ self._of_values

    def bits(self) -> tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]:
        """Bits of a number, with its part of the chunk's minimum and step."""
        head_dim = self.keys.shape[3]

        def bits_of(num_channels: Tensor) -> Tensor:
            extremes = 2 * (num_channels / CHUNK_SIZE).ceil() * 8 * self.keys.element_size()
            return BITS + extremes / num_channels.clamp(min=1)

        widths = self.widths[:, None].double()  # not every share has an exact binary fraction
        values = bits_of(torch.full_like(widths, head_dim))
        return bits_of(widths), bits_of(head_dim - widths), values, values

    def _rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys = (keys.float() @ self._of_keys).to(self.dtype)
        values = (values.float() @ self._of_values).to(self.dtype)
        return quantise(keys, self._key_chunks), quantise(values, self._value_chunks)


def assign_chunks(channel_mask: Tensor) -> Tensor:
    """Chunk of each channel [H_kv, D], from 0 in each head: kept ones, by the mask, in the first ones."""
    places = torch.where(channel_mask, channel_mask.cumsum(-1), (~channel_mask).cumsum(-1)) - 1
    kept_chunks = -(-channel_mask.sum(-1, keepdim=True) // CHUNK_SIZE)
    return places // CHUNK_SIZE + torch.where(channel_mask, 0, kept_chunks)


def hadamard(chunks: Tensor) -> Tensor:
    """Matrices [H_kv, D, D] that rotate every chunk [H_kv, D] within itself, each its own inverse."""
    matrices = torch.zeros(*chunks.shape, chunks.shape[1], device=chunks.device)
    for matrix, of_head in zip(matrices, chunks, strict=True):
        for chunk in of_head.unique():
            channels = (of_head == chunk).nonzero().flatten()
            while len(channels):
                block = torch.ones(1, 1, device=chunks.device)
                while 2 * len(block) <= len(channels):
                    block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
                taken, channels = channels[: len(block)], channels[len(block) :]
                matrix[taken[:, None], taken] = block * len(block) ** -0.5
    return matrices


def quantise(states: Tensor, chunks: Tensor, bits: int = BITS) -> Tensor:
    """Round numbers [..., H_kv, S, D] to the nearest of 2^bits evenly spaced ones, and give these back.

    The outer two are the extremes of a chunk of channels, `chunks` [H_kv, D].
    """
    index, most = chunks[:, None].expand(states.shape), torch.finfo(states.dtype).max
    shape = *states.shape[:-1], int(chunks.max()) + 1

    def extreme(reduce: str) -> Tensor:
        empty = states.new_empty(shape)
        return empty.scatter_reduce(-1, index, states, reduce, include_self=False).gather(-1, index).float()

    least, largest_code = extreme("amin"), (1 << bits) - 1
    step = ((extreme("amax") - least) / largest_code).to(states.dtype).float()
    # Of equal numbers the step is 0, and any code does.
    codes = ((states.float() - least) / step).nan_to_num(0).round().clamp(0, largest_code)
    return (codes * step + least).to(states.dtype).clamp(-most, most)
