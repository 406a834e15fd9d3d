"""Models that draft keep vLLM's own cache beside a LeanK cache, and change no token."""

import json
import pickle
import shutil

import pytest
import torch
import transformers
from safetensors.torch import save_file

from leank_convert.families import ARCHITECTURES
from leank_convert.vllm import register
from tests import checks
from tests.vllm.conftest import FEW, WITH_MTP, answers_of, ask, run_engines, run_python

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

NUM_DRAFTS = 3
FAMILIES = ("gpt_oss", *WITH_MTP)  # the first has layers with a window
WHOLE = {"lengths": (12, 20, 31), "new": 29}
HAND_ON = """
import pickle, sys
from leank_convert.vllm import register
override = pickle.loads(bytes.fromhex(sys.argv[1]))  # an engine's process, before it loads plugins
register()
pickle.dumps(override)  # to its ranks
"""
MANY = {"lengths": tuple(range(10, 31)), "new": 29}  # nothing of them is pruned either


@pytest.fixture(scope="module")
def original(checkpoint, tmp_path_factory):
    """The dense model of the checkpoint: it drafts what is answered while nothing is pruned."""
    folder = tmp_path_factory.mktemp("drafts") / "original"
    transformers.LlamaForCausalLM.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def heads(original):
    """Heads of EAGLE, by their methods, with the model's first layer and random weights before it."""
    config = json.loads((original / "config.json").read_text())
    model, size = transformers.LlamaForCausalLM.from_pretrained(original), config["hidden_size"]
    layer = {name: part for name, part in model.model.state_dict().items() if "layers.0." in name}
    del layer["layers.0.input_layernorm.weight"]  # a head has none
    # That of EAGLE-3 sees a token beside the states of three layers, and chooses among fewer tokens.
    of_three, ones = {}, torch.ones(size)
    for name, part in layer.items():
        wide = any(f".{projection}_proj" in name for projection in "qkv")
        of_three[name.replace("layers.0", "midlayer")] = torch.cat([part, part], 1) if wide else part
    of_three |= {f"midlayer.{name}.weight": ones.clone() for name in ("hidden_norm", "input_layernorm")}
    of_three |= {"norm.weight": ones, "lm_head.weight": model.lm_head.weight[::2].clone()}
    of_three["d2t"] = torch.arange(len(model.lm_head.weight) // 2)
    told = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(of_three["d2t"])}
    for method, tensors, keys, count in (("eagle", layer, {}, 2), ("eagle3", of_three, told, 3)):
        folder = original.parent / method
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, **keys}))
        fc = 0.05 * torch.randn(size, count * size, generator=torch.Generator().manual_seed(0))
        save_file({"fc.weight": fc, **tensors}, folder / "model.safetensors", {"format": "pt"})
    return original.parent


@pytest.fixture(scope="module")
def as_dense(random_checkpoint, tmp_path_factory):
    """Weights of the families' checkpoints, by the stock class."""
    root = tmp_path_factory.mktemp("dense")
    for family in FAMILIES:
        folder = shutil.copytree(random_checkpoint(family), root / family)
        own = {"model_type": family, "architectures": [ARCHITECTURES[family].causal_lm_class]}
        checks.edit_json(folder / "config.json", **own, auto_map={}, leank=None)
    return root


