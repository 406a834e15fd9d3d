"""The order of a layer's KV heads in a checkpoint: buckets of equal width, contiguous, widths ascending.

Pure integers; nothing here knows of tensors or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
