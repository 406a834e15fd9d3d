"""GGUF to Hugging Face: config, tokenizer and weights of a small Llama, all from the file's own metadata.

Only what SmolLM2's file holds is read; anything else in a GGUF is refused, lest it be left out unseen. The
tokenizer is built here: transformers' own reader of GGUF passes over `tokenizer.ggml.pre`, by which SmolLM2
splits numbers into digits before anything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from leank_convert.errors import LeanKError, cut, first_line, shorten

try:
    from gguf import GGUFReader
    from gguf.quants import dequantize
except ImportError as error:
    raise LeanKError(
        f"package `gguf`, which reads the model's file, cannot be imported: {first_line(error)}",
        hint="run bin/setup, or pip install gguf",
    ) from error

# What this reader can make something of; with another value the model would be another one.
_ONLY = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.add_bos_token": False,
}
_CONFIG = {
    "vocab_size": "llama.vocab_size",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.rope.dimension_count",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL_TOKEN = 3  # in `tokenizer.ggml.token_type`
_HINT = "the GGUF of SmolLM2-135M-Instruct is the one that is converted"


def convert(gguf: Path, folder: Path, model_id: str) -> None:
    """Write a GGUF's model in bfloat16 into an empty folder, with its tokenizer and chat template.

    Args:
        gguf: The file.
        folder: Where config.json, model.safetensors and the rest go.
        model_id: The model's hub id, for `_name_or_path`; the file does not say it.

    Raises:
        LeanKError: If the file is damaged, of another architecture, or lacks something.
        OSError: If the folder cannot be written to.
    """
    try:
        reader = GGUFReader(gguf)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # numpy's, struct's, unicode's: whatever the damaged bytes lead to
        raise LeanKError(
            f"`{gguf}` is damaged or no GGUF: {first_line(error)}", hint="download it again"
        ) from error
    for key, only in _ONLY.items():
        if (value := _get(metadata, key, type(only), gguf)) != only:
            raise LeanKError(f"`{gguf}`: `{key}` is {cut(value)}, not {cut(only)}", hint=_HINT)
    config = _read_config(metadata, gguf)
    tokenizer = _read_tokenizer(metadata, config, gguf)
    shapes = _shapes(config)
    tensors = dict(_read_tensors(reader, config, shapes, gguf))
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise LeanKError(f"`{gguf}` has no tensor for `{missing[0]}`", hint=_HINT)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    content = {"_name_or_path": model_id, **json.loads(config.to_json_string())}
    generation = {name: content[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, written in (("config.json", content), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(written, indent=2) + "\n")


def _get(metadata: dict[str, Any], key: str, kind: type | tuple[type, ...], gguf: Path) -> Any:
    if key not in metadata:
        raise LeanKError(f"`{gguf}` has no `{key}`", hint=_HINT)
    if not isinstance(metadata[key], kind):
        raise LeanKError(f"`{gguf}`: `{key}` is {cut(metadata[key])}", hint=_HINT)
    return metadata[key]


def _read_config(metadata: dict[str, Any], gguf: Path) -> LlamaConfig:
    values = {name: _get(metadata, key, (int, float), gguf) for name, key in _CONFIG.items()}
    rope_theta = _get(metadata, "llama.rope.freq_base", float, gguf)
    if scaled := next((key for key in metadata if key.startswith("llama.rope.scaling.")), None):
        raise LeanKError(f"`{gguf}`: `{scaled}` is {cut(metadata[scaled])}", hint=_HINT)
    try:
        return LlamaConfig(
            **values,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            tie_word_embeddings=True,  # the file has no `output.weight`, which would be refused
            architectures=["LlamaForCausalLM"],
            dtype="bfloat16",
        )
    except Exception as error:  # of its own kinds, by transformers' release
        raise LeanKError(
            f"`{gguf}` describes no Llama model: {shorten(' '.join(str(error).split()), 300)}",
            hint="download it again",
        ) from error


def _read_tokenizer(metadata: dict[str, Any], config: LlamaConfig, gguf: Path) -> PreTrainedTokenizerFast:
    tokens, kinds, merges = (
        _get(metadata, f"tokenizer.ggml.{key}", list, gguf) for key in ("tokens", "token_type", "merges")
    )
    ids = {
        name: _get(metadata, f"tokenizer.ggml.{key}_token_id", int, gguf)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    template = _get(metadata, "tokenizer.chat_template", str, gguf)
    if not len(tokens) == len(kinds) == config.vocab_size or max(ids.values()) >= len(tokens):
        raise LeanKError(
            f"`{gguf}`: {len(tokens)} tokens, {len(kinds)} kinds of tokens and a vocabulary of "
            f"{config.vocab_size} do not fit together, or special tokens {cut(ids)} lie beyond them",
            hint="download it again",
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(pair.split(" ")) for pair in merges]))
    except Exception as error:  # the library knows no kinds of errors
        raise LeanKError(
            f"`{gguf}`: its tokens and merges make no tokenizer: {first_line(error)}",
            hint="download it again",
        ) from error
    # What `smollm` stands for: every digit by itself, and then as GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        chat_template=template,
        model_max_length=config.max_position_embeddings,
        **{f"{name}_token": tokens[index] for name, index in ids.items()},
    )


def _shapes(config: LlamaConfig) -> dict[str, torch.Size]:
    """The shape of every tensor that the stock class reads, by its name."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}  # tied ones once


def _read_tensors(
    reader: Any, config: LlamaConfig, shapes: Mapping[str, torch.Size], gguf: Path
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in bfloat16 by its name in transformers."""
    heads: dict[str, Any] = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for found in reader.tensors:
        *layer, kind, part = found.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        prefix = f"model.layers.{layer[1]}." if len(layer) == 2 else ""
        name = f"{prefix}{_TENSORS.get(kind)}.{part}"
        if name not in shapes:
            raise LeanKError(f"`{gguf}`: tensor `{shorten(found.name)}` is none of the model's", hint=_HINT)
        try:
            weight = torch.tensor(dequantize(found.data, found.tensor_type))
        except Exception as error:
            raise LeanKError(
                f"`{gguf}`: tensor `{found.name}` ({found.tensor_type.name}) cannot be dequantized: "
                f"{first_line(error)}",
                hint="download it again",
            ) from error
        if weight.shape != shapes[name]:
            raise LeanKError(
                f"`{gguf}`: tensor `{found.name}` is {list(weight.shape)}, the model needs "
                f"{list(shapes[name])}",
                hint=_HINT,
            )
        if kind in heads:  # rows of a head: i and i + D/2 side by side, where transformers has halves
            halves = weight.view(heads[kind], -1, 2, config.hidden_size).transpose(1, 2)
            weight = halves.reshape(weight.shape)
        yield name, weight.to(torch.bfloat16).contiguous()
