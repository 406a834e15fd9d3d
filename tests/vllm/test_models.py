"""Weights, quantized or not, means of keys and scales go to the ranks that have their heads."""

import hashlib
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModel, SmolLM3Model

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from leank_convert._runtime.files_leank import MASK_FILE
from leank_convert.families import ARCHITECTURES
from leank_convert.vllm import BACKEND, ahead, configs, layers, models, register
from leank_convert.vllm.models import _LeanKForCausalLM

HEADS = (((0, 3), (1, 2)), ((1, 2), (0, 3)))  # of two ranks in two layers
SCALES = {
    f"model.layers.{layer}.self_attn.{name}": 2.0 ** torch.randint(-9, 9, (4, 16))
    for layer in range(2)
    for name in ("key_scale", "value_scale")
}


ORDERS = [[2, 0, 3, 1], [0, 1, 3, 2]]  # of the original's heads in the checkpoint
MEANS = torch.randn(2, 4, 16).half()
BASES = torch.randn(2, 4, 16, 16)


def attentions_of_a_rank():
    """Those of the second one, before anything is set."""
    return [
        SimpleNamespace(
            layer_name=f"model.layers.{layer}.self_attn.attn",
            row=layer,
            heads=[*heads],
            **{name: torch.zeros(1, 2, 16) for name in ("key_mean", "key_scale", "value_scale")},
            value_basis=torch.zeros(2, 16, 16),
        )
        for layer, heads in enumerate(HEADS[1])
    ]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, "lack `model.layers.1.self_attn.key_scale`; export it again"),
        (torch.ones(3, 16), r"`model.layers.1.self_attn.key_scale` is of shape \[3, 16\], not \[4, 16\]"),
        (torch.full((4, 16), 0.3), "layer 1: `key_scale` holds 0.3.*, which is no power of two"),
    ],
    ids=["missing", "too short", "no power of two"],
)
def test_a_scale_that_is_wrong_is_named(damage, said):
    scales = {**SCALES, "model.layers.1.self_attn.key_scale": damage}
    settings = SimpleNamespace(num_key_value_heads=4, head_dim=16)
    model = SimpleNamespace(_attentions=attentions_of_a_rank(), _settings=settings)
    given = {name: scale for name, scale in scales.items() if scale is not None}
    with pytest.raises(ValueError, match=said):
        _LeanKForCausalLM.set_scales(model, given)


