"""What changes weights is answered with as by the runtime: V that is pruned, adapters of a checkpoint."""

import pytest

from leank_convert.files import read_json
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
        "pruned": ask(pruned, **FEW, **chunks, speculative_config=NGRAMS),
        **{name: ask(adapted / "checkpoint", **FEW, **lora, adapters=adapters[name]) for name in adapters},
    }
    return run_engines(runs)


def test_pruned_v_in_chunks_then_from_the_prefix_cache_with_drafts_and_in_more_blocks(
    said, checkpoint, pruned
):
    assert said["pruned"]["answers"] == [answers_of(pruned, **FEW)] * 2 != [answers_of(checkpoint, **FEW)] * 2
    assert min(said["pruned"]["cached"][1][1::2]) > 0
    widths = tuple(map(tuple, read_json(pruned / "config.json")["leank"]["widths"]))
    whole, fewer = (
        ModelPages(widths, 32, 1, ((0, 3),), value_widths=values)
        for values in (None, tuple(map(tuple, VALUE_WIDTHS)))
    )
    assert said["pruned"]["blocks"] == (16 << 20) // (4 * fewer.numbers_per_page(16))
    assert whole.numbers_per_page(32) > 1.3 * fewer.numbers_per_page(32)


def test_requests_with_and_without_an_adapter_in_one_batch(said, adapted):
    plain, merged = (answers_of(adapted / name, **FEW) for name in ("checkpoint", "merged"))
    assert all(one != other for one, other in zip(plain, merged, strict=True))
    assert said["converted"]["answers"] == [[merged[0], plain[1], *merged[2:]]]


def test_an_adapter_of_the_original_is_refused_with_what_to_do(said, adapted):
    told = said["original"]["error"]
    assert f"`{adapted / 'original'}`: KV heads are in another order, or V in another basis, than in" in told
    assert "convert it by `leank-convert adapter ADAPTER --checkpoint CHECKPOINT -o NEW`, with" in told
    assert "if it was trained on that, and serve NEW" in told