@pytest.fixture(scope="module")
def said(checkpoint, original, heads, random_checkpoint, as_dense):
    """What engines say whose drafts are a model's, pages of a block side by side, as on GPUs."""

    def with_drafts(method, model, folder=checkpoint, **options):
        drafts = {"method": method, "model": model and str(model), "num_speculative_tokens": NUM_DRAFTS}
        return ask(folder, speculative_config=drafts, kv_cache_memory_bytes=64 << 20, **options)

    runs = {
        "model": with_drafts("draft_model", original, rounds=(None, None), max_num_batched_tokens=256),
        "whole": with_drafts("draft_model", original, **WHOLE, block_size=None),
        "ranks": with_drafts("draft_model", original, **FEW, tensor_parallel_size=2),
        **{name: with_drafts(name, heads / name, rounds=(None, None)) for name in ("eagle", "eagle3")},
        "eagle3, whole": with_drafts("eagle3", heads / "eagle3", **MANY),
        "eagle3, dense": with_drafts("eagle3", heads / "eagle3", original, **MANY),
    }
    for family in FAMILIES:
        own, dense = random_checkpoint(family), as_dense / family
        drafter = ("mtp", None) if family in WITH_MTP else ("eagle3", heads / "eagle3")
        runs[family] = with_drafts(*drafter, own, rounds=(None, None))
        runs[f"{family}, whole"] = with_drafts(*drafter, own, **MANY)
        runs[f"{family}, dense"] = with_drafts(*drafter, dense, **MANY)
    beside = run_engines(runs, VLLM_KV_CACHE_LAYOUT="BLHNC")
    return beside | run_engines({"another layout": runs["eagle"]})


def test_drafts_of_a_model(said, checkpoint):
    assert said["model"]["answers"] == [answers_of(checkpoint)] * 2
    # One block holds kept pages and those of the draft's layers.
    assert said["model"]["groups"] == [["LeanKKeptSpec", 32], ["LeanKWindowSpec", 48]]
    assert said["model"]["cached"] == [[0, 0, 0, 0, 0, 0], [0, 96, 480, 0, 864, 0]]
    assert said["ranks"]["answers"] == [answers_of(checkpoint, **FEW)]
    assert said["ranks"]["accepted"] > 0


def test_a_model_that_drafts_is_right_while_nothing_is_pruned(said, checkpoint):
    """So what it reads of its own cache is what it wrote."""
    assert said["whole"]["groups"][0] == ["LeanKKeptSpec", 64]  # whatever the draft's backend prefers
    assert said["whole"]["answers"] == [answers_of(checkpoint, **WHOLE)]
    # A prompt's step answers with one token, a decode step with its drafts and one more.
    assert said["whole"]["accepted"] == 3 * (29 - 1) * NUM_DRAFTS / (NUM_DRAFTS + 1)


# It needs states of a prompt's last tokens, so a hit is a page shorter: of the group with its layers, or of
# both, as vLLM tells which group that is with MTP alone.
@pytest.mark.parametrize(
    ("drafter", "hits"),
    [
        ("eagle", [0, 96, 384, 0, 768, 0]),
        ("eagle3", [0, 96, 384, 0, 768, 0]),
        ("gpt_oss", [0, 128, 448, 0, 864, 0]),
        *((family, [0, 96, 384, 0, 864, 0]) for family in WITH_MTP),
    ],
)
def test_drafts_from_hidden_states(said, checkpoint, random_checkpoint, drafter, hits):
    folder = checkpoint if "eagle" in drafter else random_checkpoint(drafter)
    assert said[drafter]["answers"] == [answers_of(folder)] * 2
    assert said[drafter]["cached"] == [[0, 0, 0, 0, 0, 0], hits]


@pytest.mark.parametrize("drafter", ["eagle3", *FAMILIES])
def test_what_drafts_is_given_the_states_that_the_dense_model_gives(said, drafter):
    whole, dense = said[f"{drafter}, whole"], said[f"{drafter}, dense"]
    assert (whole["answers"], whole["accepted"]) == (dense["answers"], dense["accepted"])
    assert dense["accepted"] > 0


def test_a_layout_that_gives_drafts_a_table_of_their_own_is_refused(said):
    told = "beside a LeanK cache in the layout LBHNC: set VLLM_KV_CACHE_LAYOUT=BLHNC"
    assert told in said["another layout"]["error"]


def test_how_a_checkpoint_that_drafts_is_read_goes_from_process_to_process():
    from vllm.config import SpeculativeConfig

    register()
    override = pickle.dumps(SpeculativeConfig.compose_draft_hf_overrides(None))
    run_python("-c", HAND_ON, override.hex(), timeout=120)