def set_means(folder, damage=None):
    """What the second rank has of those in a mask's file."""
    file = folder / MASK_FILE
    save_file({"key_mean": MEANS, "value_basis": BASES}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if damage == "missing":
        file.unlink()
    elif damage == "another":
        save_file({"key_mean": MEANS + 1, "value_basis": BASES}, file)
    has = {"has_key_mean": True, "has_value_basis": True}
    model = SimpleNamespace(
        _attentions=attentions_of_a_rank(),
        _settings=SimpleNamespace(**has, channel_masks=torch.ones(2, 4, 16)),
        _config=SimpleNamespace(leank={"files": {MASK_FILE: digest}, "head_permutation": ORDERS}),
        _source=(str(folder), {"revision": None}),
    )
    _LeanKForCausalLM.set_mask_tensors(model)
    return model._attentions


@pytest.mark.parametrize("damage", ["missing", "another"])
def test_means_that_are_not_those_of_the_export_are_refused(damage, tmp_path):
    told = f"^`{tmp_path}`: `{MASK_FILE}`, which holds the mean of keys and the basis of V, is missing or"
    with pytest.raises(ValueError, match=told):
        set_means(tmp_path, damage)


def test_means_and_bases_of_a_rank_are_those_of_its_heads(tmp_path):
    for layer, attention in enumerate(set_means(tmp_path)):
        heads = [ORDERS[layer][head] for head in HEADS[1][layer]]
        assert torch.equal(attention.key_mean[0], MEANS[layer, heads].float())
        assert torch.equal(attention.value_basis, BASES[layer, heads])


def model_of(layers, **known):
    """A model whose heads have 16 channels, with what is known of it."""
    model = object.__new__(_LeanKForCausalLM)
    model.__dict__.update(_settings=SimpleNamespace(head_dim=16, layers=layers), **known)
    return model


def pages_of(heads):
    return SimpleNamespace(heads=heads, widths=((),) * 2)


@pytest.mark.parametrize(
    ("weight", "heads"),
    [
        ("q_proj.weight", "q"),
        ("q_proj.bias", "q"),  # of a model whose heads' outputs have gates
        ("k_proj.bias", "k"),
        ("qkv_proj.weight", "qkv"),
        ("q_norm.weight", "q"),
        ("sinks", "q"),
    ],
)
def test_heads_of_a_weight_are_put_in_the_order_of_ranks(weight, heads):
    """Two query heads to each of K and V; of the layers that are pruned the first rank has heads 0 and 3."""
    known = {"_num_heads": 8, "_has_gate": weight == "q_proj.bias", "_quantized": False}
    model = model_of((3, 5), **known, _pages=pages_of(HEADS))
    order = {"q": [0, 1, 6, 7, 2, 3, 4, 5], "k": [0, 3, 1, 2], "v": [0, 3, 1, 2]}
    size = {"sinks": 1, "q_proj.bias": 2 * 16}.get(weight, 16)
    blocks = [torch.randn(len(order[states]) * size) for states in heads]
    expected = [
        block.unflatten(0, (-1, size))[order[states]].flatten()
        for block, states in zip(blocks, heads, strict=True)
    ]
    name = f"model.layers.3.self_attn.{weight}"
    assert model.with_ordered_heads(name, torch.cat(blocks)).equal(torch.cat(expected))
    of_one_rank = model_of((3, 5), **known, _pages=pages_of(((range(4),) * 2,)))
    whole = torch.cat(blocks)
    assert of_one_rank.with_ordered_heads(name, whole) is whole


def test_what_has_no_heads_stays_as_it_is():
    model = model_of((0,), _has_output_bias=True)
    for name in ("0.self_attn.q_norm.weight", "0.self_attn.o_proj.bias", "0.mlp.up_proj.weight"):
        shared = torch.randn(16)
        assert model.with_ordered_heads(f"model.layers.{name}", shared) is shared
    whole = torch.randn(64)  # of a layer that is not pruned
    assert model.with_ordered_heads("model.layers.1.self_attn.q_proj.weight", whole) is whole


def test_a_bias_that_the_model_of_vllm_lacks_is_refused():
    """It drops it without a word."""
    with pytest.raises(ValueError, match=r"`model\.layers\.0\.self_attn\.o_proj\.bias`: vLLM's model has no"):
        model_of((0,), _has_output_bias=False).with_ordered_heads(
            "model.layers.0.self_attn.o_proj.bias", torch.ones(16)
        )


def test_transformers_builds_its_own_model_whatever_code_a_checkpoint_names():
    assert models.LeanKSmolLM3ForCausalLM.__mro__[2] is TransformersForCausalLM
    code = {"AutoModel": "modeling_leank.LeanKSmolLM3Model"}
    config = configs.LeanKSmolLM3Config(num_hidden_layers=1, auto_map=code)
    with torch.device("meta"):
        model = AutoModel.from_config(config, trust_remote_code=True)
    assert isinstance(model, SmolLM3Model)


ATTENTION = "model.layers.0.self_attn"


def quantized_model(heads):
    """A model of quantized weights, whose ranks have these KV heads; its cache is in the model's dtype."""
    model = type("Model", (_LeanKForCausalLM, Stock), {"__init__": lambda self: None})()
    attention, has = SimpleNamespace(key_scale=None), {"has_key_mean": False, "has_value_basis": False}
    model.__dict__.update(
        _quantized=True, _has_gate=False, _layers_differ=False, _num_heads=8, _attentions=[attention],
        _pages=SimpleNamespace(heads=heads, widths=((),)), _config=SimpleNamespace(leank={}),
        _source=("out", {}), _settings=SimpleNamespace(**has, head_dim=16, layers=(0,)),
    )  # fmt: skip
    return model


def test_one_rank_loads_whatever_layout_as_it_is():
    weights = {
        f"{ATTENTION}.q_proj.qweight": torch.ones(64, 32),
        f"{ATTENTION}.q_proj.weight_scale": torch.ones(7),
        f"{ATTENTION}.o_proj.weight": torch.ones(32, 64),
        f"{ATTENTION}.o_proj.weight_scale": torch.ones(32, 1),
        f"{ATTENTION}.o_proj.input_scale": torch.ones(()),
    }
    model = quantized_model(((range(4),),))
    assert model.load_weights(weights.items()) == weights.keys()
    assert all(model.loaded[name] is tensor for name, tensor in weights.items())
    assert model._attentions[0].lacks_constants is False


@pytest.mark.parametrize(
    ("name", "shape", "moves"),
    [
        ("q_proj.weight_scale", (128, 1), 16),  # of rows
        ("k_proj.weight_scale", (64,), 16),
        ("v_proj.weight_scale_inv", (4, 2), 1),  # of blocks that are a head
        ("o_proj.weight_scale_inv", (2, 16), 2),  # of two blocks to a head
        ("q_proj.weight_scale", (), 0),  # of all
        ("q_proj.input_scale_ub", (1,), 0),
        ("o_proj.weight_scale", (32, 1), 0),
        ("o_proj.weight_scale", (32,), 0),
        ("k_proj.weight_scale_inv", (2, 2), None),  # two heads share a block
        ("k_proj.weight_packed", (64, 4), None),
        ("o_proj.weight", (32, 64), None),  # two elements to a byte
    ],
)
def test_what_heads_have_of_a_tensor_moves_with_them(name, shape, moves):
    model, tensor = quantized_model((((0, 3),), ((1, 2),))), torch.rand(shape)
    name = f"{ATTENTION}.{name}"
    if moves is None:
        with pytest.raises(ValueError, match=rf"^`{name}` is of shape \[.*serve it on one GPU"):
            model.with_ordered_heads(name, tensor)
        return
    found = model.with_ordered_heads(name, tensor)
    if not moves:
        assert found is tensor
        return
    dim = int("o_proj" in name)
    heads = tensor.unflatten(dim, (-1, moves))
    order = torch.tensor([0, 3, 1, 2])
    if heads.shape[dim] == 8:  # two query heads to each of K and V
        order = torch.stack([2 * order, 2 * order + 1], 1).flatten()
    assert found.equal(heads.index_select(dim, order).flatten(dim, dim + 1))


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_the_newer_runner_tells_a_step_its_prompts_lengths(is_hybrid, monkeypatch):
    states = pytest.importorskip("vllm.v1.worker.gpu.model_states")
    config = MagicMock(**{"model_config.is_hybrid": is_hybrid, "model_config.is_attention_free": False})
    config.compilation_config.static_forward_context = {}
    stock, told, seen = states.resolve_model_state_cls(config, nn.Module()), [], []
    assert ("Hybrid" in stock.__name__) == is_hybrid
    monkeypatch.setattr(stock, "add_request", lambda *given: None)
    monkeypatch.setattr(stock, "prepare_attn", lambda self, *given, **options: seen.append([*told]))
    model = SimpleNamespace(_attentions=[SimpleNamespace(told_prompts=told)], _vllm_config=config)
    model.get_model_state_cls = partial(_LeanKForCausalLM.get_model_state_cls, model)
    state = object.__new__(states.resolve_model_state_cls(config, model))
    assert isinstance(state, stock)
    for place, length in ((5, 9), (3, 40), (5, 70)):  # the last takes the first one's place
        state.add_request(place, SimpleNamespace(prompt_len=length))
    for places in ([3, 5], [5]):
        state.prepare_attn(SimpleNamespace(idx_mapping_np=np.array(places)), for_capture=False)
    assert seen == [[40, 70], [70]]


class Stock:
    def __init__(self, *, vllm_config, prefix):
        self.chosen = dict(vllm_config.attention_config.backend_per_kind)

    def modules(self):
        raise RuntimeError(self.chosen)

    def load_weights(self, weights):
        self.loaded = dict(weights)
        return set(self.loaded)


def test_only_layers_that_are_pruned_are_built_with_the_plugins_backend(monkeypatch):
    """Those with a window with what was asked for; what drafts is built later, and asks for itself."""
    register()
    for name in ("check_options", "choose_cache_dtype", "has_drafter", "read_settings"):
        monkeypatch.setattr(models, name, lambda given: None)
    attention = SimpleNamespace(backend=None, backend_per_kind={"sliding_window": "FLASHINFER"})
    hf_config = SimpleNamespace(num_attention_heads=4, model_type="leank_olmo3")
    config = SimpleNamespace(
        attention_config=attention,
        cache_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(hf_config=hf_config, revision=None, model=""),
        **dict.fromkeys(("lora_config", "quant_config")),
    )
    with pytest.raises(RuntimeError) as built:
        type("Model", (_LeanKForCausalLM, Stock), {})(vllm_config=config)
    (chosen,) = built.value.args
    assert chosen == {"sliding_window": "FLASHINFER", "full_attention": AttentionBackendEnum[BACKEND]}
    assert (attention.backend, attention.backend_per_kind) == (None, {"sliding_window": "FLASHINFER"})


def test_a_layer_waits_for_the_compilation_that_was_begun(monkeypatch):
    """And looks for its kernels itself, whatever became of that."""
    events = []
    monkeypatch.setattr(ahead, "_compilations", [SimpleNamespace(join=lambda: events.append("waited"))])
    monkeypatch.setattr(layers, "find_kernels", lambda device, dtype, columns: events.append(columns))
    layer = SimpleNamespace(
        chunk_index=torch.zeros(1), dtype=torch.bfloat16, _shape=lambda columns: {"columns": columns}
    )
    layers.LeanKAttention.kernels_for(layer, 5)
    assert events == ["waited", 5]


def settled_by(name, checked=()):
    """What vLLM settles of a quantized model and of an engine by the name of a class."""
    hf_config = SimpleNamespace(quantization_config={"quant_method": "mxfp4"})
    sizes = dict.fromkeys(("cudagraph_capture_sizes", "max_cudagraph_capture_size"))
    config = SimpleNamespace(
        kv_transfer_config=None,
        compilation_config=SimpleNamespace(**sizes),
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
    )
    found = MODELS_CONFIG_MAP[name]
    found.verify_and_update_model_config(SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config))
    found.verify_and_update_config(config)
    assert [*checked] == ([config] if name.startswith("LeanK") else [])
    return hf_config, config.compilation_config, config.structured_outputs_config.reasoning_parser


def test_vllm_settles_as_much_by_our_names_as_by_those_of_the_families(monkeypatch):
    """And options are checked there, before any process is started."""
    register()
    checked = []
    monkeypatch.setattr("leank_convert.vllm.refusals.check_options", checked.append)
    names = {family.causal_lm_class for family in ARCHITECTURES.values()}
    named = {name for name in names if name in MODELS_CONFIG_MAP}
    assert all(issubclass(MODELS_CONFIG_MAP[f"LeanK{name}"], VerifyAndUpdateConfig) for name in names)
    assert named == {"GptOssForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
    *ours, parser = settled_by("LeanKGptOssForCausalLM", checked)
    *stock, of_harmony = settled_by("GptOssForCausalLM")
    assert ours == stock and stock[1].max_cudagraph_capture_size > 512
    assert (parser, of_harmony) == ("", "openai_gptoss")  # which raises in chats of another `model_type`
