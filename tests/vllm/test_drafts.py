"""Models that draft keep vLLM's own cache beside a LeanK cache, and change no token."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.vllm.conftest import answers_of, run_engine

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

NUM_DRAFTS = 3


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """Pages of a block lie side by side, which GPUs do by themselves."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")


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


def run_with(folder, method, model, **options):
    """Answers of an engine whose drafts are a model's."""
    drafts = {"method": method, "model": str(model), "num_speculative_tokens": NUM_DRAFTS}
    return run_engine(folder, speculative_config=drafts, kv_cache_memory_bytes=64 << 20, **options)


def test_drafts_of_a_model(checkpoint, original):
    said = run_with(checkpoint, "draft_model", original, rounds=(None, None), max_num_batched_tokens=256)
    assert said["answers"] == [answers_of(checkpoint)] * 2
    # One block holds kept pages and those of the draft's layers.
    assert said["groups"] == [["LeanKKeptSpec", 32], ["LeanKWindowSpec", 48]]
    assert said["cached"] == [[0, 0, 0, 0, 0, 0], [0, 96, 480, 0, 864, 0]]


def test_a_model_that_drafts_is_right_while_nothing_is_pruned(checkpoint, original):
    """So what it reads of its own cache is what it wrote."""
    load = {"lengths": (12, 20, 31), "new": 29}
    said = run_with(checkpoint, "draft_model", original, **load, block_size=None)
    assert said["groups"][0] == ["LeanKKeptSpec", 64]  # whatever the draft's backend prefers
    assert said["answers"] == [answers_of(checkpoint, **load)]
    # A prompt's step answers with one token, a decode step with its drafts and one more.
    assert said["accepted"] == 3 * (29 - 1) * NUM_DRAFTS / (NUM_DRAFTS + 1)


def test_drafts_of_eagle(checkpoint, head):
    said = run_with(checkpoint, "eagle", head, rounds=(None, None))
    assert said["answers"] == [answers_of(checkpoint)] * 2
    # It needs hidden states of a prompt's last tokens, so a hit is a page shorter.
    assert said["cached"] == [[0, 0, 0, 0, 0, 0], [0, 96, 384, 0, 768, 0]]


def test_a_layout_that_gives_drafts_a_table_of_their_own_is_refused(checkpoint, head, monkeypatch):
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT")
    said = run_with(checkpoint, "eagle", head, fails=True)
    assert "beside a LeanK cache in the layout LBHNC: set VLLM_KV_CACHE_LAYOUT=BLHNC" in said
