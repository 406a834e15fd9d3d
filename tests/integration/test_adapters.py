"""A LoRA of the original, converted, does to a checkpoint what it does to the original."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from leank_convert import convert_adapter, export_checkpoint
from tests.checks import done, edit_json, refusal, rejected
from tests.integration.conftest import GREEDY, WIDTHS
from tests.tiny_families import batch

peft = pytest.importorskip("peft")
# PEFT's own, under the newest transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
PROMPT = batch()["input_ids"][:1]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
ADAPTERS = {
    "llama": {"rank_pattern": {"k_proj": 3}},
    "qwen2": {"use_dora": True, "bias": "all"},
    "qwen3": {"target_modules": ["k_proj"], "modules_to_save": ["o_proj", "q_norm", "lm_head"]},
    "phi3": {"target_modules": ["qkv_proj", "o_proj"], "use_dora": True},
    "glm4": {"modules_to_save": ["post_self_attn_layernorm"]},
    "olmo2": {"target_modules": ["v_proj", "o_proj"], "modules_to_save": ["q_norm", "k_norm"]},
}


def adapter_of(source, folder, **options):
    """Write a random adapter; also returns logits and tokens of the model with it."""
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    options = {"target_modules": ALL, "r": 4, "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder)
    model.eval()
    with torch.no_grad():
        return folder, model(PROMPT).logits, model.generate(PROMPT, **GREEDY)


@pytest.mark.parametrize("family", ADAPTERS)
def test_an_adapter_does_to_the_checkpoint_what_it_does_to_the_original(family, converted, load, tmp_path):
    checkpoint = converted(family, WIDTHS, sizes=(3, 60, 4))  # nothing of these prompts is pruned
    lora, logits, tokens = adapter_of(checkpoint.source, tmp_path / "lora", **ADAPTERS[family])
    new = convert_adapter(lora, checkpoint.folder, tmp_path / "made" / "new")
    models = [peft.PeftModel.from_pretrained(load(checkpoint.folder), new).eval()]
    # Whose magnitudes transformers leaves out, of any model's adapter.
    if not ADAPTERS[family].get("use_dora"):
        models.append(load(checkpoint.folder))
        models[-1].load_adapter(str(new))
    for model in models:
        with torch.no_grad():
            torch.testing.assert_close(model(PROMPT, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4)
        assert model.generate(PROMPT, **GREEDY).tolist() == tokens.tolist()
    # Else the test would pass without a conversion.
    wrong = peft.PeftModel.from_pretrained(load(checkpoint.folder), lora).eval()
    with torch.no_grad():
        assert (wrong(PROMPT, use_cache=False).logits - logits).abs().max() > 0.05
    with pytest.raises(ValueError, match="load_adapter: KV heads are in another order"):
        load(checkpoint.folder).load_adapter(str(lora))


def test_where_no_head_moved_an_adapter_stays_as_it_is(converted, load, tmp_path):
    checkpoint = converted("llama", [[3, 8], [0, 16]])
    lora, _, _ = adapter_of(checkpoint.source, tmp_path / "lora", revision="of the original")
    told = done("adapter", lora, "--checkpoint", checkpoint.folder, "-o", tmp_path / "new")
    assert told == f"{tmp_path / 'new'}\n"
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (lora, tmp_path / "new"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    load(checkpoint.folder).load_adapter(str(lora))
    settings = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == (str(checkpoint.folder), None)


def test_an_adapter_for_another_order_is_refused(converted, load, tmp_path):
    one, two = converted("llama", WIDTHS, name="one"), converted("llama", [[8, 0], [3, 16]], name="two")
    lora, _, _ = adapter_of(one.source, tmp_path / "lora")
    new = convert_adapter(lora, one.folder, tmp_path / "new")
    same = converted("llama", [[3, 8], [0, 16]], name="same")  # no head moves
    for other in (two, same):
        with pytest.raises(ValueError, match="load_adapter: KV heads are in another order"):
            load(other.folder).load_adapter(str(new))
    with refusal("was converted before"):
        convert_adapter(new, two.folder, tmp_path / "newer")
    with refusal("holds files already"):
        convert_adapter(lora, one.folder, new)


def test_an_export_converts_an_adapter_beside_the_checkpoint(converted, tmp_path, caplog):
    checkpoint, out = converted("llama", WIDTHS, sizes=(3, 60, 4)), tmp_path / "out"
    lora, _, _ = adapter_of(checkpoint.source, tmp_path / "lora")
    options = ("--mask", checkpoint.folder, "-o", out, "--adapter")
    broken, name = tmp_path / "broken", "adapter_model.safetensors"
    shutil.copytree(lora, broken)
    save_file({part: tensor[:-1] for part, tensor in load_file(lora / name).items()}, broken / name)
    assert "another model's" in rejected("export", checkpoint.source, *options, broken)
    (broken / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    assert "only LORA is known" in rejected("export", checkpoint.source, *options, broken)
    assert not out.exists()
    done("export", checkpoint.source, *options, lora)
    alone = convert_adapter(lora, checkpoint.folder, tmp_path / "alone")
    assert (out / "adapter" / name).read_bytes() == (alone / name).read_bytes()
    done("export", checkpoint.source, *options, lora, "--overwrite")
    assert (out / "adapter" / name).read_bytes() == (alone / name).read_bytes()
    done("export", checkpoint.source, *options[:-1], "--overwrite")
    assert (out / "adapter" / name).exists()
    other = converted("llama", [[0, 8], [16, 3]], name="other")
    (out / "adapter" / "notes.txt").touch()
    assert "holds files already" in rejected("export", checkpoint.source, *options, lora, "--overwrite")
    export_checkpoint(checkpoint.source, other.folder, out, overwrite=True)
    # Heads lie in another order now.
    assert "removed" in caplog.text and [*(out / "adapter").iterdir()] == [out / "adapter" / "notes.txt"]
    shutil.copytree(lora, out / "adapter", dirs_exist_ok=True)
    assert "holds files already" in rejected("export", checkpoint.source, *options, lora, "--overwrite")


def test_an_adapter_that_was_trained_on_the_checkpoint_is_marked_as_fitting(converted, load, tmp_path):
    checkpoint, other = converted("llama", WIDTHS), converted("llama", [[8, 0], [3, 16]], name="other")
    lora, logits, tokens = adapter_of(checkpoint.folder, tmp_path / "lora")
    given = ("adapter", lora, "--checkpoint", checkpoint.folder, "-o", tmp_path / "new")
    told = rejected(*given)
    assert f"names the checkpoint '{checkpoint.folder}'" in told and not (tmp_path / "new").exists()
    again = ("export", checkpoint.source, "--mask", checkpoint.folder, "-o", tmp_path / "again")
    assert "names the checkpoint" in rejected(*again, "--adapter", lora) and not (tmp_path / "again").exists()
    with pytest.raises(
        ValueError, match="with `--trained-on-checkpoint` if it was trained on that, and load"
    ):
        load(checkpoint.folder).load_adapter(str(lora))
    done(*given, "--trained-on-checkpoint")
    model = load(checkpoint.folder)
    # As it is loaded from a checkpoint's repository, too.
    shutil.copytree(tmp_path / "new", tmp_path / "repository" / "adapter")
    model.load_adapter(str(tmp_path / "repository"), adapter_kwargs={"subfolder": "adapter"})
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, logits)
    assert torch.equal(model.generate(PROMPT, **GREEDY), tokens)
    with pytest.raises(ValueError, match="load_adapter: KV heads are in another order"):
        load(other.folder).load_adapter(str(tmp_path / "new"))


@pytest.mark.parametrize("base", ["", "no/such/model", "x" * 5000, None])
def test_what_an_adapter_names_as_its_base_may_be_anything_else(base, converted, tmp_path, monkeypatch):
    checkpoint = converted("llama", WIDTHS)
    lora, _, _ = adapter_of(checkpoint.source, tmp_path / "lora")
    monkeypatch.chdir(checkpoint.folder)
    edit_json(lora / "adapter_config.json", base_model_name_or_path=base)
    new = convert_adapter(lora, checkpoint.folder, tmp_path / "new", base_model="me/pruned")
    settings = json.loads((new / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "me/pruned"


def rename(tensors, old, new):
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"peft_type": "LOHA"}, None, "`peft_type` is 'LOHA', and only LORA"),
        ({"layer_replication": [[0, 2]]}, None, "`layer_replication` is not known"),
        ({"use_bdlora": {"nblocks": 2}}, None, "`use_bdlora` is not known"),
        ({"init_lora_weights": "olora"}, None, "'olora', of which PEFT works out a part anew"),
        ({}, lambda tensors: {name: tensor[:-1] for name, tensor in tensors.items()}, "another model's"),
        ({}, lambda tensors: rename(tensors, "lora_B", "lora_C"), "not known how heads lie"),
        ({}, lambda tensors: rename(tensors, "layers.1", "layers.7"), "model has no `model.layers.7"),
        ({}, lambda tensors: rename(tensors, "layers.1", "blocks.1"), "not known how heads lie"),
        ({}, lambda tensors: rename(tensors, "layers.", "h."), "has 8 tensors, and none is of a module"),
        ({}, lambda tensors: {}, "has 0 tensors"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_nothing_is_written(
    converted, tmp_path, settings, change, message
):
    checkpoint = converted("llama", WIDTHS)
    lora, _, _ = adapter_of(checkpoint.source, tmp_path / "lora", target_modules=["q_proj", "v_proj"])
    edit_json(lora / "adapter_config.json", **settings)
    weights = lora / "adapter_model.safetensors"
    if change is not None:
        save_file(change(load_file(weights)), weights)
    before = sorted(tmp_path.iterdir())
    with refusal(message):
        convert_adapter(lora, checkpoint.folder, tmp_path / "new")
    weights.unlink()
    with refusal(r"peft_type|not known|olora|has no `adapter_model\.safetensors`"):
        convert_adapter(lora, checkpoint.folder, tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == before
