"""Head layout: heads sorted into buckets of one width, and the bytes of caches.

Pure integers; nothing here knows of tensors or files. Layers with a sliding window hold the last tokens
alone, so what a model with some saves depends on the length of a row. States of layers with linear attention
are no K and V, and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leank_convert._runtime.layout_leank import INT4_GROUP_SIZE, ChunkLayout
from leank_convert.architectures import ModelFacts
from leank_convert.windows import Windows

BYTES_PER_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "BF16": 2, "F16": 2, "F32": 4, "fp8": 1}
_LENGTH = 32768  # of the row that stands for all


def bytes_of(dtype: str | None) -> int:
    """Bytes of a number of a dtype; two where that is not known."""
    return BYTES_PER_ELEMENT.get(dtype or "", 2)


@dataclass(frozen=True)
class HeadLayout:
    """How the KV heads of every layer are ordered in a checkpoint."""

    head_permutation: tuple[tuple[int, ...], ...]  # `[layer][new] = old`, KV heads
    widths: tuple[tuple[int, ...], ...]  # kept channels `[layer][new]`, ascending within a layer


def plan_head_layout(widths: Sequence[Sequence[int]]) -> HeadLayout:
    """Order every layer's heads by width `[layer][head]`, keeping the original order within a bucket."""
    permutations = tuple(tuple(sorted(range(len(layer)), key=layer.__getitem__)) for layer in widths)
    return HeadLayout(permutations, tuple(tuple(sorted(layer)) for layer in widths))


@dataclass(frozen=True)
class BytesPerToken:
    """Bytes per cached token, over all layers and heads."""

    key_dense: int  # K of a token in the dense model
    value_dense: int  # V of the same
    key_pruned: int  # K of a token in the pruned region: each head's kept channels
    # V of the same: each head's kept directions; where V is not pruned whole, or nothing for a head of width
    # 0.
    value_pruned: int
    key_window: int  # K of a token in the sink or the recent window: every channel
    value_window: int  # V of the same

    @property
    def removed(self) -> tuple[float, float]:
        """Fractions of K's and of V's bytes saved in the pruned region."""
        return 1 - self.key_pruned / self.key_dense, 1 - self.value_pruned / self.value_dense

    @property
    def saved(self) -> float:
        """Fraction of K and V bytes saved in the pruned region."""
        return 1 - (self.key_pruned + self.value_pruned) / (self.key_dense + self.value_dense)


def list_value_widths(
    widths: Sequence[Sequence[int]], head_dim: int, value_widths: Sequence[Sequence[int]] | None
) -> list[int]:
    """List how many channels of V a pruned token keeps, head by head, layer by layer.

    By kept channels of K and directions of V `[layer][head]`, those None where V is not pruned.
    """
    values = [None] * len(widths) if value_widths is None else map(tuple, value_widths)
    layers = (ChunkLayout(tuple(k), head_dim, 1, v, 1) for k, v in zip(widths, values, strict=True))
    return [width for layer in layers for width in layer.kept_values]  # in chunks of one channel


def count_cache_bytes(
    widths: Sequence[Sequence[int]],
    head_dim: int,
    element_bytes: int,
    kv_dtype: str | None = None,
    value_widths: Sequence[Sequence[int]] | None = None,
) -> BytesPerToken:
    """Count the bytes of one token, by kept channels and directions `[layer][head]` in any order of heads.

    `element_bytes` are of a number in the dense cache; `kv_dtype` is what the pruned one is stored in, if
    that is something else. `value_widths` are None where V is not pruned.
    """
    heads = [width for layer in widths for width in layer]
    values = list_value_widths(widths, head_dim, value_widths)
    dense = len(heads) * head_dim * element_bytes

    def stored(spans: Sequence[int]) -> int:
        """Count channels that lie together, of so many heads, or of their kept and dropped ones."""
        if kv_dtype == "int4":
            groups: int = sum(-(-span // INT4_GROUP_SIZE) for span in spans)
            return -(-sum(spans) // 2) + groups * 2 * element_bytes
        return sum(spans) * (BYTES_PER_ELEMENT[kv_dtype] if kv_dtype else element_bytes)

    return BytesPerToken(
        key_dense=dense,
        value_dense=dense,
        key_pruned=stored(heads),
        value_pruned=stored(values),
        key_window=stored([*heads, *(head_dim - width for width in heads)]),
        value_window=stored([*values, *(head_dim - width for width in values)]),
    )


def count_row_bytes(
    facts: ModelFacts, cache: BytesPerToken, windows: Windows, num_tokens: int, element_bytes: int
) -> dict[str, int]:
    """Count the bytes of a row, `dense` and `pruned`, all layers together.

    The cache says what a token takes in pruned layers, `element_bytes` are those of a number in the others.
    """
    dense = cache.key_dense + cache.value_dense
    whole = min(num_tokens, windows.sink_size + windows.recent_size + windows.flush_size)
    rest = (cache.key_pruned + cache.value_pruned) * (num_tokens - whole)
    per_layer = 2 * facts.num_key_value_heads * facts.head_dim * element_bytes * min(num_tokens, facts.window)
    others = (facts.num_hidden_layers - len(facts.layers)) * per_layer
    return {
        "dense": dense * num_tokens + others,
        "pruned": rest + (cache.key_window + cache.value_window) * whole + others,
    }


def describe_layers(facts: ModelFacts, cache: BytesPerToken, windows: Windows, element_bytes: int) -> str:
    """Say in one line what is pruned of a mixed model, and what that makes of its whole cache."""
    row = count_row_bytes(facts, cache, windows, _LENGTH, element_bytes)
    return (
        f"prunes {len(facts.layers)} of {facts.num_hidden_layers} layers, those with full attention; K+V "
        f"bytes per token at 32K: dense {row['dense'] // _LENGTH:,}, pruned {row['pruned'] // _LENGTH:,}"
    )


def choose_value_multiple(head_dim: int) -> int:
    """Choose what kept channels of V are a multiple of: a chunk that kernels are at their best with.

    Where half of V goes, multiples of 64 cost heads of 128 nothing, those of 32 cost heads of 64 more.
    """
    if head_dim > 64:
        return math.gcd(head_dim, 64 if head_dim >= 128 else 32)
    return math.gcd(head_dim, max(1, head_dim // 4))
