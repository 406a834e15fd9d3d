"""vLLM answers with the tokens of the checkpoint's own runtime, whatever its scheduler does meanwhile."""

import json
import shutil

import pytest
import torch

from leank_convert._runtime.fp8_leank import SCALE_NAMES
from leank_convert.families import ARCHITECTURES
from leank_convert.vllm.configs import MIXED
from leank_convert.vllm.pages import ModelPages
from tests.checks import edit_tensors
from tests.vllm.conftest import NEAR, NGRAMS, TWICE, answers_of, ask, gaps_of, prune_values, run_engines

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

OTHERS = [family for family in ARCHITECTURES if family != "llama" and family not in MIXED]
FEW = {"lengths": (80, 170, 12), "new": 30}
# Requests that come and go, chunks of prompts beside answers.
FUSED = {**FEW, "max_model_len": 256, "max_num_seqs": 2}
FUSED_FAMILIES = ("mistral", "qwen2", "qwen3")
LONG = {"lengths": tuple(range(90, 106, 2)), "enable_prefix_caching": False}


def test_the_mask_changes_answers(checkpoint):
    """Else the tests below would pass without a plugin."""
    pairs = zip(answers_of(checkpoint), answers_of(checkpoint, dense=True), strict=True)
    assert sum(ours != dense for ours, dense in pairs) > 3


@pytest.fixture(scope="module")
def fused(centred, in_fp8, random_checkpoint, tmp_path_factory):
    """Checkpoints whose decode steps can be fused."""
    pruned = prune_values(in_fp8, tmp_path_factory.mktemp("values") / "pruned")
    families = {family: random_checkpoint(family) for family in FUSED_FAMILIES}
    return {**families, "centred": centred, "fp8, V pruned": pruned}


@pytest.fixture(scope="module")
def said(checkpoint, centred, shipped, in_fp8, fused, random_checkpoint, tmp_path_factory):
    """What every engine says."""
    scaled = shutil.copytree(checkpoint, tmp_path_factory.mktemp("engine") / "scaled")
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(3) for name in SCALE_NAMES]
    edit_tensors(scaled / "model.safetensors", **{name: torch.ones(4, 32) for name in names})
    chunks = {"rounds": TWICE, "max_num_batched_tokens": 128, "block_size": 16}
    runs = {
        "batch": ask(checkpoint, rounds=TWICE),
        "llama": ask(centred, **chunks),
        "smollm3": ask(random_checkpoint("smollm3", is_centred=True), **chunks),
        "evicted": ask(checkpoint, rounds=TWICE, num_gpu_blocks_override=108),
        "preempted": ask(checkpoint, **LONG, new=200, num_gpu_blocks_override=55),
        "drafts": ask(shipped, speculative_config=NGRAMS),
        "stock": ask(centred, hf_overrides={"architectures": ["LlamaForCausalLM"]}),
        "fp8": ask(in_fp8, speculative_config=NGRAMS),
        "fp8 preempted": ask(
            random_checkpoint("llama", "fp8"), **LONG, num_gpu_blocks_override=34, max_model_len=256
        ),
        "scaled": ask(scaled, **FEW),
        "unscaled": ask(checkpoint, kv_cache_dtype="fp8"),
        **{
            # A prompt in FP8 attends to itself as it comes, to earlier chunks as they are rounded.
            f"fused {name}": {
                **ask(folder, **FUSED, max_num_batched_tokens=256 if "fp8" in name else 64),
                "fused": True,
            }
            for name, folder in fused.items()
        },
        **{f"other {family}": ask(random_checkpoint(family), **FEW) for family in OTHERS},
    }
    return run_engines(runs)


def test_a_batch_and_the_prefix_cache(said, checkpoint):
    batch = said["batch"]
    assert batch["answers"] == [answers_of(checkpoint)] * 2
    # Hits end at multiples of both groups' pages.
    assert batch["groups"] == [["LeanKKeptSpec", 32], ["LeanKWindowSpec", 48]]
    assert batch["cached"] == [[0, 0, 0, 0, 0, 0], [0, 96, 480, 0, 864, 0]]
    assert batch["preemptions"] == [0, 0]


@pytest.mark.parametrize("family", ["llama", "smollm3"])  # a model of vLLM's own, and one of transformers
def test_prompts_in_chunks_then_from_the_prefix_cache(said, random_checkpoint, family):
    folder = random_checkpoint(family, is_centred=True)
    # What is pruned counts as the mean, not as zero.
    assert said[family]["answers"] == [answers_of(folder)] * 2 != [answers_of(random_checkpoint(family))] * 2
    assert min(said[family]["cached"][1][1:3]) > 0


def test_a_pool_so_small_that_pages_of_a_prefix_are_evicted(said, checkpoint):
    assert said["evicted"]["answers"] == [answers_of(checkpoint)] * 2
    # Some of a prefix is gone, and the rest is still a hit.
    assert 0 < sum(said["evicted"]["cached"][1]) < 96 + 480 + 864


def test_requests_that_are_preempted_and_compute_their_answers_again(said, checkpoint):
    assert said["preempted"]["answers"] == [answers_of(checkpoint, lengths=LONG["lengths"], new=200)]
    assert said["preempted"]["preemptions"][0] > 2


def test_drafts_that_are_accepted(said, shipped):
    """It repeats itself where a prompt has no meaning."""
    assert said["drafts"]["answers"] == [answers_of(shipped)]
    assert said["drafts"]["accepted"] > 100


@pytest.mark.parametrize("name", [*FUSED_FAMILIES, "centred", "fp8, V pruned"])
def test_steps_that_are_fused(said, fused, name):
    assert said[f"fused {name}"]["answers"] == [answers_of(fused[name], **FEW)]
    assert {1, 2} == {*said[f"fused {name}"]["fused"]}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families(said, random_checkpoint, family):
    assert said[f"other {family}"]["answers"] == [answers_of(random_checkpoint(family), **FEW)]


def test_the_plugin_stands_aside_for_the_stock_class(said, centred):
    assert said["stock"]["answers"] == [answers_of(centred, dense=True)]


def test_a_cache_in_fp8_with_drafts(said, in_fp8, centred):
    (answers,) = said["fp8"]["answers"]
    assert gaps_of(in_fp8, answers).max() < NEAR
    assert gaps_of(centred, answers).max() > 20 * NEAR
    # A byte a number, the window too.
    widths = json.loads((in_fp8 / "config.json").read_text())["leank"]["widths"]
    pages = ModelPages(tuple(map(tuple, widths)), 32, 1, ((0, 3),))
    assert said["fp8"]["blocks"] == (16 << 20) // pages.numbers_per_page(32)


def test_a_cache_in_fp8_whose_requests_are_preempted(said, random_checkpoint):
    """A prompt is read again at once, as it comes, and its answer's tokens attend to pages as before."""
    (answers,) = said["fp8 preempted"]["answers"]
    assert gaps_of(random_checkpoint("llama", "fp8"), answers, LONG["lengths"]).max() < NEAR
    assert said["fp8 preempted"]["preemptions"][0] > 1


def test_a_cache_in_fp8_takes_the_checkpoints_scales_and_no_other_cache_does(said, checkpoint):
    assert "cannot be served so: a cache in fp8 needs measured scales" in said["unscaled"]["error"]
    assert said["scaled"]["answers"] == [answers_of(checkpoint, **FEW)]
