"""A layer's pages as vLLM keeps them, of three rows."""

from dataclasses import replace

import torch

from leank_convert._runtime.fp8_leank import FP8, as_bytes
from leank_convert._runtime.layout_leank import cut_layers, order_channels
from leank_convert._runtime.stored_leank import StoreTensors
from leank_convert.vllm.pages import Numbers, numbers_of, view_layer
from tests.tiny_families import random_mask

FILL = 448.0  # the largest number of FP8


def make_store(
    widths, head_dim, page_sizes, *, chunk_size=None, is_fp8=False, is_centred=False, value_widths=None
):
    """Layout, mask and store of used pages, named in no order and not written; page 0 is nobody's."""
    generator = torch.Generator().manual_seed(0)
    (layout,) = cut_layers([widths], value_widths and [value_widths], head_dim)
    layout = layout if chunk_size is None else replace(layout, chunk_size=chunk_size)
    mask = random_mask([widths], head_dim)[0]
    pools = [
        torch.full((24, 1, size, count + 4), FILL)
        .flatten(1)[:, : size * count]
        .unflatten(1, (1, size, count))
        for size, count in zip(page_sizes, numbers_of(layout), strict=True)
    ]
    if is_fp8:
        pools = [as_bytes(pool.to(FP8)) for pool in pools]
    tables = [torch.randperm(23, generator=generator).to(torch.int32)[:18].view(3, 6) + 1 for _ in pools]
    size = (1, len(widths), head_dim)
    scales = [2.0 ** torch.randint(-7, -4, size, generator=generator) for _ in range(2)]
    store = StoreTensors(
        *(pool.view(FP8) if is_fp8 else pool for pool in view_layer(*pools, layout, Numbers(0, 0))),
        layout.chunk_index(order_channels(mask)[None]),
        torch.tensor(layout.head_table, dtype=torch.int32),
        *tables,
        torch.randn(size, generator=generator) if is_centred else None,
        *(scales if is_fp8 else (None, None)),
    )
    return layout, mask, store
