"""Checkpoints that prune V: vLLM answers with the tokens of their own runtime."""

import json

import pytest

from leank_convert.vllm.pages import ModelPages
from tests.vllm.conftest import VALUE_WIDTHS, answers_of, ask, prune_values, run_engines

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

FEW = {"lengths": (80, 170, 12, 500), "new": 40}


@pytest.fixture(scope="module")
def pruned(checkpoint, tmp_path_factory):
    return prune_values(checkpoint, tmp_path_factory.mktemp("values") / "pruned")


@pytest.fixture(scope="module")
def said(pruned):
    chunks = {"rounds": (None, None), "max_num_batched_tokens": 128, "block_size": 16}
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    return run_engines(
        {"chunks": ask(pruned, **FEW, **chunks), "drafts": ask(pruned, **FEW, speculative_config=drafts)}
    )


def test_prompts_in_chunks_then_from_the_prefix_cache(said, checkpoint, pruned):
    assert answers_of(pruned, **FEW) != answers_of(checkpoint, **FEW)
    assert said["chunks"]["answers"] == [answers_of(pruned, **FEW)] * 2
    assert min(said["chunks"]["cached"][1][1::2]) > 0


def test_drafts_and_more_blocks(said, pruned):
    assert said["drafts"]["answers"] == [answers_of(pruned, **FEW)]
    widths = tuple(map(tuple, json.loads((pruned / "config.json").read_text())["leank"]["widths"]))
    blocks = []
    for values in (None, tuple(map(tuple, VALUE_WIDTHS))):
        pages = ModelPages(widths, 32, 1, ((0, 3),), value_widths=values)
        blocks.append((16 << 20) // (4 * pages.numbers_per_page(32)))
    assert said["drafts"]["blocks"] == blocks[1] > 1.3 * blocks[0]
