"""The window's manager on vLLM's own pool of blocks: what is held, what is given back, what a hit finds."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm.cache import HANDED_OVER, LeanKKeptSpec, LeanKWindowManager, LeanKWindowSpec

BLOCK = 16
FIELDS = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
SPEC = LeanKWindowSpec(**FIELDS, num_head_slots=1, state_content_bytes=128, sizes=Windows(16, 64, 16))


@pytest.fixture
def manager():
    pool = BlockPool(num_gpu_blocks=200, enable_caching=False, hash_block_size=BLOCK)
    return LeanKWindowManager(
        SPEC, block_pool=pool, enable_caching=False, kv_cache_group_id=1, scheduler_block_size=BLOCK
    )


def test_both_groups_are_known_to_vllm_and_apart():
    kept = LeanKKeptSpec(**FIELDS)
    assert KVCacheSpecRegistry.get_manager_class(SPEC) is LeanKWindowManager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(SPEC) is LeanKWindowSpec
    # Layers of a model that drafts are full attention, and share its group.
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(kept) is FullAttentionSpec
    assert not SPEC.is_uniform_with_collection({"kept": kept})


def test_pages_of_a_prompt_stay_until_it_is_read_then_the_middle_goes(manager):
    pool = manager.block_pool
    free = pool.get_num_free_blocks()
    manager.allocate_new_blocks("r", 1000, 1000)
    for computed in (0, 256, 999):
        manager.remove_skipped_blocks("r", computed, 1000)
        assert free - pool.get_num_free_blocks() == 63
    manager.remove_skipped_blocks("r", 1000, 1000)  # the first token of the answer comes next
    # The sink's page, and those that hold tokens 936 … 999, the recent ones, and one that comes.
    held = [index for index, block in enumerate(manager.req_to_blocks["r"]) if not block.is_null]
    assert held == [0, 58, 59, 60, 61, 62]
    assert free - pool.get_num_free_blocks() == len(held)
    manager.free("r")
    assert pool.get_num_free_blocks() == free


@pytest.mark.parametrize("num_local", [0, 16, 640])
def test_pages_that_do_not_move_take_none(num_local, manager):
    """Of a prompt that another engine read; some of it may be found in the prefix cache."""
    pool = manager.block_pool
    free = pool.get_num_free_blocks()
    HANDED_OVER.add("r")
    found = pool.get_new_blocks(num_local // BLOCK)
    needed = manager.get_num_blocks_to_allocate("r", 1000, found, 1000, num_local, 1000)
    manager.req_to_blocks["r"] += found
    manager.allocate_external_computed_blocks("r", num_local, 1000 - num_local)
    manager.allocate_new_blocks("r", 1000, 1000)
    held = [index for index, block in enumerate(manager.req_to_blocks["r"]) if not block.is_null]
    # Of tokens 935 … 999, as the last is read as if it were the answer's.
    assert held == [0, 58, 59, 60, 61, 62] and len(manager.req_to_blocks["r"]) == 63
    assert needed == len(held) - min(num_local // BLOCK, 1)
    manager.remove_skipped_blocks("r", 999, 1000)  # the last token of the prompt comes next
    manager.remove_skipped_blocks("r", 1016, 1000)
    assert manager.req_to_blocks["r"][58].is_null
    manager.free("r")
    assert pool.get_num_free_blocks() == free and not HANDED_OVER


def test_a_prompt_that_grows_after_its_window_went_is_refused(manager):
    """As vLLM's sessions of streamed input do; its new part would attend to pages that are gone."""
    manager.allocate_new_blocks("r", 1000, 1000)
    manager.remove_skipped_blocks("r", 1000, 1000)
    with pytest.raises(ValueError, match="request r: a LeanK cache cannot read more of a prompt once it was"):
        manager.remove_skipped_blocks("r", 1004, 1100)


def test_pages_held_while_decoding_are_few_and_hold_all_that_is_whole(manager):
    for total in range(301, 1500):
        manager.remove_skipped_blocks("r", total - 1, 300)
        manager.allocate_new_blocks("r", total, total)
        if total == 301:
            continue
        blocks = manager.req_to_blocks["r"]
        assert sum(not block.is_null for block in blocks) <= 1 + (64 + 16) // BLOCK + 1
        recent = range(max(16, total - 64), total)
        assert not any(blocks[token // BLOCK].is_null for token in (*range(16), *recent))


def cached(pages):
    """A pool in which some of the pages of a prefix are cached."""

    def find(block_hash, groups):
        return [f"page {block_hash}"] * len(groups) if block_hash in pages else None

    return SimpleNamespace(hash_block_size=BLOCK, get_cached_block=find)


@pytest.mark.parametrize(
    ("pages", "alignment", "expected"),
    [(range(10), 16, 10), ({0, 1, 2, 5, 6}, 16, 3), ({1, 2}, 16, 0), (range(7), 64, 4)],
    ids=["all", "some gone", "the first gone", "a whole step"],
)
def test_a_hit_is_the_prefix_of_which_every_page_is_there(pages, alignment, expected):
    found, length = LeanKWindowManager.find_longest_cache_hit(
        list(range(20)), 10 * BLOCK, [1], cached(set(pages)), SPEC, False, alignment
    )
    assert found == ([f"page {index}" for index in range(expected)],)
    assert length == expected * BLOCK
