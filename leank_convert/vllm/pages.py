"""Page sizes of both groups, layer by layer, and the heads of a rank. No vLLM.

A page is one piece of memory for all layers of a rank. Kept pages hold of each layer, window pages alike

    [kept chunks of K][tokens][E]       then [kept chunks of V][tokens][F]
    [dropped chunks of K][tokens][E]    then [dropped chunks of V][tokens][F]

so kept and window page together are a dense page, but for the padding of a head's last chunk of K. Ranks
have to agree on a page's size: of one page for all layers that is the largest of sums, which differ little
between ranks, not a sum of largests.

Where layers of other kinds lie beside the pruned ones, vLLM makes groups of as many layers each, with pages
of one size. So there a block is several pages, each of some pruned layers, and the others need few groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from leank_convert._runtime.layout_leank import ChunkLayout, cut_layers

BLOCK_SIZE = 64
"""Tokens of a kept page where none are asked for: a tile of the decode kernels."""
STEP = 16
"""Tokens of a page are a multiple of it."""


def coming_block_size(cache_config: Any) -> int:
    """Tokens of a kept page: vLLM asks the backend for them when models are loaded and kernels compiled."""
    return cache_config.block_size if cache_config.user_specified_block_size else BLOCK_SIZE


def settle_block_size(cache_config: Any, block_size: int) -> int:
    """Set the tokens of a kept page, before vLLM asks all backends for a size that they share."""
    cache_config.block_size, cache_config.user_specified_block_size = block_size, True
    return block_size


class Numbers(NamedTuple):
    """Numbers of one token in the pages of either group."""

    kept: int
    window: int


def numbers_of(layout: ChunkLayout) -> Numbers:
    """Count the numbers of a token of one layer."""
    size, value_size = layout.chunk_size, layout.value_chunk
    return Numbers(
        layout.num_kept_chunks * size + sum(layout.kept_values) * value_size,
        layout.num_dropped_chunks * size + sum(layout.dropped_values) * value_size,
    )


def take_heads(layout: ChunkLayout, heads: Sequence[int]) -> ChunkLayout:
    """Return how the channels of some of a layer's heads are cut."""
    widths, values = layout.widths, layout.value_widths
    own = None if values is None else tuple(values[head] for head in heads)
    return replace(layout, widths=tuple(widths[head] for head in heads), value_widths=own)


