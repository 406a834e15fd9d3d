"""vLLM answers with a converted LoRA adapter as with the original merged, and refuses the original's."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from leank_convert import convert_adapter
from leank_convert.export import export_checkpoint
from tests.vllm.conftest import SIZES, answers_of, random_mask, run_engine

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

RANK, SCALE = 4, 2
LOAD = {"lengths": (80, 170, 12, 901), "new": 30}
WIDTHS = [[20, 0, 32, 13], [16, 0, 4, 0], [8, 32, 8, 32]]  # all heads move


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory):
    """A checkpoint, an adapter of its original, the same converted, and a checkpoint that has it merged."""
    root = tmp_path_factory.mktemp("adapters")
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    mask = random_mask(WIDTHS, 32)

    def export(name):
        model.save_pretrained(root / "source" / name)
        export_checkpoint(root / "source" / name, mask, root / name, **SIZES)

    export("checkpoint")
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, weight in model.named_parameters():
        if "_proj" in name and "self_attn" in name:
            first, second = (
                0.15 * torch.randn(shape, generator=generator)
                for shape in ((RANK, weight.shape[1]), (weight.shape[0], RANK))
            )
            for part, tensor in (("A", first), ("B", second)):
                tensors[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"] = tensor
            weight.data += SCALE * second @ first
    export("merged")
    original = root / "original"
    original.mkdir()
    save_file(tensors, original / "adapter_model.safetensors")
    targets = [f"{name}_proj" for name in "qkvo"]
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": targets}
    (original / "adapter_config.json").write_text(json.dumps(settings))
    convert_adapter(original, root / "checkpoint", root / "converted")
    return root


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_with_and_without_an_adapter_in_one_batch(folders, ranks):
    plain, adapted = (answers_of(folders / name, **LOAD) for name in ("checkpoint", "merged"))
    assert all(one != other for one, other in zip(plain, adapted, strict=True))
    converted = str(folders / "converted")
    said = run_engine(
        folders / "checkpoint",
        **LOAD,
        enable_lora=True,
        max_loras=2,  # vLLM on CPUs gives requests without an adapter the last slot's
        adapters=[converted, None, converted, converted],
        tensor_parallel_size=ranks,
        processes=ranks > 1,
    )
    assert said["answers"] == [[adapted[0], plain[1], *adapted[2:]]]


def test_an_adapter_of_the_original_is_refused(folders):
    original = str(folders / "original")
    said = run_engine(folders / "checkpoint", **LOAD, fails=True, enable_lora=True, adapters=[original] * 4)
    assert f"adapter `{original}`: KV heads are in another order, or V in another basis, than in" in said
    assert (
        "convert it by `leank-convert adapter ADAPTER --checkpoint CHECKPOINT -o NEW`, and serve NEW" in said
    )
