"""Capacity estimate: how many requests fit into a given memory, pruned and dense. No vLLM.

The pool is divided as vLLM does it; one of its blocks stands for pages that were given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.pages import BLOCK_SIZE, ModelPages


@dataclass(frozen=True)
class Capacity:
    """What a pool holds."""

    blocks: int  # pages of the pool
    requests: int  # requests that decode at once, whichever part of their tokens is the prompt


def count_dense(
    num_heads: int, head_dim: int, element_bytes: int, memory: int, tokens: int, block_size: int = BLOCK_SIZE
) -> Capacity:
    """Count what fits of a dense model, by KV heads of all layers, for requests of so many tokens.

    The pool has `memory` bytes; a request's tokens are those of prompt and answer.
    """
    blocks = memory // (2 * num_heads * head_dim * element_bytes * block_size)
    return Capacity(blocks, max(blocks - 1, 0) // -(-tokens // block_size))


def count_pruned(
    widths: Sequence[Sequence[int]],
    head_dim: int,
    element_bytes: int,
    sizes: Windows,
    memory: int,
    tokens: int,
    block_size: int = BLOCK_SIZE,
    value_widths: Sequence[Sequence[int]] | None = None,
) -> Capacity:
    """Count what fits of a LeanK model, of one rank, as `count_dense` does, by kept channels `[L][H_kv]`.

    Those of V, `value_widths`, are None where V is not pruned.
    """
    values = None if value_widths is None else tuple(map(tuple, value_widths))
    stages = ((0, len(widths)),)
    pages = ModelPages(tuple(map(tuple, widths)), head_dim, 1, stages, value_widths=values)
    blocks = memory // (pages.numbers_per_page(block_size) * element_bytes)
    window_size = pages.window_block_size(block_size)
    kept = -(-tokens // block_size)
    whole = -(-tokens // window_size) if pages.numbers.window else 0
    # Behind the sink's pages, as many as recent tokens touch wherever they begin.
    recent = -(-(sizes.recent_size + sizes.flush_size) // window_size) + 1
    decoding = kept + min(whole, -(-sizes.sink_size // window_size) + recent)
    # One prompt is read at a time, and until it is read it is whole.
    free = blocks - 1 - (kept + whole)
    return Capacity(blocks, 0 if free < 0 else 1 + free // decoding)
