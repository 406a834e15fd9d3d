"""What pages hold: each channel once, in about equal shares of every rank, of real masks as promised."""

import pytest
import torch

from leank_convert._runtime.layout_leank import ChunkLayout, cut_layers
from leank_convert._runtime.windows_leank import Windows
from leank_convert.mask import load_mask
from leank_convert.masks import find_by_name
from leank_convert.vllm.capacity import count_dense, count_pruned
from leank_convert.vllm.pages import ModelPages, deal_heads, numbers_of, view_layer

LLAMA, QWEN = "llama-3.1-8b-instruct", "qwen2.5-7b-instruct"
CODER = "qwen2.5-coder-1.5b-instruct-70"


def pages_of(name, num_ranks=1, num_stages=1, kept_values=None):
    """Of a packaged mask; `kept_values` are channels of V of every head that sees pruned tokens."""
    mask = load_mask(find_by_name(name))
    widths = tuple(tuple(sorted(row)) for row in mask.widths)
    size = len(widths) // num_stages
    stages = tuple((stage * size, (stage + 1) * size) for stage in range(num_stages))
    values = kept_values and tuple(tuple(kept_values * bool(width) for width in row) for row in widths)
    return ModelPages(widths, mask.channel_mask.shape[-1], num_ranks, stages, value_widths=values)


def test_kept_and_window_pages_are_a_dense_page_together():
    kept, window = numbers_of(ChunkLayout((0, 32, 64, 128), 128, 32))
    assert kept + window == 2 * 4 * 128
    # Heads of width 0 keep V in the window alone.
    assert kept == 32 + 64 + 128 + 3 * 128
    pruned = numbers_of(ChunkLayout((0, 32, 64, 128), 128, 32, (0, 0, 64, 96), 32))
    assert pruned == (32 + 64 + 128 + 64 + 96, kept + window - 32 - 64 - 128 - 64 - 96)


@pytest.mark.parametrize(("num_heads", "num_ranks"), [(8, 1), (8, 2), (8, 4), (8, 8), (2, 4)])
def test_each_head_is_dealt_once_in_equal_numbers(num_heads, num_ranks):
    dealt = deal_heads([ChunkLayout((0, 0, 32, 32, 64, 64, 96, 128)[-num_heads:], 128, 32)] * 3, num_ranks)
    assert len(dealt) == num_ranks
    for layer in range(3):
        hands = [rank[layer] for rank in dealt]
        assert {len(hand) for hand in hands} == {max(1, num_heads // num_ranks)}
        # Where ranks are more than heads, neighbours have the same one.
        assert sorted(head for hand in dict.fromkeys(hands) for head in hand) == list(range(num_heads))
        assert hands == sorted(hands, key=list(dict.fromkeys(hands)).index)


def test_one_rank_keeps_the_order_of_the_checkpoint():
    assert deal_heads([ChunkLayout((0, 32, 64, 128), 128, 32)], 1) == (((0, 1, 2, 3),),)


def test_heads_are_dealt_by_what_they_keep_of_v_too():
    layer = ChunkLayout((32, 32, 64, 64), 128, 32, (128, 96, 0, 32), 32)
    assert deal_heads([layer], 2) == (((0, 2),), ((1, 3),))


@pytest.mark.parametrize("name", [LLAMA, QWEN])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_pages_of_ranks_are_within_a_twentieth_of_an_equal_share(name, num_ranks):
    alone, dealt = pages_of(name), pages_of(name, num_ranks)
    shares = [
        ours * min(num_ranks, len(alone.widths[0])) / whole
        for ours, whole in zip(dealt.numbers, alone.numbers, strict=True)
    ]
    assert max(shares) < 1.05


def test_requests_of_32k_at_once_in_40_gib():
    widths, values = (getattr(pages_of(LLAMA, kept_values=64), name) for name in ("widths", "value_widths"))
    load = {"memory": 40 << 30, "tokens": 32768}
    assert count_dense(32 * 8, 128, 2, **load).requests == 9
    sizes = Windows(4, 1024, 32)
    counted = [count_pruned(widths, 128, 2, sizes, **load, value_widths=own) for own in (None, values)]
    assert [capacity.requests for capacity in counted] == [16, 24]


def test_a_pool_in_fp8_has_three_and_a_half_times_the_blocks_of_a_dense_one_in_bfloat16():
    pages, memory = pages_of(LLAMA), 40 << 30
    pruned = count_pruned(pages.widths, 128, 1, Windows(4, 1024, 32), memory, 8192)
    assert pruned.blocks >= 3.5 * count_dense(32 * 8, 128, 2, memory, 8192).blocks
    assert pages.numbers_per_page(64) % 16 == 0  # bytes, of which kernels load 16 and more at once


def test_stages_of_a_pipeline_agree_on_pages():
    stages = pages_of(LLAMA, num_stages=2)
    own = [stages.layout(0, stage).numbers for stage in stages.stages]
    assert stages.numbers == (max(numbers.kept for numbers in own), max(numbers.window for numbers in own))


def test_blocks_are_those_that_vllm_had_on_one_gpu_and_two():
    seen = {(1, 1): 3495, (2, 1): 6838, (1, 2): 5538}  # of 3 GiB a GPU, by ranks and stages
    pages = {key: pages_of(CODER, *key) for key in seen}
    assert {key: (3 << 30) // (2 * own.numbers_per_page(64)) for key, own in pages.items()} == seen


@pytest.mark.parametrize(("block_size", "expected"), [(16, 16), (64, 64)])
def test_window_pages_are_as_many_tokens_as_fit_into_a_block(block_size, expected):
    assert pages_of(QWEN).window_block_size(block_size) == expected
    alike = ModelPages(((32, 32),), 64, 1, ((0, 1),))  # 192 numbers kept, 64 dropped
    assert alike.window_block_size(block_size) == 3 * block_size
    assert ModelPages(((64, 64),), 64, 1, ((0, 1),)).window_block_size(block_size) == block_size


@pytest.mark.parametrize("value_widths", [None, ((0, 4, 16), (8, 0, 12), (4, 4, 8))], ids=["whole", "pruned"])
def test_views_of_layers_share_no_number_and_leave_none_out(value_widths):
    widths = ((0, 5, 16), (16, 16, 16), (3, 3, 7))
    pages = ModelPages(widths, 16, 1, ((0, 3),), value_widths=value_widths)
    layout, (kept, window) = pages.layout(0, (0, 3)), pages.numbers
    pools = [torch.zeros(4, 1, 16, kept + 3)[..., :kept], torch.zeros(4, 1, 32, window)]
    pools[0] = torch.zeros(4, 16 * kept + 7).as_strided((4, 1, 16, kept), (16 * kept + 7, 16 * kept, kept, 1))
    for own, start in zip(layout.layers, layout.starts, strict=False):
        for view in view_layer(*pools, own, start):
            view += 1
    for pool in pools:
        assert pool.eq(1).all()
    assert cut_layers(widths, None, 16)[0].chunk_size == 4
