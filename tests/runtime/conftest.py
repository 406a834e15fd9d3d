"""Models built in memory."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from runtime import configuration_leank, graph_leank, layer_leank, model_state_leank, modeling_leank
from runtime.fp8_leank import SCALE_NAMES
from tests.runtime.conversation import ModelPair
from tests.runtime.stand_ins import PlainKernels, RecordedGraph
from tests.runtime.tiny_inputs import INT4_WIDTHS, VOCAB, WIDTHS
from tests.tiny_families import random_mask


def build_pair(
    masks, family="Llama", groups=2, sink=3, recent=6, flush=4, prune="eager", seed=0, head_dim=16, **config
):
    """Of masks, or of so many channels of each head."""
    masks = masks if isinstance(masks, torch.Tensor) else random_mask(masks, head_dim)
    num_pruned, num_kv_heads, head_dim = masks.shape
    kinds = config.get("layer_types", ["full_attention"] * num_pruned)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": num_kv_heads * groups * 8,
        "intermediate_size": 40,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": num_kv_heads * groups,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        # Large weights make attention sharp, so that a wrong logit shows.
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "Mistral":
        sizes["sliding_window"] = None
    if family in ("Qwen2", "Phi3", "SmolLM3", "Granite", "Olmo2", "Olmo3"):  # whose config has no head_dim
        sizes["hidden_size"] = num_kv_heads * groups * head_dim
    sizes.update(config)
    block = {
        "format_version": 1,
        "widths": masks.sum(-1).tolist(),
        "channel_masks": [np.packbits(mask.numpy(), axis=-1).tobytes().hex() for mask in masks],
        "head_permutation": [list(range(num_kv_heads))] * num_pruned,
        "sink_size": sink,
        "recent_size": recent,
        "flush_size": flush,
        "prune": prune,
    }
    if "layer_types" in config:
        block["layers"] = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    torch.manual_seed(seed)
    dense_class = getattr(transformers, f"{family}ForCausalLM")
    dense = dense_class(dense_class.config_class(**sizes)).eval()
    leank_config = configuration_leank.config_class_of(dense_class.config_class)(**sizes, leank=block)
    leank = getattr(modeling_leank, f"LeanK{family}ForCausalLM")(leank_config).eval()
    leank.load_state_dict(dense.state_dict())
    if hasattr(leank_config, "num_experts_per_tok"):  # torch has no fused product of experts in float64
        for model in (dense, leank):
            model.set_experts_implementation("eager")
    return ModelPair(leank, dense, masks)


@pytest.fixture
def model_pair():
    return build_pair


def coded_pair(codec, widths=WIDTHS, *family, head_dim=16, **config):
    """A pair by what its cache codes, `coded_pair("fp8 static centred")`, keys of channels of many sizes."""
    kv_dtype, _, constants = codec.partition(" ")
    if kv_dtype == "int4" and not family:
        widths, head_dim = INT4_WIDTHS, 80
    pair = build_pair(random_mask(widths, head_dim), *family, **config)
    if "values" in constants:
        kept = [
            [bool(width) * (layer + head) % 5 for head, width in enumerate(row)]
            for layer, row in enumerate(widths)
        ]
        block = {"value_widths": [[head_dim // 4 * quarters for quarters in row] for row in kept]}
        pair.leank.config.leank = {**pair.leank.config.leank, **block}
    if kv_dtype != "auto" or "centred" in constants:
        put_constants(pair, constants, is_scaled=not family)
    if "rotated" in constants:
        rotate_values(pair)
    return pair


def put_constants(pair, constants, *, is_scaled):
    """Have the cache code by constants of the model, of keys and values that are scaled by channel, or not.

    In double where numbers are rounded: those that nearly agree would be rounded apart now and then.
    """
    pair.leank.double()
    generator, head_dim = torch.Generator().manual_seed(1), pair.masks.shape[-1]
    factors = 2.0 ** torch.randint(-3, 3, (3 * head_dim, 1), generator=generator)
    for model in (pair.leank, pair.dense) if is_scaled else ():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.data.mul_(factors)
            layer.self_attn.v_proj.weight.data.mul_(factors.flip(0))
    block = pair.leank.config.leank
    if "centred" in constants:
        pair.leank.key_means = [*(torch.randn(pair.masks[:, None].shape, generator=generator) * 4)]
        block = {**block, "key_mean": True}
    if "static" in constants:
        block = {**block, "kv_dtype": "fp8", "kv_scales": {"num_tokens": 1}}
        for layer in pair.leank.model.layers:
            for name in SCALE_NAMES:
                scale = 2.0 ** torch.randint(-9, 1, (3, head_dim), generator=generator)
                layer.self_attn.register_buffer(name, scale)
    pair.leank.config.leank = block


def rotate_values(pair):
    """Have the cache rotate V into a basis, which is folded into the dense model that it is held to."""
    generator, head_dim = torch.Generator().manual_seed(2), pair.masks.shape[-1]
    directions = torch.randn(*pair.masks.shape, head_dim, dtype=torch.float64, generator=generator)
    bases = torch.linalg.qr(directions).Q.to(pair.leank.dtype)
    pair.leank.value_bases = list(bases)
    pair.leank.config.leank = {**pair.leank.config.leank, "value_basis": True}
    for layer, basis in zip(pair.dense.to(bases.dtype).model.layers, bases, strict=True):
        values, output = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        values.data = (basis.mT @ values.data.unflatten(0, (len(basis), head_dim))).flatten(0, 1)
        columns = output.data.unflatten(1, (len(basis), -1, head_dim))
        output.data = torch.einsum("ohgd,hde->ohge", columns, basis).flatten(1)


# Whose decode steps are fused.
FUSED = ["Llama", "Mistral", "Qwen2", "Qwen3", "SeedOss", "SmolLM3", "Phi3"]


def fused_model(masks, family="Llama", **config):
    """A model of one of them, whose norms and biases are not 1 or 0 as in a new model."""
    model = build_pair(masks, family, **config).leank
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 0.5)
    return model


@pytest.fixture
def model(model_pair):
    """Of two layers, whose heads keep as many channels as `WIDTHS` says."""
    return model_pair(WIDTHS).leank


@pytest.fixture
def graphs(monkeypatch):
    """Capture on the CPU; the returned list holds exceptions that the next captures end with."""
    failures: list[BaseException] = []
    monkeypatch.setattr(RecordedGraph, "failures", failures, raising=False)
    for module in (graph_leank, model_state_leank):
        monkeypatch.setattr(module, "StepGraph", RecordedGraph)
    monkeypatch.setattr(
        layer_leank, "find_kernels", lambda device, dtype, **shape: PlainKernels(**shape), raising=True
    )
    return failures
