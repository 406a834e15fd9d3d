"""A model pruned in memory answers as its checkpoint does, and is itself again behind the block."""

import copy
import re
from dataclasses import asdict

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from leank_convert import prune_model
from leank_convert.errors import LeanKError
from leank_convert.mask import ChannelMask, load_mask
from tests.integration.conftest import GREEDY, WIDTHS
from tests.tiny_families import FAMILIES, batch

SIZES = {"sink_size": 3, "recent_size": 6, "flush_size": 4}


def tokens(model, **options):
    return model.generate(**batch(), **GREEDY, **options).tolist()


@pytest.mark.parametrize("row", FAMILIES)
def test_a_pruned_model_answers_as_the_checkpoint_of_its_mask(row, example, load):
    checkpoint = example(row.model_type)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.source).eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, dense = model.config.to_dict(), tokens(model)
    expected = tokens(load(checkpoint.folder))
    with prune_model(model, checkpoint.folder, **SIZES) as pruned:
        assert pruned is model
        assert tokens(model) == expected
        with pytest.raises(ValueError, match="save it behind the `with` block"):
            model.save_pretrained(checkpoint.folder / "saved")
        cache = model.build_cache()
    with pytest.raises(AttributeError, match="a LeanK cache serves pruned models alone"):
        tokens(model, cache=cache)
    assert type(model).__name__ == row.causal_lm_class
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert tokens(model) == dense


@pytest.mark.parametrize("kv_dtype", ["fp8", "int4"])
def test_a_pruned_model_takes_what_a_checkpoint_takes(kv_dtype, converted, load):
    checkpoint = converted("qwen2", WIDTHS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.source).eval()
    mask = ChannelMask(checkpoint.channel_mask)
    with prune_model(model, mask, **SIZES):
        cache = model.build_cache(kv_dtype=kv_dtype)
        found = tokens(model, cache=cache)
    ours = load(checkpoint.folder)
    other = ours.build_cache(kv_dtype=kv_dtype)
    assert tokens(ours, cache=other) == found
    assert asdict(cache.memory()) == asdict(other.memory())  # of classes of two copies of the runtime


def test_windows_are_those_of_the_mask_unless_they_are_given(converted):
    checkpoint = converted("llama", WIDTHS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.source)
    with prune_model(model, load_mask(checkpoint.folder / "channel_mask.safetensors"), flush_size=2):
        assert [model.config.leank[name] for name in SIZES] == [3, 6, 2]


def test_an_error_in_the_block_leaves_the_model_as_it_was(converted):
    checkpoint = converted("llama", WIDTHS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.source).eval()
    dense = tokens(model)
    with pytest.raises(KeyboardInterrupt), prune_model(model, checkpoint.folder):
        raise KeyboardInterrupt
    assert tokens(model) == dense
    with prune_model(model, checkpoint.folder, **SIZES):
        assert tokens(model) != dense
        model.config = copy.deepcopy(model.config)
    assert tokens(model) == dense
    with pytest.raises(ZeroDivisionError), prune_model(model, checkpoint.folder):
        del model.config.leank, model.graph_memory
        raise ZeroDivisionError
    assert tokens(model) == dense


def test_weights_that_decoding_laid_side_by_side_lie_apart_again(converted):
    checkpoint = converted("llama", WIDTHS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.source)
    parts = [getattr(model.model.layers[0].self_attn, f"{name}_proj").weight for name in "qkv"]
    before = [part.detach().clone() for part in parts]
    with prune_model(model, checkpoint.folder):  # as kernels of a GPU have it
        joined = torch.cat([part.data for part in parts]).split([len(part) for part in parts])
        for part, piece in zip(parts, joined, strict=True):
            part.data = piece
        saved = model.state_dict()
    for tensors in (saved.values(), model.state_dict().values()):
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    assert all(torch.equal(part, own) for part, own in zip(parts, before, strict=True))


# PEFT's own, under the newest transformers.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_in_place_keeps_its_effect(converted):
    peft = pytest.importorskip("peft")
    checkpoint = converted("llama")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.source).eval()
    options = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["1.self_attn"]}  # which it copies
    settings = peft.LoraConfig(init_lora_weights=False, **options)
    plain = tokens(model)
    adapted = peft.get_peft_model(model, settings).get_base_model().eval()
    expected = tokens(adapted)
    assert expected != plain
    with prune_model(adapted, checkpoint.folder, **SIZES):  # of all channels
        assert tokens(adapted) == expected
    assert tokens(adapted) == expected


def test_what_cannot_be_pruned_in_memory_is_refused_and_left_alone(converted):
    checkpoint = converted("llama", WIDTHS)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.source)

    def refused(model, message, mask=checkpoint.folder):
        before = type(model), dict(vars(model))
        with pytest.raises(LeanKError, match=re.escape(message)), prune_model(model, mask):
            pass
        assert (type(model), dict(vars(model))) == before

    refused(model.model, "`LlamaModel` is not `LlamaForCausalLM`")
    refused(torch.nn.Linear(2, 2), "`Linear` is no causal language model of transformers' own class")
    with torch.device("meta"):
        refused(
            transformers.LlamaForCausalLM(model.config), "weights of `LlamaForCausalLM` are not in memory"
        )
    with prune_model(model, checkpoint.folder):
        refused(model, "`LeanKLlamaForCausalLM` is pruned already")
    refused(model, "no packaged mask for", mask=None)
    refused(model, "has shape [2, 2, 8]", mask=ChannelMask(torch.ones(2, 2, 8, dtype=torch.bool)))
    longer = AutoModelForCausalLM.from_pretrained(checkpoint.source)
    longer.config.rope_parameters["rope_theta"] = 5e5
    refused(longer, "was made under rope parameters")
    model.forward = model.forward
    refused(model, "has a forward pass of its own")
