"""Tiny GGUFs of the forms of SmolLM2's and Qwen2.5-Coder's, written by the `gguf` library."""

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "he l", "Ġ Ġ", "1 2")  # the last one is never applied: digits are split before
TOKENS = (*CONTROL, *sorted(ByteLevel.alphabet()), "he", "hel", "ĠĠ", "12")
KINDS = (*(3 for _ in CONTROL), *(1 for _ in TOKENS[len(CONTROL) :]))
# Beyond what SmolLM2's has: a user-defined token, which is not special, and one that fills the embedding up.
MORE_TOKENS, MORE_KINDS = ("<tool_call>", "[PAD0]"), (4, 5)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2**-16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LLAMA = {"head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, **SHAPE}
QWEN2 = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, **SHAPE}
CONFIGS = {
    "llama": LlamaConfig(vocab_size=len(TOKENS), **LLAMA),
    "qwen2": Qwen2Config(vocab_size=len(TOKENS + MORE_TOKENS), **QWEN2),
}


def make_model(architecture):
    """What a file holds; its weights are multiples of a power of two, which Q8_0 keeps as they are."""
    torch.manual_seed(0)
    stock = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}
    model = stock[architecture](CONFIGS[architecture])
    for parameter in model.parameters():
        values = torch.randint(-127, 128, parameter.shape)
        values[..., ::32] = 127  # the largest of a block of 32, so its scale is the power of two
        parameter.data = values.to(parameter.dtype) / 2**9
    return model


def metadata(architecture):
    """The keys of a file, as the library's writer takes them."""
    config = CONFIGS[architecture]
    shape = {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "context_length": config.max_position_embeddings,
    }
    tokenizer = {
        "ggml.model": "gpt2",
        "ggml.add_bos_token": False,
        "ggml.tokens": list(TOKENS),
        "ggml.token_type": list(KINDS),
        "ggml.merges": list(MERGES),
        "ggml.bos_token_id": config.bos_token_id,
        "ggml.eos_token_id": config.eos_token_id,
        "ggml.padding_token_id": config.pad_token_id,
        "chat_template": TEMPLATE,
    }
    if architecture == "llama":
        shape |= {"vocab_size": config.vocab_size, "rope.dimension_count": config.head_dim}
        tokenizer |= {"ggml.pre": "smollm", "ggml.add_space_prefix": False, "ggml.unknown_token_id": 0}
    else:
        tokenizer |= {"ggml.pre": "qwen2", "ggml.tokens": [*TOKENS, *MORE_TOKENS]}
        tokenizer |= {"ggml.token_type": [*KINDS, *MORE_KINDS]}
    return {f"{architecture}.{key}": value for key, value in shape.items()} | {
        f"tokenizer.{key}": value for key, value in tokenizer.items()
    }


def tensors(architecture):
    """The weights by their names in the file, the rows of a query or key head in its order."""
    found = {}
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], SHAPE["num_hidden_layers"])
    for own_name, parameter in make_model(architecture).named_parameters():
        name, weight = names.get_name(own_name, (".weight", ".bias")), parameter.detach()
        if architecture == "llama" and ("attn_q" in name or "attn_k" in name):
            weight = weight.view(-1, 2, 8, 64).transpose(1, 2).flatten(0, 2)  # 16 channels a head
        found[name] = weight
    if architecture == "qwen2":
        found["output.weight"] = found["token_embd.weight"]
    return found


def write_gguf(path, architecture):
    """Write a file; as in Qwen2.5-Coder's, the embedding has fewer bits than the head, where there is one."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata(architecture).items():
        add = {bool: writer.add_bool, str: writer.add_string, list: writer.add_array}
        add |= {int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    kinds = {"token_embd.weight": GGMLQuantizationType.Q4_0} if architecture == "qwen2" else {}
    for name, weight in tensors(architecture).items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight.numpy())
        else:
            kind = kinds.get(name, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, quantize(weight.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
