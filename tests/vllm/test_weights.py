"""What changes weights is answered with as by the runtime: V that is pruned, adapters of a checkpoint."""

import json

import pytest

from leank_convert.vllm.pages import ModelPages
from tests.vllm.conftest import FEW, NGRAMS, TWICE, VALUE_WIDTHS, answers_of, ask, prune_values, run_engines

pytest.importorskip("vllm", reason="bin/test-vllm runs it")


@pytest.fixture(scope="module")
def pruned(checkpoint, tmp_path_factory):
    return prune_values(checkpoint, tmp_path_factory.mktemp("values") / "pruned")


@pytest.fixture(scope="module")
def said(pruned, adapted):
    chunks = {"rounds": TWICE, "max_num_batched_tokens": 128, "block_size": 16}
    lora = {"enable_lora": True, "max_loras": 2}  # vLLM gives those without one the last slot's
    converted, original = str(adapted / "converted"), str(adapted / "original")
    adapters = {"converted": [converted, None, converted, converted], "original": [original] * 4}
    runs = {
        "chunks": ask(pruned, **FEW, **chunks),
        "drafts": ask(pruned, **FEW, speculative_config=NGRAMS),
        **{name: ask(adapted / "checkpoint", **FEW, **lora, adapters=adapters[name]) for name in adapters},
    }
    return run_engines(runs)


def test_pruned_v_in_chunks_then_from_the_prefix_cache(said, checkpoint, pruned):
    assert answers_of(pruned, **FEW) != answers_of(checkpoint, **FEW)
    assert said["chunks"]["answers"] == [answers_of(pruned, **FEW)] * 2
    assert min(said["chunks"]["cached"][1][1::2]) > 0


def test_pruned_v_with_drafts_and_in_more_blocks(said, pruned):
    assert said["drafts"]["answers"] == [answers_of(pruned, **FEW)]
    widths = tuple(map(tuple, json.loads((pruned / "config.json").read_text())["leank"]["widths"]))
    blocks = []
    for values in (None, tuple(map(tuple, VALUE_WIDTHS))):
        pages = ModelPages(widths, 32, 1, ((0, 3),), value_widths=values)
        blocks.append((16 << 20) // (4 * pages.numbers_per_page(32)))
    assert said["drafts"]["blocks"] == blocks[1] > 1.3 * blocks[0]


def test_requests_with_and_without_an_adapter_in_one_batch(said, adapted):
    plain, merged = (answers_of(adapted / name, **FEW) for name in ("checkpoint", "merged"))
    assert all(one != other for one, other in zip(plain, merged, strict=True))
    assert said["converted"]["answers"] == [[merged[0], plain[1], *merged[2:]]]


def test_an_adapter_of_the_original_is_refused_with_what_to_do(said, adapted):
    told = said["original"]["error"]
    assert f"`{adapted / 'original'}`: KV heads are in another order, or V in another basis, than in" in told
    assert "convert it by `leank-convert adapter ADAPTER --checkpoint CHECKPOINT -o NEW`, with" in told
    assert "if it was trained on that, and serve NEW" in told
