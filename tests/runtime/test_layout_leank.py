"""Chunks: every channel of every head has exactly one lane, kept channels first and ascending."""

import pytest
import torch

from leank_convert.head_layout import choose_value_multiple
from runtime.layout_leank import ChunkLayout, cut_layers, order_channels
from tests.tiny_families import random_mask

WIDTHS = [(0, 32, 64, 128), (0, 0), (128, 128), (1, 17, 31, 32), (96, 0, 96, 5), (64, 64, 64)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_every_channel_has_one_lane(widths, chunk_size):
    layout = ChunkLayout(widths, 128, chunk_size)
    masks = torch.stack([random_mask([widths], 128, seed)[0] for seed in range(3)])
    index = layout.chunk_index(order_channels(masks))
    assert index.shape == (3, layout.num_kept_chunks + layout.num_dropped_chunks, chunk_size)
    for row, mask in zip(index, masks, strict=True):
        kept = row[: layout.num_kept_chunks].flatten()
        dropped = row[layout.num_kept_chunks :].flatten()
        assert kept[kept >= 0].tolist() == mask.flatten().nonzero()[:, 0].tolist()
        assert dropped[dropped >= 0].tolist() == (~mask).flatten().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("widths", "values", "head_dim", "expected"),
    [
        ([[0, 32], [64, 128]], None, 128, (32, 128)),
        ([[0, 32], [48, 128]], None, 128, (16, 128)),
        ([[0, 33]], None, 128, (16, 128)),
        ([[0, 32]], None, 96, (32, 96)),
        ([[0, 32]], None, 80, (16, 80)),
        ([[0, 8]], None, 16, (4, 16)),
        ([[0, 1]], None, 2, (1, 2)),
        ([[0, 32], [64, 64]], [[0, 128], [64, 64]], 128, (32, 64)),
        ([[0, 32], [64, 64]], [[0, 128], [0, 0]], 128, (32, 64)),
        ([[0, 32], [64, 64]], [[32, 64], [0, 96]], 96, (32, 32)),
        ([[0, 32], [64, 64]], [[16, 0], [32, 48]], 64, (16, 16)),
    ],
)
def test_chunks_are_as_large_as_widths_allow_and_of_v_a_head_unless_some_of_it_can_be_dropped(
    widths, values, head_dim, expected
):
    layouts = cut_layers(widths, values, head_dim)
    assert {(layout.chunk_size, layout.value_chunk) for layout in layouts} == {expected}
    kept = [tuple(own) for own in values] if values else [None] * len(widths)
    assert [layout.value_widths for layout in layouts] == kept


@pytest.mark.parametrize(
    ("head_dim", "multiple"), [(16, 4), (64, 16), (80, 16), (96, 32), (128, 64), (256, 64)]
)
def test_what_heads_keep_of_v_fills_chunks_that_kernels_take(head_dim, multiple):
    assert choose_value_multiple(head_dim) == multiple
