"""Checkpoints that prune V: vLLM answers with the tokens of their own runtime."""

import json
import shutil

import pytest

from leank_convert.vllm.pages import ModelPages
from tests.vllm.conftest import answers_of, run_engine

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

# Of heads that keep 0, 13, 20, 32; 0, 0, 4, 16; and 8, 8, 32, 32 channels of K.
VALUE_WIDTHS = [[0, 8, 16, 32], [0, 0, 24, 8], [16, 0, 8, 24]]
FEW = {"lengths": (80, 170, 12, 500), "new": 40}


def prune_values(folder, out):
    """Copy a checkpoint, and have V's first channels alone kept, as if they were the best directions."""
    out = shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    config["leank"]["value_widths"] = VALUE_WIDTHS
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def pruned(checkpoint, tmp_path_factory):
    return prune_values(checkpoint, tmp_path_factory.mktemp("values") / "pruned")


def test_prompts_in_chunks_then_from_the_prefix_cache(checkpoint, pruned):
    assert answers_of(pruned, **FEW) != answers_of(checkpoint, **FEW)
    said = run_engine(pruned, **FEW, rounds=(None, None), max_num_batched_tokens=128, block_size=16)
    assert said["answers"] == [answers_of(pruned, **FEW)] * 2
    assert min(said["cached"][1][1::2]) > 0


def test_drafts_and_more_blocks(pruned):
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    said = run_engine(pruned, **FEW, speculative_config=drafts)
    assert said["answers"] == [answers_of(pruned, **FEW)]
    widths = tuple(map(tuple, json.loads((pruned / "config.json").read_text())["leank"]["widths"]))
    blocks = []
    for values in (None, tuple(map(tuple, VALUE_WIDTHS))):
        pages = ModelPages(widths, 32, 1, ((0, 3),), value_widths=values)
        blocks.append((16 << 20) // (4 * pages.numbers_per_page(32)))
    assert said["blocks"] == blocks[1] > 1.3 * blocks[0]


def test_a_cache_in_fp8_of_two_ranks(in_fp8, tmp_path):
    """Each takes its own heads' widths and scales."""
    folder = prune_values(in_fp8, tmp_path / "pruned")
    said = run_engine(folder, **FEW, tensor_parallel_size=2, processes=True)
    assert said["answers"] == [answers_of(folder, **FEW)] != [answers_of(in_fp8, **FEW)]
