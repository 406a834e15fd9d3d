"""`KernelKey`, tile planning, and split-K partial products: what is known of kernels without tilelang."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 64
"""Tokens of a tile: the M of one wgmma."""

HEAD_START = 4
"""Whole tiles that take as long as a program instance does from one head to the next."""

LANES = 8
"""Numbers that a thread of a glue kernel loads at once: it divides all sizes, so that rows lie aligned."""

MAX_NORMED = 16384
"""Most numbers of a row that is normed: four vectors a thread."""

MAX_DRAFT = 32
"""Most new tokens of a row that kernels decode at once."""

BLOCK = 64
"""Outputs of a block of a product: the M of one wgmma."""

MAX_PARTS = 4
"""Most parts of such a block."""

MAX_ROWS = 64
"""Most rows of a product."""

TURN_QUERIES, TURN_TOKENS = 128, 128
"""Queries of a KV head that a block of a turn's attention takes, and tokens that it takes at once."""

# Columns of the matrix products that attention is compiled for.
_QUERIES = (8, 16, 32, 64)

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelKey:
    """What kernels are found by.

    Attributes:
        device: Where the cache lies.
        dtype: Of queries and, unless said otherwise, of the cache.
        head_dim: D.
        num_groups: Query heads per KV head.
        chunk_size: Channels of a chunk.
        max_chunks: `ChunkLayout.max_chunks` of the layer.
        num_queries: Queries of a KV head, those of all its new tokens, that one launch takes: 8, 16, 32, 64.
        load_tokens: Tokens that one load takes, 16, 32 or 64: a divisor of the sizes of both pools' pages.
        cache_dtype: Of the cache, where it is not that of queries.
        has_sinks: Whether query heads have attention sinks.
        has_glue: Whether there are the kernels of a fused step around attention.
        has_turns: Whether there are those of a second turn.
        value_chunk: Channels of a chunk of V, F; 0 stands for D.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    num_groups: int
    chunk_size: int
    max_chunks: int
    num_queries: int
    load_tokens: int = TILE
    cache_dtype: torch.dtype | None = None
    has_sinks: bool = False
    has_glue: bool = True
    has_turns: bool = True
    value_chunk: int = 0

    def __post_init__(self) -> None:
        """Let kernels of whole V be found by either way to say it."""
        object.__setattr__(self, "value_chunk", self.value_chunk or self.head_dim)

    @property
    def is_fp8(self) -> bool:
        """Whether the cache holds e4m3."""
        return self.cache_dtype == torch.float8_e4m3fn


def padded_values(head_dim: int, value_chunk: int) -> int:
    """Return the channels of V that kernels hold: chunks are rows of a product, which come in 64."""
    return head_dim // value_chunk * (-(-value_chunk // 64) * 64)


def queries_at_once(num_columns: int, num_groups: int, value_size: int, device: torch.device) -> int:
    """Return `KernelKey.num_queries` for so many new tokens of a row, at most `MAX_DRAFT`.

    `value_size` are the channels of V that kernels hold, `padded_values`.
    """
    if num_columns == 1:
        return 8 if num_groups <= 8 else 16
    wanted = num_columns * num_groups
    if wanted > 16:
        # More would fit neither in registers nor beside two tiles: tokens are then cut into several launches.
        room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        wanted = min(wanted, 64 if value_size <= 128 and room > 1 << 17 else 32)
    return next(size for size in _QUERIES if size >= wanted)


def plan_tiles(seen: torch.Tensor, pruned: torch.Tensor, sink_size: int) -> torch.Tensor:
    """Count the tiles of pruned and of whole tokens before each row, and in all rows.

    Once per step, for all layers; asks the device nothing. Tiles that lie wholly among tokens that all
    columns see pruned are pruned ones, all others are whole ones. `HEAD_START` of these are not there: they
    stand for the time that a head takes to begin.

    Args:
        seen: Tokens of its row that a column sees `[B, d]`, int32.
        pruned: Pruned ones among them `[B, d]`, int32.
        sink_size: Tokens at the front that are never pruned.

    Returns:
        `[B + 1, 2]`, int32.
    """
    num_tiles = (seen[:, -1] + (TILE - 1)) // TILE
    first = -(-sink_size // TILE)
    num_pruned = ((pruned[:, 0] + (sink_size - first * TILE)) // TILE).clamp(min=0)
    num_whole = torch.add(num_tiles - num_pruned, num_tiles.clamp(max=1), alpha=HEAD_START)
    counts = seen.new_zeros(len(seen) + 1, 2)
    torch.stack([num_pruned, num_whole], dim=1, out=counts[1:])
    return counts.cumsum_(0)


@dataclass(frozen=True)
class Product:
    """A matrix product of a step, left in parts: how kernel_product_leank cut it says which there are.

    Attributes:
        parts: `[parts, T, n]`, fp32.
        steps: Steps of a block of outputs.
        stretch: Steps of a program instance.
    """

    parts: torch.Tensor
    steps: int
    stretch: int

    @property
    def cut(self) -> tuple[int, int]:
        """What kernels are told of how it was cut."""
        return self.steps, self.stretch

    @property
    def vectors(self) -> torch.Tensor:
        """`parts` as kernels take them `[parts, T * n / LANES, LANES]`."""
        return self.parts.view(len(self.parts), -1, LANES)

    def outputs(self) -> torch.Tensor:
        """Return the sum of all parts that there are `[T, n]`, by torch."""
        block = torch.arange(self.parts.shape[2], device=self.parts.device) // BLOCK
        last = (block * self.steps + self.steps - 1) // self.stretch - block * self.steps // self.stretch
        number = torch.arange(self.parts.shape[0], device=self.parts.device)
        return self.parts.masked_fill((number[:, None] > last)[:, None], 0).sum(0)


def num_parts(steps: int, stretch: int) -> int:
    """Return in how many parts a block of so many steps can lie."""
    return steps // stretch if steps % stretch == 0 else -(-(steps - 1) // stretch) + 1


def parts_of_turn(blocks: int, tokens: int, num_multiprocessors: int) -> int:
    """Return among how many blocks to share the tokens of each of a turn's, so that all end together.

    A multiprocessor holds one; a part more is to be read once more.
    """
    most = min(8, -(-tokens // TURN_TOKENS))
    return min(
        range(1, most + 1),
        key=lambda parts: -(-blocks * parts // num_multiprocessors) / parts + 0.02 * parts,
    )
