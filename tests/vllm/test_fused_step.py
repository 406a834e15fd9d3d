"""Which models and which steps of theirs run fused in vLLM; test_engine holds what these answer."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from vllm.config import CUDAGraphMode

from leank_convert.vllm import fused_step
from leank_convert.vllm.fused_step import FusedModel


class Stock:
    def forward(self, *given):
        return "stock"


class Model(FusedModel, Stock):
    """Of two layers, which have kernels."""

    def __init__(self):
        layers = [make_layer(), make_layer()]
        self._attentions = [layer.self_attn.attn for layer in layers]
        self.model = SimpleNamespace(layers=layers, embed_input_ids=lambda ids: torch.zeros(len(ids), 8))


def make_layer():
    rotation = type("RotaryEmbedding", (), {"is_neox_style": True, "rotary_dim": 32})()
    rotation.cos_sin_cache = torch.zeros(9, 32)
    names = {"is_fused": True, "layer_name": "first", "kernels": "kernels"}
    attention = SimpleNamespace(chunk_index=torch.zeros(1), head_size=32, value_basis=None, **names)
    o_proj, down_proj = SimpleNamespace(bias=None), SimpleNamespace(bias=None)
    own = SimpleNamespace(attn=attention, rotary_emb=rotation, o_proj=o_proj)
    return SimpleNamespace(self_attn=own, mlp=SimpleNamespace(down_proj=down_proj))


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(fused_step, "run_layers", lambda *_: "fused")
    monkeypatch.setattr(fused_step, "fused_kernels", lambda kernels: kernels)
    return Model()


@pytest.mark.parametrize(
    ("num_tokens", "change", "ran"),
    [
        (4, {}, "fused"),
        (64, {}, "fused"),
        (65, {}, "stock"),
        (4, {"cudagraph_runtime_mode": CUDAGraphMode.FULL}, "fused"),
        # Else the graphs of steps that differ would not be captured with the others.
        (4, {"cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE}, "stock"),
        (4, {"attn_metadata": None}, "stock"),
        (4, {"num_columns": None}, "stock"),
        (4, {"num_columns": 2}, "stock"),
        (4, {"num_tokens": 3}, "stock"),  # the last one is padding
        (4, {"kernels": None}, "stock"),
        (4, {"is_fused": False}, "stock"),
    ],
)
def test_steps_of_one_token_a_request_run_fused(num_tokens, change, ran, model, monkeypatch):
    given = {"num_columns": 1, "num_tokens": num_tokens, **change}
    step = SimpleNamespace(num_columns=given["num_columns"], num_tokens=given["num_tokens"])
    own = {"attn_metadata": {"first": step}, "cudagraph_runtime_mode": CUDAGraphMode.NONE}
    context = SimpleNamespace(**{name: change.get(name, value) for name, value in own.items()})
    monkeypatch.setattr(fused_step, "get_forward_context", lambda: context)
    first, last = model._attentions
    first.is_fused, last.kernels = change.get("is_fused", True), change.get("kernels", "kernels")
    assert model.forward(torch.zeros(num_tokens, dtype=torch.long), torch.zeros(num_tokens).long()) == ran


def config_of(**change):
    facts = {"hidden_size": 256, "intermediate_size": 96, **change}
    ranks = {"world_size": 1, "tensor_parallel_size": 1}
    names = ("quant_config", "lora_config", "kv_transfer_config", "speculative_config")
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**facts)),
        compilation_config=SimpleNamespace(compile_sizes=change.get("compile_sizes", [])),
        parallel_config=SimpleNamespace(**{name: change.get(name, one) for name, one in ranks.items()}),
        **{name: change.get(name) for name in names},
    )


@pytest.mark.parametrize(
    "change",
    [
        {"quant_config": "fp8"},
        {"lora_config": "adapters"},
        {"kv_transfer_config": "another engine"},
        {"speculative_config": "drafts"},
        {"world_size": 2},  # stages of a pipeline
        {"world_size": 2, "tensor_parallel_size": 2, "intermediate_size": 104},  # 52 in each
        {"compile_sizes": [4]},
        {"hidden_size": 260},
        {"intermediate_size": 100},
        {"hidden_size": 1 << 15},
    ],
)
def test_what_kernels_do_not_serve_is_not_fused(change, model, monkeypatch):
    assert not model.can_fuse(config_of())  # a CPU
    monkeypatch.setattr(fused_step, "is_hopper", lambda device: True)
    assert model.can_fuse(config_of())
    assert not model.can_fuse(config_of(**change))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("rotary_emb", "is_neox_style", False),
        ("rotary_emb", "rotary_dim", 16),
        ("attn", "value_basis", "rotated"),
        ("attention", "rotary_emb", SimpleNamespace()),  # of another kind
        ("attention", "attn", SimpleNamespace(value_basis=None)),  # that is not pruned
        ("attention", "do_llama_4_scaling", True),
        ("layer", "ada_rms_norm_t_cond", "a module"),
        ("layer", "forward", "what brings weights from the host"),
    ],
)
def test_layers_that_compute_more_than_others_are_not_fused(part, name, value, model, monkeypatch):
    monkeypatch.setattr(fused_step, "is_hopper", lambda device: True)
    assert model.can_fuse(config_of())
    last = model.model.layers[-1]
    parts = {"layer": last, "attention": last.self_attn, **vars(last.self_attn)}
    setattr(parts[part], name, value)
    assert not model.can_fuse(config_of())


@pytest.mark.parametrize("part", ["o_proj", "down_proj"])
def test_ranks_are_fused_where_their_sums_have_no_bias(part, model, monkeypatch):
    monkeypatch.setattr(fused_step, "is_hopper", lambda device: True)
    ranks = config_of(world_size=2, tensor_parallel_size=2)
    assert model.can_fuse(ranks)
    last = model.model.layers[-1]
    setattr({"o_proj": last.self_attn, "down_proj": last.mlp}[part], part, SimpleNamespace(bias="a bias"))
    assert model.can_fuse(config_of()) and not model.can_fuse(ranks)
