"""Cache size of models with pruned and unpruned layers.

Layers with a sliding window hold the last tokens alone, so what a model saves depends on the length of a row.
States of layers with linear attention are no K and V, and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from leank_convert.architectures import ModelFacts
from leank_convert.head_layout import BytesPerToken
from leank_convert.windows import Windows

_LENGTH = 32768


@dataclass(frozen=True)
class RowBytes:
    """Bytes of K and V of a row of tokens, all layers together.

    Attributes:
        dense: In the dense model.
        pruned: In a checkpoint of it.
    """

    dense: int
    pruned: int


def count_row_bytes(
    facts: ModelFacts,
    cache: BytesPerToken,
    windows: Windows,
    num_tokens: int,
    element_bytes: int,
) -> RowBytes:
    """Count the bytes of a row.

    Args:
        facts: The model's.
        cache: What a token takes in the layers that are pruned.
        windows: Which of the tokens keep every channel.
        num_tokens: Tokens of the row.
        element_bytes: Bytes of one number in the dense cache.
    """
    dense = cache.key_dense + cache.value_dense
    whole = min(num_tokens, windows.sink_size + windows.recent_size + windows.flush_size)
    rest = (cache.key_pruned + cache.value_pruned) * (num_tokens - whole)
    per_layer = 2 * facts.num_key_value_heads * facts.head_dim * element_bytes * min(num_tokens, facts.window)
    others = (facts.num_hidden_layers - len(facts.layers)) * per_layer
    return RowBytes(
        dense=dense * num_tokens + others,
        pruned=rest + (cache.key_window + cache.value_window) * whole + others,
    )


def describe_layers(
    facts: ModelFacts,
    cache: BytesPerToken,
    windows: Windows,
    element_bytes: int,
) -> str:
    """Say in one line what is pruned of a mixed model, and what that makes of its whole cache."""
    row = count_row_bytes(facts, cache, windows, _LENGTH, element_bytes)
    return (
        f"prunes {len(facts.layers)} of {facts.num_hidden_layers} layers, those with full attention; K+V "
        f"bytes per token at 32K: dense {row.dense // _LENGTH:,}, pruned {row.pruned // _LENGTH:,}"
    )
