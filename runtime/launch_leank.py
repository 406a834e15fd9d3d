"""Which kernels serve a decode step; none yet: plain torch serves all of them."""

from __future__ import annotations

from typing import Protocol

import torch


class DecodeKernels(Protocol):
    """The kernels of one device, dtype and shape."""

    def plan(
        self, lengths: torch.Tensor, pruned_lengths: torch.Tensor, sink_size: int, num_slots: int
    ) -> torch.Tensor:
        """Say what each row's tiles cost, int32; `lengths` and `pruned_lengths` are `[B]`, int32."""

    def append(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept_keys: torch.Tensor,
        stored_values: torch.Tensor,
        window_keys: torch.Tensor,
        window_values: torch.Tensor,
        chunk_index: torch.Tensor,
        head_table: torch.Tensor,
        lengths: torch.Tensor,
        valid: torch.Tensor | None,
        sink_size: int,
    ) -> None:
        """Add one token per row, `keys` and `values` `[B, H_kv, 1, D]`, in place."""

    def attend(
        self,
        query: torch.Tensor,
        kept_keys: torch.Tensor,
        stored_values: torch.Tensor,
        window_keys: torch.Tensor,
        window_values: torch.Tensor,
        chunk_index: torch.Tensor,
        head_table: torch.Tensor,
        lengths: torch.Tensor,
        pruned_lengths: torch.Tensor,
        plan: torch.Tensor,
        *,
        sink_size: int,
        softmax_scale: float,
    ) -> torch.Tensor:
        """Attend with one column `[B, H, 1, D]` to what is stored."""


def find_kernels(
    device: torch.device, dtype: torch.dtype, *, head_dim: int, num_groups: int, chunk_size: int
) -> DecodeKernels | None:
    """Return the kernels for a device, a dtype and a shape, None if plain torch must do."""
    return None
