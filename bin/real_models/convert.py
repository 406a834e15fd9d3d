"""GGUF to Hugging Face: config, tokenizer and weights of a Llama or Qwen2, all from the file's own metadata.

Only what the files of `models.py` hold is read; anything else in a GGUF is refused, lest it be left out
unseen. Weights are written one after the other, so that memory holds no more than copies of the largest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from bin.real_models.tokenizer import FORMS, build_tokenizer
from leank_convert.errors import LeanKError, cut, first_line, shorten
from leank_convert.safetensors_file import encode_header

try:
    from gguf import GGUFReader
    from gguf.quants import dequantize
except ImportError as error:
    raise LeanKError(
        f"package `gguf`, which reads the model's file, cannot be imported: {first_line(error)}",
        hint="run bin/setup, or pip install gguf",
    ) from error


class Architecture(NamedTuple):
    """What a name in `general.architecture` stands for.

    Attributes:
        config: Its config's class.
        model: Its stock class.
        interleaved: Whether rows i and i + D/2 of a query or key head lie side by side.
    """

    config: type[LlamaConfig] | type[Qwen2Config]
    model: type[PreTrainedModel]
    interleaved: bool


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(LlamaConfig, LlamaForCausalLM, interleaved=True),
    "qwen2": Architecture(Qwen2Config, Qwen2ForCausalLM, interleaved=False),
}
# Keys of the file behind the architecture's name.
_CONFIG = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {"vocab_size": "vocab_size", "head_dim": "rope.dimension_count"}
_ROPE_THETA = "rope.freq_base"
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_FALSE = ("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_bos_token")  # as where they are missing
_TOKENIZER_KEYS = {
    "tokenizer.chat_template",
    *_FALSE,
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges")),
    *(f"tokenizer.ggml.{name}_token_id" for name in _SPECIAL.values()),
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<kind>\w+)\.(?P<part>weight|bias)")
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
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
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# How far rows of the embedding and of the head are apart, relative to their norm: 0.07 where one matrix was
# quantized to 4 and to 6 bits, 1.4 where they have nothing to do with each other.
_MAX_TIED_ERROR = 0.25
_TIED_ROWS = 1000
_HINT = "the files that bin/real_models/models.py names are those that are converted"


def convert(gguf: Path, folder: Path, model_id: str, also_ends: Sequence[str] = ()) -> None:
    """Write a GGUF's model in bfloat16 into an empty folder, with its tokenizer and chat template.

    Args:
        gguf: The file.
        folder: Where config.json, model.safetensors and the rest go.
        model_id: The model's hub id, for `_name_or_path`; the file does not say it.
        also_ends: Tokens that end an answer beside the end-of-sequence token.

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
    name = _choose(metadata, "general.architecture", ARCHITECTURES, gguf)
    architecture = ARCHITECTURES[name]
    _refuse_unknown(metadata, name, gguf)
    config = _read_config(metadata, name, gguf)
    tokenizer = _read_tokenizer(metadata, config, gguf)
    generation = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if also_ends:
        generation["eos_token_id"] = [config.eos_token_id, *_find_tokens(also_ends, tokenizer, gguf)]
    shapes = _shapes(architecture, config)
    found = _find_tensors(reader, shapes, gguf)
    heads: dict[str, int] = {}
    if architecture.interleaved:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    _write_weights(folder / "model.safetensors", found, heads, gguf)
    tokenizer.save_pretrained(folder)
    content = {"_name_or_path": model_id, **json.loads(config.to_json_string())}
    for file, written in (("config.json", content), ("generation_config.json", generation)):
        (folder / file).write_text(json.dumps(written, indent=2) + "\n")


def _get(metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...], gguf: Path) -> Any:
    if key not in metadata:
        raise LeanKError(f"`{gguf}` has no `{key}`", hint=_HINT)
    if not isinstance(metadata[key], kind):
        raise LeanKError(f"`{gguf}`: `{key}` is {cut(metadata[key])}", hint=_HINT)
    return metadata[key]


