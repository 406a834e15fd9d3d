"""A basis of V in a checkpoint: folded into V and O, of any family, and found where it is another."""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from leank_convert._runtime import modeling_leank
from leank_convert.convert import export_model
from leank_convert.export import export_checkpoint
from leank_convert.export.adapter import convert_adapter
from leank_convert.families import ARCHITECTURES
from leank_convert.files import read_json
from leank_convert.mask import ChannelMask
from leank_convert.prune import prune_model
from tests.checks import bless, edit_json, edit_tensors, facts_of, failed, prune_values, refusal, say_in_block
from tests.tiny_families import FAMILIES, batch, random_mask, tiny_model, weights_of

WIDTHS = [[16, 0], [8, 16], [0, 5], [16, 2]]  # of K; heads change places


@pytest.fixture
def folder_of(tmp_path):
    """Writes a tiny model of a family: `folder_of("llama", **config)`."""

    def write(family, name="model", **config):
        tiny_model(family, pad_token_id=0, **config).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
        return tmp_path / name

    return write


def pruned_mask(folder):
    layers, _, head_dim = facts_of(folder).mask_shape
    return prune_values(ChannelMask(random_mask(WIDTHS[:layers], head_dim)), folder)


def whole(mask):
    """The same mask with all of V."""
    return replace(mask, value_basis=None, value_widths=None)


def stock_model(family, folder):
    """A folder's weights in the stock class."""
    stock = getattr(transformers, ARCHITECTURES[family].causal_lm_class)
    config = stock.config_class.from_dict({**read_json(folder / "config.json"), "model_type": family})
    return stock.from_pretrained(folder, config=config, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(model):
    return model(**batch()).logits


@pytest.mark.parametrize("row", [case for case in FAMILIES if not case.values[0].gated])
def test_a_folded_model_computes_what_the_original_does(row, folder_of, tmp_path):
    family = row.model_type
    source = folder_of(family)
    mask = pruned_mask(source)
    out = export_checkpoint(source, mask, tmp_path / "out")
    assert not failed(out, source)
    expected = logits_of(stock_model(family, source))
    torch.testing.assert_close(logits_of(stock_model(family, out)), expected, rtol=1e-4, atol=1e-4)
    plain = weights_of(export_checkpoint(source, whole(mask), tmp_path / "plain"))
    changed = {name for name, tensor in weights_of(out).items() if not tensor.equal(plain[name])}
    assert changed and all(re.search(r"self_attn\.(v_proj|qkv_proj|o_proj)\.", name) for name in changed)
    block = read_json(out / "config.json")["leank"]
    orders = enumerate(block["head_permutation"])
    assert block["value_widths"] == [mask.value_widths[layer][order].tolist() for layer, order in orders]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_once_and_verify_finds_another_fold(folder_of, tmp_path, dtype):
    source = folder_of("qwen2", dtype=dtype)
    mask = pruned_mask(source)
    out = export_checkpoint(source, mask, tmp_path / "out")
    before, after = weights_of(source), weights_of(out)
    order = read_json(out / "config.json")["leank"]["head_permutation"][1]
    name = "model.layers.1.self_attn."
    for new, old in enumerate(order):
        basis = mask.value_basis[1, old].double()
        for part in ("v_proj.weight", "v_proj.bias"):
            was, found = (tensors[name + part].unflatten(0, (2, 16)) for tensors in (before, after))
            assert found[new].equal((basis.mT @ was[old].double()).to(dtype))
        # Two query heads of each.
        was, found = (tensors[f"{name}o_proj.weight"].unflatten(1, (2, 2, 16)) for tensors in (before, after))
        assert found[:, new].equal((was[:, old].double() @ basis).to(dtype))
    assert failed(out, source) == {}
    path = out / "model.safetensors"
    for tensor in ("v_proj.weight", "v_proj.bias", "o_proj.weight"):
        wrong = after[f"{name}{tensor}"].clone()
        wrong.view(-1)[3] *= 1.01
        edit_tensors(path, **{**after, f"{name}{tensor}": wrong})
        bless(out)
        message = f"tensor `{name}{tensor}` is not the fold of the mask's basis of V into its source"
        assert failed(out, source)["source: model.safetensors"] == message


def test_a_basis_belongs_to_the_weights_that_it_was_measured_on(folder_of, tmp_path):
    source = folder_of("llama")
    mask = pruned_mask(source)
    other = folder_of("llama", "other", seed=2)
    with refusal("has a basis of V for other weights of `v_proj` and `o_proj` than"):
        export_checkpoint(other, mask, tmp_path / "out")
    out = export_checkpoint(source, mask, tmp_path / "out")
    assert "has a basis of V for other weights" in failed(out, other)["source: tensors"]


def scores_of(model):
    """Scores of tokens that are decoded behind prompts of which most is pruned, one row padded."""
    options = {"max_new_tokens": 6, "do_sample": False}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(**batch(), **options).scores)


