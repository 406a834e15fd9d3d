"""vLLM answers with the tokens of the checkpoint's own runtime, whatever its scheduler does meanwhile."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from leank_convert._runtime.fp8_leank import SCALE_NAMES
from leank_convert.vllm.configs import FAMILIES, MIXED
from leank_convert.vllm.pages import ModelPages
from tests.vllm.conftest import answers_of, run_engine, run_engines

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

TWICE = (None, None)
OTHERS = [family for family in FAMILIES if family != "llama" and family not in MIXED]
FEW = {"lengths": (80, 170, 12), "new": 30}
# Behind 40 tokens answers depend on the CPU: a number between two of FP8 is rounded by how it was added up.
FP8_NEW = 40
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


def test_the_mask_changes_answers(checkpoint):
    """Else the tests below would pass without a plugin."""
    assert (
        sum(a != b for a, b in zip(answers_of(checkpoint), answers_of(checkpoint, dense=True), strict=True))
        > 3
    )


def test_a_batch_and_the_prefix_cache(checkpoint):
    said = run_engine(checkpoint, rounds=TWICE)
    assert said["answers"] == [answers_of(checkpoint)] * 2
    # Hits end at multiples of both groups' pages.
    assert said["groups"] == [["LeanKKeptSpec", 32], ["LeanKWindowSpec", 48]]
    assert said["cached"] == [[0, 0, 0, 0, 0, 0], [0, 96, 480, 0, 864, 0]]
    assert said["preemptions"] == [0, 0]


@pytest.mark.parametrize(
    ("family", "is_centred"),
    [("llama", False), ("llama", True), ("smollm3", True)],  # a model of vLLM's own, and one of transformers
)
def test_prompts_in_chunks_then_from_the_prefix_cache(random_checkpoint, family, is_centred):
    folder = random_checkpoint(family, is_centred=is_centred)
    if is_centred:  # what is pruned counts as the mean, not as zero
        assert answers_of(folder) != answers_of(random_checkpoint(family))
    said = run_engine(folder, rounds=TWICE, max_num_batched_tokens=128, block_size=16)
    assert said["answers"] == [answers_of(folder)] * 2
    assert min(said["cached"][1][1:3]) > 0


def test_a_pool_so_small_that_pages_of_a_prefix_are_evicted(checkpoint):
    said = run_engine(checkpoint, rounds=TWICE, num_gpu_blocks_override=108)
    assert said["answers"] == [answers_of(checkpoint)] * 2
    # Some of a prefix is gone, and the rest is still a hit.
    assert 0 < sum(said["cached"][1]) < 96 + 480 + 864


def test_requests_that_are_preempted_and_compute_their_answers_again(checkpoint):
    load = {"lengths": tuple(range(90, 106, 2)), "new": 200}
    said = run_engine(checkpoint, **load, num_gpu_blocks_override=55, enable_prefix_caching=False)
    assert said["answers"] == [answers_of(checkpoint, **load)]
    assert said["preemptions"][0] > 2


def test_drafts_that_are_rejected(checkpoint):
    said = run_engine(checkpoint, speculative_config=NGRAMS)
    assert said["answers"] == [answers_of(checkpoint)]


def test_drafts_that_are_accepted(shipped):
    """It repeats itself where a prompt has no meaning."""
    said = run_engine(shipped, speculative_config=NGRAMS)
    assert said["answers"] == [answers_of(shipped)]
    assert said["accepted"] > 100


def test_two_ranks_of_tensor_parallelism(centred):
    """Each takes the mean of its own heads' keys."""
    said = run_engine(centred, tensor_parallel_size=2, processes=True)
    assert said["answers"] == [answers_of(centred)]


@pytest.fixture(scope="module")
def family_answers(random_checkpoint):
    """What engines of the other families answer."""
    folders = [random_checkpoint(family) for family in OTHERS]
    return dict(zip(OTHERS, run_engines(folders, **FEW), strict=True))


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(random_checkpoint, family_answers, family):
    assert family_answers[family] == answers_of(random_checkpoint(family), **FEW)


@pytest.mark.parametrize("family", ["qwen2", "olmo2"])  # biases of heads, and norms over all heads
def test_two_ranks_of_what_else_has_heads(random_checkpoint, family):
    folder = random_checkpoint(family)
    assert run_engine(folder, tensor_parallel_size=2, processes=True)["answers"] == [answers_of(folder)]


def test_without_the_plugin_the_dense_model_answers_and_has_fewer_blocks(checkpoint, monkeypatch):
    with_plugin = run_engine(checkpoint)["blocks"]
    monkeypatch.setenv("VLLM_PLUGINS", "")
    stock = {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}, "trust_remote_code": True}
    said = run_engine(checkpoint, **stock)
    assert said["answers"] == [answers_of(checkpoint, dense=True)]
    assert said["groups"] == [["FullAttentionSpec", 32]]
    assert with_plugin / said["blocks"] > 1.35


def test_the_plugin_stands_aside_for_the_stock_class(centred):
    said = run_engine(centred, hf_overrides={"architectures": ["LlamaForCausalLM"]})
    assert said["answers"] == [answers_of(centred, dense=True)]


def test_a_cache_in_fp8_with_drafts(checkpoint, in_fp8):
    said = run_engine(in_fp8, new=FP8_NEW, speculative_config=NGRAMS)
    assert said["answers"] == [answers_of(in_fp8, new=FP8_NEW)] != [answers_of(checkpoint, new=FP8_NEW)]
    # A byte a number, the window too.
    widths = json.loads((in_fp8 / "config.json").read_text())["leank"]["widths"]
    pages = ModelPages(tuple(map(tuple, widths)), 32, 1, ((0, 3),))
    assert said["blocks"] == (16 << 20) // pages.numbers_per_page(32)


def test_a_cache_in_fp8_whose_requests_are_preempted(in_fp8):
    """A prompt is read again at once, as it comes, and its answer's tokens attend to pages as before."""
    load = {"lengths": tuple(range(90, 106, 2)), "new": 60}
    small = {"num_gpu_blocks_override": 34, "max_model_len": 256, "enable_prefix_caching": False}
    said = run_engine(in_fp8, **load, **small)
    assert said["answers"] == [answers_of(in_fp8, **load)]
    assert said["preemptions"][0] > 1


def test_a_cache_in_fp8_of_two_ranks(in_fp8):
    said = run_engine(in_fp8, new=FP8_NEW, kv_cache_dtype="fp8", tensor_parallel_size=2, processes=True)
    assert said["answers"] == [answers_of(in_fp8, new=FP8_NEW)]


def test_a_cache_in_fp8_of_keys_less_their_mean(random_checkpoint, in_fp8):
    folder = random_checkpoint("llama", "fp8", is_centred=True)
    said = run_engine(folder, new=FP8_NEW, kv_cache_dtype="fp8")
    assert said["answers"] == [answers_of(folder, new=FP8_NEW)] != [answers_of(in_fp8, new=FP8_NEW)]


def test_a_cache_in_fp8_without_scales_is_refused(checkpoint):
    assert "cannot be served so: a cache in fp8 needs measured scales" in run_engine(
        checkpoint, fails=True, kv_cache_dtype="fp8"
    )


def test_scales_that_are_not_asked_for_are_left_out(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "scaled")
    shard = folder / "model.safetensors"
    scales = {
        f"model.layers.{n}.self_attn.{name}": torch.ones(4, 32) for n in range(3) for name in SCALE_NAMES
    }
    save_file({**load_file(shard), **scales}, shard, {"format": "pt"})
    assert run_engine(folder)["answers"] == [answers_of(checkpoint)]
