"""GGUF to Hugging Face: config, tokenizer and weights of a Llama or Qwen2, all from the file's own metadata.

The files are those of `models.py`, pinned by their digests: what they hold is known, and no other is read.
Weights are written one after the other, so that memory holds no more than copies of the largest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bin.real_models.tokenizer import build_tokenizer
from leank_convert.errors import LeanKError, first_line
from leank_convert.safetensors_file import encode_header

try:
    from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
    from gguf.quants import dequantize
except ImportError as error:
    raise LeanKError(
        f"package `gguf`, which reads the model's file, cannot be imported: {first_line(error)}",
        hint="run bin/setup, or pip install gguf",
    ) from error

# By what `general.architecture` may be, a name of transformers', too: whether rows i and i + D/2 of a query
# or key head lie side by side.
INTERLEAVED: Mapping[str, bool] = {"llama": True, "qwen2": False}
# Keys of the file behind the architecture's name; the last two are not in every file.
_CONFIG = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
    "head_dim": "rope.dimension_count",
}


def convert(gguf: Path, folder: Path, model_id: str, also_ends: Sequence[str] = ()) -> None:
    """Write a GGUF's model in bfloat16 into an empty folder, with its tokenizer and chat template.

    Args:
        gguf: The file.
        folder: Where config.json, model.safetensors and the rest go.
        model_id: The model's hub id, for `_name_or_path`; the file does not say it.
        also_ends: Tokens that end an answer beside the end-of-sequence token.

    Raises:
        LeanKError: If package `gguf` cannot read the file, or its tensors are not its model's.
        OSError: If the folder cannot be written to.
    """
    try:
        reader = GGUFReader(gguf)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # whatever another release of the package makes of the file
        raise LeanKError(
            f"package `gguf` cannot read `{gguf}`: {first_line(error)}", hint="run bin/setup"
        ) from error
    config = _read_config(metadata)
    tokenizer = build_tokenizer(metadata, config.max_position_embeddings)
    generation = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if also_ends:
        generation["eos_token_id"] = [config.eos_token_id, *map(tokenizer.get_vocab().__getitem__, also_ends)]
    heads: dict[str, int] = {}
    if INTERLEAVED[metadata["general.architecture"]]:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    _write_weights(folder / "model.safetensors", _find_tensors(reader, config), heads)
    tokenizer.save_pretrained(folder)
    content = {"_name_or_path": model_id, **json.loads(config.to_json_string())}
    for file, written in (("config.json", content), ("generation_config.json", generation)):
        (folder / file).write_text(json.dumps(written, indent=2) + "\n")


def _read_config(metadata: Mapping[str, Any]) -> PreTrainedConfig:
    name = metadata["general.architecture"]
    keys = {ours: f"{name}.{theirs}" for ours, theirs in _CONFIG.items()}
    values = {ours: metadata[key] for ours, key in keys.items() if key in metadata}
    values.setdefault("vocab_size", len(metadata["tokenizer.ggml.tokens"]))
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        values[f"{ours}_token_id"] = metadata[f"tokenizer.ggml.{theirs}_token_id"]
    config: PreTrainedConfig = AutoConfig.for_model(
        name,
        **values,
        rope_parameters={"rope_type": "default", "rope_theta": metadata[f"{name}.rope.freq_base"]},
        tie_word_embeddings=True,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]],
        dtype="bfloat16",
    )
    return config


def _find_tensors(reader: Any, config: PreTrainedConfig) -> dict[str, Any]:
    """The file's tensors by their names in transformers.

    Raises:
        LeanKError: If they are others than its model's.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    names = get_tensor_name_map(MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    theirs = {
        name: str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        for name, _ in model.named_parameters()
    }
    # The tied embedding may be there twice: of the two the head has more bits.
    if (head := "output.weight") in tensors:
        tensors[theirs["model.embed_tokens.weight"]] = tensors.pop(head)
    if other := sorted(tensors.keys() ^ theirs.values()):
        raise LeanKError(f"of the GGUF and `{type(model).__name__}` only one has tensor `{other[0]}`")
    return {name: tensors[known] for name, known in theirs.items()}


def _write_weights(path: Path, found: Mapping[str, Any], heads: Mapping[str, int]) -> None:
    """Write tensors of the file in bfloat16, in the order of the safetensors package.

    Args:
        path: Where to.
        found: The tensors by their names in transformers.
        heads: Of each projection whose rows are interleaved, the number of its heads.
    """
    shapes = {name: tuple(map(int, reversed(found[name].shape))) for name in sorted(found)}
    with path.open("wb") as file:
        entries = ((name, "BF16", shape, 2 * math.prod(shape)) for name, shape in shapes.items())
        file.write(encode_header(entries, {"format": "pt"}))
        for name in shapes:
            weight: Tensor = torch.tensor(dequantize(found[name].data, found[name].tensor_type))
            if count := heads.get(name.split(".")[-2]):
                weight = weight.view(count, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
            file.write(weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
