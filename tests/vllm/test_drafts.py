"""Models that draft keep vLLM's own cache beside a LeanK cache, and change no token."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.vllm.conftest import answers_of, ask, run_engines

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

NUM_DRAFTS = 3
WHOLE = {"lengths": (12, 20, 31), "new": 29}


@pytest.fixture(scope="module")
def original(checkpoint, tmp_path_factory):
    """The dense model of the checkpoint: it drafts what is answered while nothing is pruned."""
    folder = tmp_path_factory.mktemp("drafts") / "original"
    transformers.LlamaForCausalLM.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def head(original):
    """A head of EAGLE with random weights."""
    folder = original.parent / "head"
    folder.mkdir()
    config = json.loads((original / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    model = transformers.LlamaForCausalLM.from_pretrained(original)
    first = {
        name: tensor
        for name, tensor in model.model.state_dict().items()
        if "layers.0." in name and "input_layernorm" not in name  # a head has none
    }
    size = config["hidden_size"]
    fc = 0.05 * torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(0))
    save_file({"fc.weight": fc, **first}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def said(checkpoint, original, head):
    """What engines say whose drafts are a model's, pages of a block side by side, as on GPUs."""

    def with_drafts(method, model, **options):
        drafts = {"method": method, "model": str(model), "num_speculative_tokens": NUM_DRAFTS}
        return ask(checkpoint, speculative_config=drafts, kv_cache_memory_bytes=64 << 20, **options)

    eagle = with_drafts("eagle", head, rounds=(None, None))
    runs = {
        "model": with_drafts("draft_model", original, rounds=(None, None), max_num_batched_tokens=256),
        "whole": with_drafts("draft_model", original, **WHOLE, block_size=None),
        "eagle": eagle,
    }
    beside = run_engines(runs, VLLM_KV_CACHE_LAYOUT="BLHNC")
    return beside | run_engines({"another layout": eagle})


def test_drafts_of_a_model(said, checkpoint):
    assert said["model"]["answers"] == [answers_of(checkpoint)] * 2
    # One block holds kept pages and those of the draft's layers.
    assert said["model"]["groups"] == [["LeanKKeptSpec", 32], ["LeanKWindowSpec", 48]]
    assert said["model"]["cached"] == [[0, 0, 0, 0, 0, 0], [0, 96, 480, 0, 864, 0]]


def test_a_model_that_drafts_is_right_while_nothing_is_pruned(said, checkpoint):
    """So what it reads of its own cache is what it wrote."""
    assert said["whole"]["groups"][0] == ["LeanKKeptSpec", 64]  # whatever the draft's backend prefers
    assert said["whole"]["answers"] == [answers_of(checkpoint, **WHOLE)]
    # A prompt's step answers with one token, a decode step with its drafts and one more.
    assert said["whole"]["accepted"] == 3 * (29 - 1) * NUM_DRAFTS / (NUM_DRAFTS + 1)


def test_drafts_of_eagle(said, checkpoint):
    assert said["eagle"]["answers"] == [answers_of(checkpoint)] * 2
    # It needs hidden states of a prompt's last tokens, so a hit is a page shorter.
    assert said["eagle"]["cached"] == [[0, 0, 0, 0, 0, 0], [0, 96, 384, 0, 768, 0]]


def test_a_layout_that_gives_drafts_a_table_of_their_own_is_refused(said):
    told = "beside a LeanK cache in the layout LBHNC: set VLLM_KV_CACHE_LAYOUT=BLHNC"
    assert told in said["another layout"]["error"]
