"""What `inspect --memory` says fits is what vLLM's own pool and scheduler hold."""

import pytest

from leank_convert._runtime.windows_leank import Windows
from leank_convert.inspection import inspect_artifact
from leank_convert.vllm.capacity import count_pruned
from leank_convert.vllm.pages import BLOCK_SIZE
from tests.vllm.conftest import answers_of, ask, run_engines

PROMPT, NEW = 360, 60
MEMORY = 16 << 20


def test_a_request_takes_its_kept_pages_and_the_windows_of_its_sink_and_recent_tokens():
    """10 kept pages and, of the window's of 48 tokens, 4 until its prompt is read, then 1 and 2."""
    model = {"widths": [[16]], "head_dim": 32, "element_bytes": 2, "sizes": Windows(8, 24, 8)}
    block = 16 * (16 + 32) * 2
    counted = {
        blocks: count_pruned(**model, memory=block * blocks, tokens=160, block_size=16).requests
        for blocks in (14, 15, 27, 28)
    }
    assert counted == {14: 0, 15: 1, 27: 1, 28: 2}


@pytest.fixture(scope="module")
def said(checkpoint):
    """What engines say with the plugin and without, of as many requests as fit, and of some more."""
    pytest.importorskip("vllm", reason="bin/test-vllm runs it")
    told = inspect_artifact(checkpoint, MEMORY, PROMPT + NEW)["capacity"]
    runs = {}
    for side in ("pruned", "dense"):
        fits = told[side]["requests"]
        # A tenth more: what a request holds is counted wherever its window begins, and so one page too many.
        more = fits + fits // 10 + 1
        options = {"block_size": BLOCK_SIZE, "kv_cache_memory_bytes": MEMORY, "enable_prefix_caching": False}
        runs[side] = ask(checkpoint, lengths=(PROMPT,) * more, new=NEW, rounds=(fits, more), **options)
    stock = {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}, "trust_remote_code": True}
    runs["dense"]["options"] |= stock
    without = run_engines({"dense": runs.pop("dense")}, VLLM_PLUGINS="")
    return told, run_engines(runs) | without


@pytest.mark.parametrize("side", ["pruned", "dense"])
def test_so_many_requests_run_at_once_and_no_more(said, side):
    told, (fits, more), found = said[0][side], said[1][side]["asked"], said[1][side]
    assert found["blocks"] == told["blocks"] and fits == told["requests"]
    assert found["running"][0] == fits and found["preemptions"][0] == 0
    assert found["running"][1] < more or found["preemptions"][1] > 0


def test_without_the_plugin_the_dense_model_answers(said, checkpoint):
    first = answers_of(checkpoint, dense=True, lengths=(PROMPT,) * 3, new=NEW)
    assert said[1]["dense"]["answers"][0][:3] == first
    assert said[1]["dense"]["groups"] == [["FullAttentionSpec", BLOCK_SIZE]]