SIZES = {"sink_size": 2, "recent_size": 4, "flush_size": 2}


def test_v_that_is_rotated_as_it_is_cached_answers_as_where_it_is_folded(folder_of, tmp_path):
    source = folder_of("llama")
    mask = pruned_mask(source)
    out = export_checkpoint(source, mask, tmp_path / "out", **SIZES)
    folded = modeling_leank.LeanKLlamaForCausalLM.from_pretrained(out).eval()
    model = stock_model("llama", source)
    with prune_model(model, whole(mask), **SIZES):
        of_all = scores_of(model)
    with prune_model(model, mask, **SIZES):
        rotated = scores_of(model)
    torch.testing.assert_close(rotated, scores_of(folded), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(rotated, of_all, rtol=1e-2, atol=1e-2)
    (out / "channel_mask.safetensors").unlink()  # without which no adapter can be converted
    with pytest.raises(ValueError, match="basis of V, is no longer in"):
        folded.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("row", [case for case in FAMILIES if case.values[0].gated])
def test_beside_gates_weights_stay_and_v_is_rotated_as_it_is_cached(row, folder_of, tmp_path):
    source = folder_of(row.model_type)
    mask = pruned_mask(source)
    out, plain = tmp_path / "out", whole(mask)
    export_checkpoint(source, mask, out, **SIZES)
    assert not failed(out, source)
    same = export_checkpoint(source, plain, tmp_path / "plain", **SIZES)
    assert all(tensor.equal(weights_of(same)[name]) for name, tensor in weights_of(out).items())
    block = read_json(out / "config.json")["leank"]
    assert block["value_basis"] is True and "value_basis" not in read_json(same / "config.json")["leank"]
    assert "in a basis that V is rotated into as it is cached" in (out / "README.md").read_text()
    say_in_block(out, "value_basis", None)
    told = failed(out, source)["source: tensors"]
    assert "`leank.value_basis` is missing, and an export of this source cannot fold" in told
    model = stock_model(row.model_type, source)
    every = replace(mask, value_widths=mask.channel_mask.any(-1).int() * mask.channel_mask.shape[-1])
    scores = []
    for each in (plain, every, mask):
        with prune_model(model, each, **SIZES):
            scores.append(scores_of(model))
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(scores[2], scores[0], rtol=1e-2, atol=1e-2)


def test_quantized_weights_stay_and_take_the_basis_of_those_that_they_were_made_of(folder_of, tmp_path):
    source = folder_of("llama")
    mask, model = pruned_mask(source), source / "model.safetensors"
    name = "model.layers.1.self_attn.v_proj.weight"
    weight = load_file(model)[name]
    scale = weight.abs().amax(1, keepdim=True) / 448
    edit_tensors(model, **{name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale})
    edit_json(source / "config.json", quantization_config={"quant_method": "fbgemm_fp8"})
    out = export_checkpoint(source, mask, tmp_path / "out")
    assert not failed(out, source) and read_json(out / "config.json")["leank"]["value_basis"] is True
    with refusal(f"no basis of V is measured on model .*`{name}` is quantized", "that it was quantized from"):
        export_model(source, whole(mask), tmp_path / "b", value_pruning_ratio=0.5)
    with refusal("prunes V already", "leave the ratio of V out"):
        export_model(source, mask, tmp_path / "b", value_pruning_ratio=0)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj", "o_proj"], "r": 3}),
        ("phi3", {"target_modules": ["qkv_proj", "o_proj"], "r": 1}),
        ("qwen2", {"target_modules": ["k_proj", "o_proj"], "use_dora": True, "modules_to_save": ["v_proj"]}),
        ("llama", {"target_modules": ["v_proj"], "use_dora": True}),
    ],
)
def test_an_adapter_adds_to_a_folded_model_what_it_adds_to_the_original(folder_of, tmp_path, family, options):
    peft = pytest.importorskip("peft")
    source = folder_of(family)
    out = export_checkpoint(source, pruned_mask(source), tmp_path / "out")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = peft.get_peft_model(stock_model(family, source), config).eval()
    model.save_pretrained(tmp_path / "lora")
    if options["target_modules"] == ["v_proj"]:
        (tmp_path / "new").mkdir()
        save_file({}, tmp_path / "new" / "adapter_model.safetensors", metadata={"leank": "made before"})
        with refusal("holds DoRA's magnitudes of V's rows"):
            convert_adapter(tmp_path / "lora", out, tmp_path / "new", overwrite=True)
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["adapter_model.safetensors"]
        return
    new = convert_adapter(tmp_path / "lora", out, tmp_path / "new")
    folded = peft.PeftModel.from_pretrained(stock_model(family, out), new).eval()
    torch.testing.assert_close(logits_of(folded), logits_of(model), rtol=1e-4, atol=1e-4)
