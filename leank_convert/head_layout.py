"""Head layout: heads sorted into buckets of one width, and the cache bytes that their widths take.

Pure integers; nothing here knows of tensors or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BYTES_PER_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "BF16": 2, "F16": 2, "F32": 4, "fp8": 1}


@dataclass(frozen=True)
class HeadLayout:
    """How the KV heads of every layer are ordered in a checkpoint.

    Attributes:
        head_permutation: `[layer][new] = old`, KV heads.
        widths: Kept channels `[layer][new]`, ascending within a layer.
    """

    head_permutation: tuple[tuple[int, ...], ...]
    widths: tuple[tuple[int, ...], ...]


def plan_head_layout(widths: Sequence[Sequence[int]]) -> HeadLayout:
    """Order every layer's heads by width, keeping the original order within a bucket.

    Args:
        widths: Kept channels `[layer][head]` in the ORIGINAL head order.

    Returns:
        The permutation and the widths in the new order.
    """
    permutations = tuple(tuple(sorted(range(len(layer)), key=layer.__getitem__)) for layer in widths)
    return HeadLayout(
        head_permutation=permutations,
        widths=tuple(
            tuple(layer[old] for old in permutation)
            for layer, permutation in zip(widths, permutations, strict=True)
        ),
    )


@dataclass(frozen=True)
class BytesPerToken:
    """Bytes per cached token, over all layers and heads.

    Attributes:
        key_dense: K of a token in the dense model; in the sink or the recent window as well, unless that is
            stored in another dtype.
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


def count_cache_bytes(
    widths: Sequence[Sequence[int]], head_dim: int, element_bytes: int, stored_bytes: int | None = None
) -> BytesPerToken:
    """Count the bytes of one token.

    Args:
        widths: Kept channels `[layer][head]`, in any head order.
        head_dim: D.
        element_bytes: Bytes of one number in the dense cache.
        stored_bytes: The same in the pruned cache, if it is another.
    """
    stored_bytes = stored_bytes or element_bytes
    heads = [width for layer in widths for width in layer]
    dense = len(heads) * head_dim * element_bytes
    return BytesPerToken(
        key_dense=dense,
        value_dense=dense,
        key_pruned=sum(heads) * stored_bytes,
        value_pruned=sum(width > 0 for width in heads) * head_dim * stored_bytes,
    )
