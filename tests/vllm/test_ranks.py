"""Two ranks of tensor parallelism answer as one: each takes its own heads' weights, widths, means, scales."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from leank_convert.vllm import ranks
from tests.checks import edit_json
from tests.vllm.conftest import FEW, LINEAR, answers_of, ask, hold_to_runtime, prune_values, run_engines

MIXED = ["olmo3", "minimax_m2", "gpt_oss"]  # norms over all heads, twice; sinks and biases of heads
STATES = ["qwen3_next", "qwen3_5_text"]  # inputs of linear attention in one weight, and in several


def quantize(folder, out):
    """Copy a checkpoint as 8-bit integers, with a scale for each row and one for all inputs, which stays."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "_proj.weight" in name]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights |= {
            name: (weights[name] / scale).round().to(torch.int8),
            f"{name}_scale": scale,
            name.replace("weight", "input_scale"): torch.tensor([0.05]),
            # Without one vLLM scales each token by itself on CPUs with AMX, and refuses float32.
            name.replace("weight", "input_zero_point"): torch.tensor([5], dtype=torch.int8),
        }
    symmetric = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**symmetric, "strategy": "channel"},
        "input_activations": {**symmetric, "strategy": "tensor", "symmetric": False},
    }
    out = shutil.copytree(folder, out)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    quantization = {**settings, "config_groups": {"group_0": group}}
    edit_json(out / "config.json", quantization_config=quantization)
    return out


@pytest.fixture(scope="module")
def folders(checkpoint, adapted, random_checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    return {
        **{family: random_checkpoint(family, is_centred=True) for family in MIXED},
        **{family: random_checkpoint(family) for family in STATES},
        "fp8, V pruned": prune_values(random_checkpoint("llama", "fp8"), root / "pruned"),
        "quantized": quantize(checkpoint, root / "quantized"),
        "adapters": adapted / "checkpoint",
    }


@pytest.fixture(scope="module")
def said(folders, adapted):
    runs = {name: ask(folder, **FEW) for name, folder in folders.items()}
    runs.update({family: ask(folders[family], **LINEAR) for family in STATES})
    runs["fused"] = ask(folders["fp8, V pruned"], **FEW) | {"fused": True}
    runs["one"] = ask(folders["quantized"], **FEW, tensor_parallel_size=1)
    converted = str(adapted / "converted")
    adapters = {"enable_lora": True, "max_loras": 2, "adapters": [converted, None, converted, converted]}
    runs["adapters"] = ask(folders["adapters"], **FEW, **adapters)
    for run in runs.values():
        run["options"].setdefault("tensor_parallel_size", 2)
    return run_engines(runs)


@pytest.mark.parametrize("name", [*MIXED, "fp8, V pruned"])
def test_they_answer_as_the_runtime_does(said, folders, random_checkpoint, name):
    whole = answers_of(random_checkpoint("llama", "fp8"), **FEW)  # of all of V
    assert said[name]["answers"] == [answers_of(folders[name], **FEW)] != [whole]


def test_fused_steps(said, folders):
    assert said["fused"]["answers"] == said["fp8, V pruned"]["answers"]
    # In both ranks, three layers each.
    assert len(said["fused"]["fused"]) > 2 * 3 * FEW["new"] - 9 and said["fp8, V pruned"]["fused"] == []


@pytest.mark.parametrize("family", STATES)
def test_states_of_linear_attention(said, folders, family):
    hold_to_runtime(folders[family], said[family])


def test_quantized_weights(said):
    assert said["quantized"]["answers"] == said["one"]["answers"]


def test_requests_with_and_without_an_adapter_in_one_batch(said, adapted):
    plain, merged = (answers_of(adapted / name, **FEW) for name in ("checkpoint", "merged"))
    assert said["adapters"]["answers"] == [[merged[0], plain[1], *merged[2:]]]


@pytest.mark.parametrize(
    ("own", "elsewhere", "left"),
    [
        ((True, True, True), (1, 1), (True, True)),
        ((True, True, True), (1, 0), (True, False)),
        ((True, True, True), (0, 0), (False, False)),
        ((True, True, False), (1, 1), (True, False)),  # its kernels of sums are not exact
        ((True, False, True), (1, 1), (True, False)),  # another kind of GPU
        ((False, True, True), (1, 1), (False, False)),
    ],
)
def test_no_rank_decodes_by_kernels_that_another_lacks(own, elsewhere, left, monkeypatch):
    """Else one of them would wait for the other, or add up what that does not."""
    has_kernels, is_fused, has_sums = own
    group = SimpleNamespace(world_size=2, cpu_group="of the CPUs")

    def all_reduce(able, op, found):
        assert (op, found) == (torch.distributed.ReduceOp.MIN, group.cpu_group)
        torch.minimum(able, torch.tensor(elsewhere), out=able)

    monkeypatch.setattr(ranks, "get_tp_group", lambda: group)
    monkeypatch.setattr(ranks, "find_rank_kernels", lambda *_: "sums" if has_sums else None)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    kernels = ["kernels", "kernels" if has_kernels else None]
    attentions = [SimpleNamespace(kernels=own, is_fused=is_fused) for own in kernels]
    ranks.agree_on_kernels(attentions)
    assert [attention.kernels is not None for attention in attentions] == [left[0]] * 2
    assert [attention.is_fused for attention in attentions] == [left[1]] * 2
