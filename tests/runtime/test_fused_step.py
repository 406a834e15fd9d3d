"""The fused forward pass: where it serves, what it computes, and what it leaves of a model's weights."""

import copy
import io
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_model
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaMLP

from runtime import graph_leank
from runtime.fused_step_leank import fused_forward
from runtime.modeling_leank import LeanKLlamaModel
from tests.runtime.conftest import FUSED, fused_model
from tests.runtime.tiny_inputs import WIDTHS, feed, feed_both, feed_turns, ids, padded


@pytest.fixture
def fused_steps(graphs, monkeypatch):
    """Fused forward passes that ran, warm-ups and captures, as a list."""
    noted = Mock(wraps=fused_forward)
    monkeypatch.setattr(graph_leank, "fused_forward", noted)
    return noted.call_args_list


build = partial(fused_model, WIDTHS)


def compare(model, columns=1, rows=2, **how):
    """Hold replayed steps, so many columns each, to the stock forward pass: in logits and in what is held."""
    turns, tokens = [15, *[columns] * (12 // columns)], ids(rows, 27, 3)
    cache, plain = feed_both(model, turns, tokens=tokens, **how)
    assert cache.graph.num_replays > 0
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert layer.num_columns == other.num_columns
        for held, expected in zip(layer.store.tensors, other.store.tensors, strict=True):
            torch.testing.assert_close(held, expected, rtol=1e-3, atol=1e-3)


def decode(model, cache):
    feed_turns(model, cache, [15, *[1] * 12])


@pytest.mark.parametrize(
    ("family", "config", "how"),
    [
        *((family, {}, {}) for family in FUSED),
        *((family, {}, {"columns": 3, "mask": padded(27, 7, 20)}) for family in FUSED),
        ("Llama", {}, {"rows": 3}),
        ("Llama", {}, {"logits_to_keep": 1}),
        ("Qwen3", {}, {"columns": 2}),  # all of a captured step's
        ("Phi3", {}, {"columns": 3, "embeds": True, "logits_to_keep": 2}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("Llama", {"tie_word_embeddings": True}, {}),
        ("Llama", {"rms_norm_eps": 0.1}, {}),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, {}),
        ("Llama", {"value_widths": [[0, 8, 16], [4, 0, 8]]}, {}),
    ],
    ids=str,
)
def test_a_fused_step_gives_what_the_stock_step_gives(family, config, how, fused_steps):
    own = {"value_widths": config["value_widths"]} if "value_widths" in config else {}
    model = build(family, **{key: value for key, value in config.items() if key not in own})
    model.config.leank = {**model.config.leank, **own}
    assert model.build_cache().layers[0].layout.value_chunk == (4 if own else 16)
    compare(model, **how)
    assert len(fused_steps) == 2  # the warm-up and the capture


def test_heads_rotated_in_part_are_left_to_the_stock_step(fused_steps):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = build("Phi3", rope_parameters=rope)
    decode(model, model.build_cache())
    assert not fused_steps


def test_a_model_without_a_head(fused_steps):
    whole = build()
    model = LeanKLlamaModel(whole.config).eval()
    model.load_state_dict(whole.model.state_dict())
    caches = model.build_cache(), model.build_cache(use_graphs=False)
    for count in (15, 1, 1, 1):
        ours, stock = (feed(model, ids(2, count), cache).last_hidden_state for cache in caches)
        torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-4)
    assert len(fused_steps) == 2


@torch.inference_mode()
def of_inference(layer):
    weight = layer.self_attn.k_proj.weight
    layer.self_attn.k_proj.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)


