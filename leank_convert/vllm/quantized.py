"""Quantized weights under tensor parallelism: how many numbers of a tensor belong to a head. No vLLM."""

from __future__ import annotations

import torch

# Beside a weight of one byte an element: a number for all of it, for rows, or for blocks of rows and columns.
_SCALES = ("weight_scale", "weight_scale_inv", "weight_zero_point")


def count_of_head(name: str, tensor: torch.Tensor, dim: int, num_heads: int, head_dim: int) -> int | None:
    """Count a head's numbers along `dim`, in which heads lie, in a tensor of a quantized projection.

    None if all heads share one; ValueError if two share a number and others do not, or the layout is not
    known.
    """
    kind = name.rpartition(".")[2]
    if tensor.numel() == 1:
        return None
    if kind in _SCALES:
        if tensor.ndim <= dim or tensor.shape[dim] == 1:
            return None
        count, rest = divmod(tensor.shape[dim], num_heads)
        rows = head_dim // max(count, 1)
        # Blocks are a power of two of rows. Others follow from a last block that is cut short.
        if not rest and count * rows == head_dim and not rows & (rows - 1):
            return count
    elif kind in ("weight", "bias") and tensor.shape[dim] == num_heads * head_dim:
        return head_dim
    raise ValueError(
        f"`{name}` is of shape {list(tensor.shape)}, and tensor parallelism deals {num_heads} heads of "
        f"{head_dim} to ranks: it is packed, or parts of two heads share a scale; serve it on one GPU, or "
        "quantize it with a scale for each row"
    )