def _choose(metadata: Mapping[str, Any], key: str, known: Collection[str], gguf: Path) -> str:
    value: str = _get(metadata, key, str, gguf)
    if value not in known:
        raise LeanKError(f"`{gguf}`: `{key}` is {cut(value)}, not {' or '.join(map(cut, known))}", hint=_HINT)
    return value


def _refuse_unknown(metadata: Mapping[str, Any], architecture: str, gguf: Path) -> None:
    for key in _FALSE:
        if metadata.get(key, False):
            raise LeanKError(f"`{gguf}`: `{key}` is {cut(metadata[key])}, not False", hint=_HINT)
    names = (*_CONFIG.values(), *_OPTIONAL.values(), _ROPE_THETA)
    known = {f"{architecture}.{name}" for name in names} | _TOKENIZER_KEYS
    for key, value in metadata.items():
        if key.startswith((f"{architecture}.", "tokenizer.")) and key not in known:
            raise LeanKError(
                f"`{gguf}`: `{shorten(key)}` is {cut(value)}, and what that means is not known here",
                hint=_HINT,
            )


def _read_config(metadata: Mapping[str, Any], name: str, gguf: Path) -> PreTrainedConfig:
    keys = {ours: f"{name}.{theirs}" for ours, theirs in _CONFIG.items()}
    keys |= {ours: key for ours, end in _OPTIONAL.items() if (key := f"{name}.{end}") in metadata}
    keys |= {
        f"{kind}_token_id": f"tokenizer.ggml.{_SPECIAL[kind]}_token_id" for kind in ("bos", "eos", "pad")
    }
    values = {ours: _get(metadata, key, (int, float), gguf) for ours, key in keys.items()}
    values.setdefault("vocab_size", len(_get(metadata, "tokenizer.ggml.tokens", list, gguf)))
    rope_theta = _get(metadata, f"{name}.{_ROPE_THETA}", float, gguf)
    architecture = ARCHITECTURES[name]
    try:
        return architecture.config(
            **values,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            tie_word_embeddings=True,  # an `output.weight` of its own is refused
            architectures=[architecture.model.__name__],
            dtype="bfloat16",
        )
    except Exception as error:  # of its own kinds, by transformers' release
        raise LeanKError(
            f"`{gguf}` describes no {architecture.model.__name__}: "
            f"{shorten(' '.join(str(error).split()), 300)}",
            hint="download it again",
        ) from error


def _read_tokenizer(
    metadata: Mapping[str, Any], config: PreTrainedConfig, gguf: Path
) -> PreTrainedTokenizerFast:
    _choose(metadata, "tokenizer.ggml.model", ("gpt2",), gguf)
    form = FORMS[_choose(metadata, "tokenizer.ggml.pre", FORMS, gguf)]
    tokens, kinds, merges = (
        _get(metadata, f"tokenizer.ggml.{key}", list, gguf) for key in ("tokens", "token_type", "merges")
    )
    template = _get(metadata, "tokenizer.chat_template", str, gguf)
    ids = {
        f"{ours}_token": _get(metadata, key, int, gguf)
        for ours, theirs in _SPECIAL.items()
        if (key := f"tokenizer.ggml.{theirs}_token_id") in metadata
    }
    fitting = len(tokens) == len(kinds) == config.vocab_size
    if not fitting or not all(0 <= index < len(tokens) for index in ids.values()):
        raise LeanKError(
            f"`{gguf}`: {len(tokens)} tokens, {len(kinds)} kinds of tokens and a vocabulary of "
            f"{config.vocab_size} do not fit together, or special tokens {cut(ids)} lie beyond them",
            hint="download it again",
        )
    return build_tokenizer(
        gguf,
        form,
        tokens,
        kinds,
        merges,
        ids,
        chat_template=template,
        model_max_length=config.max_position_embeddings,
    )