OTHERS = {
    "a weight of inference mode": of_inference,
    "no MLP": lambda layer: setattr(layer, "mlp", torch.nn.Identity()),
    "another activation": lambda layer: setattr(layer.mlp, "act_fn", torch.nn.GELU()),
    "a bias of its own": lambda layer: setattr(
        layer.self_attn.q_proj, "bias", torch.nn.Parameter(torch.ones(96))
    ),
    "one weight twice": lambda layer: setattr(layer.mlp.up_proj, "weight", layer.mlp.gate_proj.weight),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_models_take_the_stock_forward_pass(change, fused_steps):
    model = build()
    change(model.model.layers[1])
    compare(model)
    compare(build(intermediate_size=42))  # which threads do not divide
    assert not fused_steps


@pytest.mark.parametrize(
    ("patched", "package"),
    [(LlamaMLP, "tests"), (LlamaModel, "transformers_modules"), (LlamaForCausalLM, "tests")],
)
def test_a_patched_class_is_run(patched, package, fused_steps, monkeypatch):
    model, forward = build(), patched.forward

    def other(*args, **kwargs):
        return forward(*args, **kwargs)

    other.__module__ = f"{package}.patches"
    monkeypatch.setattr(patched, "forward", other)
    compare(model)
    assert not fused_steps


def storages(model) -> int:
    """Bytes that a model's parameters hold."""
    held = (parameter.untyped_storage() for parameter in model.parameters())
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_fused_weights_are_the_models_own(family, fused_steps, tmp_path):
    model = build(family)
    before, held = {name: value.clone() for name, value in model.state_dict().items()}, storages(model)
    parameters = dict(model.named_parameters())
    decode(model, model.build_cache())
    assert len(fused_steps) == 2 and storages(model) == held
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    attention = model.model.layers[0].self_attn
    query, value = attention.q_proj.weight, attention.v_proj.weight
    assert query.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    copied = copy.deepcopy(model)
    for other in (model, copied, loaded):
        assert before.keys() == other.state_dict().keys()
        assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    compare(copied)
    place = query.data_ptr()
    compare(model)
    assert query.data_ptr() == place  # not laid side by side again
    with torch.no_grad():
        query.mul_(2)
    compare(model)
    model.to(torch.float64)
    assert storages(model) == 2 * held


def test_who_saves_fused_weights_saves_each_once(fused_steps, tmp_path):
    def size(tensors):
        torch.save(tensors, file := io.BytesIO())
        return file.tell()

    model = build("Qwen2")
    before, names = size(model.state_dict()), [*model.state_dict()]
    compare(model)
    assert fused_steps
    state = model.state_dict()
    assert [*state] == names and size(state) == before
    # What accelerate tells tensors apart by, and drops all of but one.
    storages = [tensor.untyped_storage() for tensor in state.values()]
    assert len({(storage.data_ptr(), storage.nbytes()) for storage in storages}) == len(names)
    save_model(model, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())
    for name, tensor in state.items():
        tensor.mul_(1.5)  # still the model's own memory
        assert torch.equal(model.get_parameter(name), tensor)
    assert all(value is model.get_parameter(name) for name, value in model.state_dict(keep_vars=True).items())


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj"])
def test_weights_that_lie_transposed(name, fused_steps):
    model = build()
    linear = model.model.layers[1].get_submodule(name)
    linear.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous().t())
    compare(model)
    assert len(fused_steps) == 2


def test_ids_and_embeddings_at_once_are_refused_as_in_a_prompt(fused_steps):
    model, token = build(), ids(2, 1)
    cache, embeds = model.build_cache(), model.get_input_embeddings()(token).detach()
    with torch.no_grad():
        model(ids(2, 15), cache=cache)
        for _ in range(3):
            with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
                model(token, inputs_embeds=embeds, cache=cache)
            model(inputs_embeds=embeds, cache=cache)
    assert cache.graph.num_replays == 2


def backward(model):
    model.train()(ids(1, 5), labels=ids(1, 5)).loss.backward()


def test_models_that_share_parameters_share_fused_ones(fused_steps):
    model = build()
    compare(model)
    other = LeanKLlamaModel(model.config).eval()
    for name, parameter in model.model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(owner), leaf, parameter)
    held = storages(model)
    cache = other.build_cache()
    for count in (15, 1, 1):
        feed(other, ids(2, count), cache)
    assert storages(model) == held and len(fused_steps) == 4
    backward(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_fused_in_inference_mode_can_be_trained(fused_steps):
    model = build()
    with torch.inference_mode():
        decode(model, model.build_cache())
        state = model.state_dict()
    assert fused_steps
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *state.values()))
    backward(model)
    torch.optim.SGD(model.parameters(), 0.1).step()
    compare(model.eval())


def test_without_memory_to_lay_weights_side_by_side_steps_run_as_before(fused_steps, monkeypatch):
    model = build()
    cat = torch.cat

    def without_memory(tensors, *args, **kwargs):
        if isinstance(tensors, list) and tensors[0].shape == (96, 48):
            raise torch.OutOfMemoryError("no memory")
        return cat(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "cat", without_memory)
    compare(model)
    assert not fused_steps
