"""KIVI in plain torch: K in 2 bits per channel, V in 2 bits per token (Liu et al., arXiv 2402.02750).

K is rounded in groups of 32 consecutive tokens of one channel, V in groups of 32 channels of one token; a
group has a minimum and a step in the model's dtype. Of K the prompt's last n mod 128 tokens stay as they are,
and while decoding all of these are rounded once they are 128; of V always the last 128. Prefill reads
nothing rounded, a token is rounded once. What is rounded is written back as what it stands for, and counted
as what it would take.

With LeanK the kept channels are rounded in all regions alike; what else the window holds, dropped channels
and V of heads that keep none, stays as it is, or is rounded too (`in_window`). As a group of K lies in one
channel, it does not matter to a kept channel whether the others are pruned before or after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bin.baselines.compared_cache import ComparedLayer, Prompts
from bin.baselines.int4 import quantise

BITS, GROUP_SIZE, RESIDUAL_LENGTH = 2, 32, 128


class KiviLayer(ComparedLayer):  # type: ignore[no-untyped-call]
    """A layer whose older tokens are rounded; `in_window` dropped channels, and V of heads without K, too."""

    def __init__(self, prompts: Prompts, in_window: bool = False) -> None:
        super().__init__(prompts)
        self._in_window = in_window
        for row, length in enumerate(self.lengths):
            self._round_keys(row, 0, length // RESIDUAL_LENGTH * RESIDUAL_LENGTH)
            tokens = self.values[row, :, : max(length - RESIDUAL_LENGTH, 0)]
            tokens.copy_(self._rounded_values(tokens))

    def settle(self) -> None:
        """Round what has become old enough in this step: of V a token, of K all that wait or none."""
        for row, length in enumerate(self.lengths):
            if length % RESIDUAL_LENGTH == 0:
                self._round_keys(row, length - RESIDUAL_LENGTH, length)
        rows = [row for row, length in enumerate(self.lengths) if length > RESIDUAL_LENGTH]
        if rows:
            places = [self.lengths[row] - RESIDUAL_LENGTH - 1 for row in rows]
            tokens = self.values[rows, :, places]
            self.values[rows, :, places] = self._rounded_values(tokens[:, :, None])[:, :, 0]

    def bits(self) -> tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]:
        """Bits of a number, by the token's age."""
        size, head_dim = 8 * self.keys.element_size(), self.keys.shape[3]
        places = torch.arange(self.keys.shape[2], device=self.keys.device)
        lengths = torch.tensor(self.lengths, device=self.keys.device)[:, None, None]
        old_keys = places < lengths // RESIDUAL_LENGTH * RESIDUAL_LENGTH
        old_values = places < lengths - RESIDUAL_LENGTH
        # A minimum and a step for every group.
        keys = torch.where(old_keys, BITS + 2 * size / GROUP_SIZE, size)
        values = torch.where(old_values, BITS + 2 * size * -(-head_dim // GROUP_SIZE) / head_dim, size)
        return keys, keys if self._in_window else size, values, values if self._in_window else size

    def _round_keys(self, row: int, start: int, stop: int) -> None:
        if stop > start:  # else there are no groups
            tokens = self.keys[row, :, start:stop]
            rounded = round_in_groups(tokens.mT).mT
            chosen = self.channel_mask[:, None] | self._in_window
            tokens.copy_(torch.where(chosen, rounded, tokens))

    def _rounded_values(self, tokens: Tensor) -> Tensor:
        """Round V of some tokens [..., H_kv, S, D]."""
        chosen = (self.widths > 0)[:, None, None] | self._in_window
        return torch.where(chosen, round_in_groups(tokens), tokens)


def round_in_groups(states: Tensor) -> Tensor:
    """Round numbers [..., H_kv, N, M] in groups of the last dimension."""
    groups = torch.arange(states.shape[-1], device=states.device) // GROUP_SIZE
    return quantise(states, groups.expand(states.shape[-3], -1), BITS)
