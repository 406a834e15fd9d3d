"""What tiny random models of the families need beyond the sizes that all have in common."""

from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from leank_convert.families import ARCHITECTURES

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Two layers with full attention among others.
_MIXED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 7,
}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# By `model_type`. Multipliers and biases are such that leaving one out would show.
OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "mlp_only_layers": [1]},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1], "attention_bias": True, "sliding_window": 0},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True},
    "mixtral": {"num_local_experts": 4},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "seed_oss": {"attention_out_bias": True},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,  # the query's own scale changes within a test
            "llama_4_scaling_beta": 0.1,
        },
        "max_position_embeddings": 64,
    },
    "ernie4_5": {"use_bias": True},
    "hy_v3": {**_EXPERTS, "num_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": _MIXED,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_next": {**_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 20},
}
# Older releases of transformers cannot.
TRAINS_LINEAR = hasattr(transformers.Cache, "get_recurrent_state")
# One row each; a release of transformers may lack a family.
FAMILIES = [
    pytest.param(
        row,
        id=name,
        marks=pytest.mark.skipif(
            not hasattr(transformers, row.causal_lm_class), reason=f"transformers has no {row.stem}"
        ),
    )
    for name, row in ARCHITECTURES.items()
]


def some_families(*names):
    """Rows of `FAMILIES` by their names, where not every family adds something."""
    return [row for row in FAMILIES if row.id in names]


def batch():
    """Two rows for a tiny model, one with padding at its left."""
    ids = torch.randint(4, 64, (2, 23), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, :8], mask[1, :8] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def word_tokenizer():
    """Of four special tokens and sixty words, a token a word."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def random_mask(widths, head_dim=16, seed=0):
    """Draw a mask, bool [L, H_kv, D], that keeps so many channels per layer and head."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(widths), len(widths[0]), head_dim, dtype=torch.bool)
    for layer, row in enumerate(widths):
        for head, width in enumerate(row):
            mask[layer, head, torch.randperm(head_dim, generator=generator)[:width]] = True
    return mask


def three_layers(family):
    """Config of three layers with full attention, in a family of mixed layers with others behind."""
    if "layer_types" not in OPTIONS.get(family, {}):
        return {"num_hidden_layers": 3}
    return {"layer_types": ["full_attention", *ARCHITECTURES[family].other_layers] * 3}


def tiny_model(family, *, seed=1, std=0.25, **config):
    """A frozen model of random weights, its attention far from uniform; `std` is of weights but norms.

    `config` are keys of its config, and `dtype` and `attn_implementation`.
    """
    options = {key: config.pop(key) for key in ("dtype", "attn_implementation") if key in config}
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        **OPTIONS.get(family, {}),
        **config,
    }
    if "layer_types" in values:
        values["num_hidden_layers"] = len(values["layer_types"])
    torch.manual_seed(seed)
    built = getattr(transformers, ARCHITECTURES[family].config_class)(**values)
    model = AutoModelForCausalLM.from_config(built, **options)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=std)
    return model.eval().requires_grad_(False)


def weights_of(folder):
    """A written model's tensors by their names."""
    files = folder.glob("model*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def tiny_folder(folder, tokenizer, family="llama", *, shard_size="1GB", **changes):
    """Write a model of random weights, by changes of its config, and its tokenizer; the folder."""
    model = tiny_model(family, seed=0, std=0.3, vocab_size=len(tokenizer), **changes)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    return folder
