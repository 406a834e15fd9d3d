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

from leank_convert.evaluate.compared_cache import ComparedLayer, Prompts

BITS, GROUP_SIZE, RESIDUAL_LENGTH = 2, 32, 128
_LARGEST_CODE = (1 << BITS) - 1


class KiviLayer(ComparedLayer):  # type: ignore[no-untyped-call]
    """A layer whose older tokens are rounded.

    Args:
        prompts: What it holds.
        in_window: Whether dropped channels, and V of heads that keep none, are rounded as well.
    """

    def __init__(self, prompts: Prompts, in_window: bool = False) -> None:
        super().__init__(prompts)
        self._in_window = in_window
        for row, length in enumerate(self.lengths):
            self._round_keys(row, 0, _rounded_keys(length))
            self._round_values(row, 0, _rounded_values(length))

    def settle(self) -> None:
        """Round what has become old enough in this step."""
        for row, length in enumerate(self.lengths):
            self._round_keys(row, _rounded_keys(length - 1), _rounded_keys(length))
            self._round_values(row, _rounded_values(length - 1), _rounded_values(length))

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
        if stop > start:
            tokens = self.keys[row, :, start:stop]
            rounded = quantise(torch.unflatten(tokens, 1, (-1, GROUP_SIZE)), dim=2).flatten(1, 2)
            chosen = self.channel_mask[:, None] | self._in_window
            tokens.copy_(torch.where(chosen, rounded, tokens))

    def _round_values(self, row: int, start: int, stop: int) -> None:
        if stop > start:
            tokens = self.values[row, :, start:stop]
            rounded = torch.cat(
                [quantise(part, dim=2) for part in torch.split(tokens, GROUP_SIZE, dim=2)], dim=2
            )
            chosen = (self.widths > 0)[:, None, None] | self._in_window
            tokens.copy_(torch.where(chosen, rounded, tokens))


def quantise(states: Tensor, dim: int) -> Tensor:
    """Round numbers to the nearest of four evenly spaced ones, of which the outer two are the extremes.

    Args:
        states: Numbers.
        dim: The dimension whose entries share extremes.

    Returns:
        What the codes stand for, in the dtype of `states`.
    """
    least, most = states.amin(dim, keepdim=True), states.amax(dim, keepdim=True)
    step = (most - least) / _LARGEST_CODE
    # Of equal numbers the step is 0, and any code does.
    codes = ((states - least).float() / step.float()).nan_to_num(0).round().clamp(0, _LARGEST_CODE)
    return (codes * step.float() + least.float()).to(states.dtype)


def _rounded_keys(length: int) -> int:
    """How many of a row's first tokens have rounded K."""
    return length // RESIDUAL_LENGTH * RESIDUAL_LENGTH


def _rounded_values(length: int) -> int:
    """How many of a row's first tokens have rounded V."""
    return max(length - RESIDUAL_LENGTH, 0)