def _find_tokens(names: Sequence[str], tokenizer: PreTrainedTokenizerFast, gguf: Path) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    if missing := [name for name in names if name not in vocabulary]:
        raise LeanKError(f"`{gguf}` has no token `{missing[0]}`", hint=_HINT)
    return [vocabulary[name] for name in names]


def _shapes(architecture: Architecture, config: PreTrainedConfig) -> dict[str, torch.Size]:
    """The shape of every tensor that the stock class reads, by its name."""
    with torch.device("meta"):
        model = architecture.model(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}  # tied ones once


def _find_tensors(reader: Any, shapes: Mapping[str, torch.Size], gguf: Path) -> dict[str, Any]:
    """The file's tensors by their names in transformers: all that the model needs, none that it does not.

    Where the file holds the tied embedding twice, it is the one that the head reads, which has more bits.
    """
    expected = {**shapes, _HEAD: shapes[_EMBEDDING]}
    found = {}
    for tensor in reader.tensors:
        parts = _TENSOR.fullmatch(tensor.name)
        kind = _TENSORS.get(parts["kind"]) if parts else None
        name = ""
        if parts and kind:
            name = f"model.layers.{parts['layer']}." if parts["layer"] else ""
            name += f"{kind}.{parts['part']}"
        if name not in expected:
            raise LeanKError(f"`{gguf}`: tensor `{shorten(tensor.name)}` is none of the model's", hint=_HINT)
        if (shape := _shape_of(tensor)) != tuple(expected[name]):
            raise LeanKError(
                f"`{gguf}`: tensor `{tensor.name}` is {list(shape)}, the model needs {list(expected[name])}",
                hint=_HINT,
            )
        found[name] = tensor
    if missing := sorted(shapes.keys() - found.keys()):
        raise LeanKError(f"`{gguf}` has no tensor for `{missing[0]}`", hint=_HINT)
    if head := found.pop(_HEAD, None):
        _check_tied(head, found[_EMBEDDING], gguf)
        found[_EMBEDDING] = head
    return found


def _shape_of(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _check_tied(head: Any, embedding: Any, gguf: Path) -> None:
    """Refuse a head that is another matrix than the embedding, by some of their rows."""
    step = max(1, len(head.data) // _TIED_ROWS)
    ours, theirs = (_dequantize(tensor, gguf, step) for tensor in (head, embedding))
    if not (ours - theirs).norm() <= _MAX_TIED_ERROR * theirs.norm():
        raise LeanKError(
            f"`{gguf}`: tensor `{head.name}` is another matrix than `{embedding.name}`; "
            "only a head that is the embedding is read",
            hint=_HINT,
        )


def _dequantize(tensor: Any, gguf: Path, step: int = 1) -> Tensor:
    """A tensor of the file, or every step-th of its rows, in float32."""
    try:
        values = dequantize(np.ascontiguousarray(tensor.data[::step]), tensor.tensor_type)
        return torch.tensor(values)
    except Exception as error:
        raise LeanKError(
            f"`{gguf}`: tensor `{tensor.name}` ({tensor.tensor_type.name}) cannot be dequantized: "
            f"{first_line(error)}",
            hint="download it again",
        ) from error


def _write_weights(path: Path, found: Mapping[str, Any], heads: Mapping[str, int], gguf: Path) -> None:
    """Write tensors of the file in bfloat16, in the order of the safetensors package.

    Args:
        path: Where to.
        found: The tensors by their names in transformers.
        heads: Of each projection whose rows are interleaved, the number of its heads.
        gguf: The file, for messages.
    """
    names = sorted(found)
    shapes = {name: _shape_of(tensor) for name, tensor in found.items()}
    with path.open("wb") as file:
        entries = ((name, "BF16", shapes[name], 2 * math.prod(shapes[name])) for name in names)
        file.write(encode_header(entries, {"format": "pt"}))
        for name in names:
            weight = _dequantize(found[name], gguf)
            if count := heads.get(name.split(".")[-2]):
                weight = weight.view(count, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
            file.write(weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