def deal_heads(layers: Sequence[ChunkLayout], num_ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Give each rank its KV heads `[rank][layer]`, ascending, so that all ranks' pages are about alike.

    A checkpoint sorts heads by width: in its order one rank would have all narrow ones. Within a layer heads
    are dealt in turn, forth and back; the heaviest hand goes to the rank that has least so far. Where ranks
    of tensor parallelism are more than the heads, several have the same one.
    """
    num_heads = len(layers[0].widths)
    num_hands = min(num_ranks, num_heads)
    weights = [0] * num_hands
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(num_hands)]
    for layer in layers:
        cost = [numbers_of(take_heads(layer, (head,))).kept for head in range(num_heads)]
        hands: list[list[int]] = [[] for _ in range(num_hands)]
        for place, head in enumerate(sorted(range(num_heads), key=lambda head: -cost[head])):
            turn, seat = divmod(place, num_hands)
            hands[seat if turn % 2 == 0 else -1 - seat].append(head)
        hands.sort(key=lambda hand: -sum(cost[head] for head in hand))
        for rank, hand in zip(sorted(range(num_hands), key=weights.__getitem__), hands, strict=True):
            dealt[rank].append(tuple(sorted(hand)))
            weights[rank] += sum(cost[head] for head in hand)
    return tuple(tuple(dealt[rank * num_hands // num_ranks]) for rank in range(num_ranks))


@dataclass(frozen=True)
class PageLayout:
    """Pages of a rank."""

    layers: tuple[ChunkLayout, ...]  # how the channels of the rank's heads are cut, of each of its layers
    parts: tuple[int, ...]  # which page of a block each of them lies in

    @cached_property
    def starts(self) -> tuple[Numbers, ...]:
        """Where in a token's numbers of its page each layer begins."""
        starts, ends = [], [Numbers(0, 0)] * (1 + max(self.parts))
        for layout, part in zip(self.layers, self.parts, strict=True):
            starts.append(ends[part])
            ends[part] = _behind(ends[part], layout)
        return tuple(starts)

    @property
    def numbers(self) -> Numbers:
        """Numbers of a token in a page: the largest, as all have to be of one size."""
        ends = [_behind(start, layout) for start, layout in zip(self.starts, self.layers, strict=True)]
        return Numbers(max(end.kept for end in ends), max(end.window for end in ends))


def _behind(start: Numbers, layout: ChunkLayout) -> Numbers:
    """Where a layer ends that begins there."""
    own = numbers_of(layout)
    return Numbers(start.kept + own.kept, start.window + own.window)


@dataclass(frozen=True)
class ModelPages:
    """Pages of all ranks, of tensor and of pipeline parallelism."""

    widths: tuple[tuple[int, ...], ...]  # kept channels `[L][H_kv]`
    head_dim: int  # D
    num_ranks: int  # ranks of tensor parallelism
    stages: tuple[tuple[int, int], ...]  # the first layer of every stage of a pipeline, and one past its last
    num_parts: int = 1  # pages of a block, each of some of a stage's layers
    least: int = 0  # numbers that a page has at least, for what layers of other kinds hold
    window_step: int = STEP  # tokens of a window page are a multiple of it
    # Kept channels of V `[L][H_kv]`; None where V is not pruned.
    value_widths: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def heads(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """KV heads `[rank][layer]`."""
        return deal_heads(self.layers, self.num_ranks)

    @cached_property
    def layers(self) -> tuple[ChunkLayout, ...]:
        """How the channels of every layer's heads are cut, as in the checkpoint's own runtime."""
        return cut_layers(self.widths, self.value_widths, self.head_dim)

    def layout(self, rank: int, stage: tuple[int, int]) -> PageLayout:
        """Pages of a rank in a stage."""
        dealt = self.heads[rank]
        return PageLayout(
            tuple(take_heads(self.layers[layer], dealt[layer]) for layer in range(*stage)), self.parts(stage)
        )

    def parts(self, stage: tuple[int, int]) -> tuple[int, ...]:
        """Deal a stage's layers to the pages of a block, alike in all ranks.

        The widest go first, each to the page that has least.
        """
        # One more each, so that no page stays empty.
        numbers = [numbers_of(layout).kept + 1 for layout in self.layers[slice(*stage)]]
        sums, parts = [0] * self.num_parts, {}
        for layer in sorted(range(len(numbers)), key=lambda layer: -numbers[layer]):
            parts[layer] = min(range(self.num_parts), key=sums.__getitem__)
            sums[parts[layer]] += numbers[layer]
        return tuple(part for _, part in sorted(parts.items()))

    @cached_property
    def numbers(self) -> Numbers:
        """Numbers of a token in pages: those of the rank that needs most, as all ranks have to agree."""
        ranks = [self.layout(rank, stage).numbers for rank in range(self.num_ranks) for stage in self.stages]
        return Numbers(max(rank.kept for rank in ranks), max(rank.window for rank in ranks))

    def window_block_size(self, block_size: int) -> int:
        """Choose the tokens of a window page for kept pages of `block_size` tokens.

        A pool has one size of blocks, the larger page's, so the window page takes as many tokens as fit into
        a kept page, or a sixteenth more. Hits of the prefix cache end at multiples of both sizes, so not any
        number.
        """
        kept, window = self.numbers
        if not window:
            return block_size
        most = max(self.window_step, block_size * kept * 17 // (window * 16))
        sizes = range(self.window_step, most + 1, self.window_step)
        return max(size for size in sizes if math.lcm(size, block_size) <= 4 * block_size)

    def numbers_per_page(self, block_size: int) -> int:
        """Numbers of a page of the pool: those of the larger one."""
        kept, window = self.numbers
        return max(kept * block_size, window * self.window_block_size(block_size), self.least)

    def beside(self, num_others: int, least: int, block_size: int) -> ModelPages:
        """Split blocks for a model with so many layers of other kinds, for few groups at little cost.

        A group has as many of these as a block has pages. But the fewer pruned layers share a page the more
        the widest say how large all are: by an eighth at most. `least` are the numbers of the smallest page
        that a layer of another kind can have.
        """
        splits = [
            replace(self, num_parts=count, least=least)
            for count in range(1, min(len(self.widths), num_others) + 1)
        ]
        costs = {split: split.num_parts * split.numbers_per_page(block_size) for split in splits}
        fit = [split for split in splits if costs[split] <= costs[splits[0]] * 9 // 8]
        return min(fit, key=lambda split: (-(-num_others // split.num_parts), costs[split]))


def view_layer(
    kept: torch.Tensor, window: torch.Tensor | None, layout: ChunkLayout, start: Numbers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """View one layer's part of the pages of both groups, from where it begins in a token's numbers.

    Pages are `[pages, 1, P, numbers]`, each contiguous; `window` is None where nothing is dropped. Returned
    are, as the decode kernels take them, of all tokens the kept channels of K `[pages, C, P, E]` and V
    `[pages, C_values, P, F]`, and of whole tokens the dropped ones of both, `[window_pages, C_dropped,
    P_window, E]` and `[window_pages, C_dropped_values, P_window, F]`.
    """
    size, value_size = layout.chunk_size, layout.value_chunk
    num_kept, num_dropped = layout.num_kept_chunks, layout.num_dropped_chunks
    window = kept if window is None else window
    return (
        _view_rows(kept, start.kept, num_kept, size),
        _view_rows(kept, start.kept + num_kept * size, sum(layout.kept_values), value_size),
        _view_rows(window, start.window, num_dropped, size),
        _view_rows(window, start.window + num_dropped * size, sum(layout.dropped_values), value_size),
    )


def _view_rows(pages: torch.Tensor, start: int, num_rows: int, width: int) -> torch.Tensor:
    num_pages, _, num_tokens, _ = pages.shape
    return pages.as_strided(
        (num_pages, num_rows, num_tokens, width),
        (pages.stride(0), num_tokens * width, width, 1),
        pages.storage_offset() + start * num_tokens,
    )
