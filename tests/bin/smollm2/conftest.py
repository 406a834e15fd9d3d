"""A tiny GGUF of the form of SmolLM2's, written by the `gguf` library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "he l", "Ġ Ġ", "1 2")  # the last one is never applied: digits are split before
TOKENS = (*CONTROL, *sorted(ByteLevel.alphabet()), "he", "hel", "ĠĠ", "12")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rms_norm_eps=2**-16,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    dtype="bfloat16",
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


@pytest.fixture
def model() -> LlamaForCausalLM:
    """What the file holds; its weights are multiples of a power of two, which Q8_0 keeps as they are."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for parameter in model.parameters():
        values = torch.randint(-127, 128, parameter.shape)
        values[..., ::32] = 127  # the largest of a block of 32, so its scale is the power of two
        parameter.data = values.to(parameter.dtype) / 2**9
    return model


def metadata() -> dict[str, Any]:
    """The keys of the file, as the library's writer takes them."""
    return {
        "llama.vocab_size": CONFIG.vocab_size,
        "llama.embedding_length": CONFIG.hidden_size,
        "llama.feed_forward_length": CONFIG.intermediate_size,
        "llama.block_count": CONFIG.num_hidden_layers,
        "llama.attention.head_count": CONFIG.num_attention_heads,
        "llama.attention.head_count_kv": CONFIG.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": CONFIG.rms_norm_eps,
        "llama.rope.dimension_count": CONFIG.head_dim,
        "llama.rope.freq_base": CONFIG.rope_parameters["rope_theta"],
        "llama.context_length": CONFIG.max_position_embeddings,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The weights by their names in the file, the rows of a query or key head in its order."""
    found = {}
    for name, weight in model.named_parameters():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        weight = weight.detach()
        if "attn_q" in name or "attn_k" in name:
            weight = (
                weight.view(-1, 2, CONFIG.head_dim // 2, CONFIG.hidden_size).transpose(1, 2).flatten(0, 2)
            )
        found[name] = weight
    return found


@pytest.fixture
def write_gguf(tmp_path: Path, model: LlamaForCausalLM) -> Callable[..., Path]:
    """Writes the file: `write_gguf(keys={...}, weights={...})` changes some of it; None leaves it out."""

    def write(
        keys: dict[str, Any] | None = None,
        weights: dict[str, Any] | None = None,
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = GGUFWriter(path, architecture)
        for key, value in (metadata() | (keys or {})).items():
            add = {bool: writer.add_bool, str: writer.add_string, list: writer.add_array}
            add |= {int: writer.add_uint32, float: writer.add_float32}
            if value is not None:
                add[type(value)](key, value)
        for name, weight in (tensors(model) | (weights or {})).items():
            if weight is not None and weight.ndim == 1:
                writer.add_tensor(name, weight.numpy())
            elif weight is not None:
                kind = GGMLQuantizationType.Q8_0
                writer.add_tensor(name, quantize(weight.numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
