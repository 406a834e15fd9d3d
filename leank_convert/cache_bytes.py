"""Bytes that one token takes in the cache, before and after pruning. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BYTES_PER_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class BytesPerToken:
    """Bytes per cached token, over all layers and heads.

    Attributes:
        key_dense: K of a token in the sink or the recent window, or in the dense model.
        value_dense: V of the same.
        key_pruned: K of a token in the pruned region: each head's kept channels.
        value_pruned: V of the same: whole, or nothing for a head of width 0.
    """

    key_dense: int
    value_dense: int
    key_pruned: int
    value_pruned: int

    @property
    def saved(self) -> float:
        """Fraction of K and V bytes saved in the pruned region."""
        return 1 - (self.key_pruned + self.value_pruned) / (self.key_dense + self.value_dense)


def count_cache_bytes(widths: Sequence[Sequence[int]], head_dim: int, element_bytes: int) -> BytesPerToken:
    """Count the bytes of one token.

    Args:
        widths: Kept channels `[layer][head]`, in any head order.
        head_dim: D.
        element_bytes: Bytes of one number in the cache.
    """
    heads = [width for layer in widths for width in layer]
    dense = len(heads) * head_dim * element_bytes
    return BytesPerToken(
        key_dense=dense,
        value_dense=dense,
        key_pruned=sum(heads) * element_bytes,
        value_pruned=sum(width > 0 for width in heads) * head_dim * element_bytes,
    )
