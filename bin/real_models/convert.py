"""GGUF to Hugging Face: transformers reads config and weights; the tokenizer is built of the file's metadata.

The files are those of `models.py`, pinned by their digests: what they hold is known, and no other is read.
transformers' own reader of tokenizers passes over what `smollm` stands for, and over the normalization of
`qwen2`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from leank_convert.errors import LeanKError, first_line

# Kinds of tokens in `tokenizer.ggml.token_type`. Unused ones fill the vocabulary up to the embedding's rows.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


def convert(gguf: Path, folder: Path, model_id: str, also_ends: Iterable[str] = ()) -> None:
    """Write a GGUF's model in bfloat16 into an empty folder, with its tokenizer and chat template.

    The file says neither the model's hub id, for `_name_or_path`, nor which tokens end an answer beside the
    end-of-sequence token. LeanKError if the file cannot be read, or package `gguf` is missing.
    """
    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config.tie_word_embeddings = True
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        found = load_gguf_checkpoint(str(gguf), True, model, torch.bfloat16)  # type: ignore[no-untyped-call]
        weights = found["tensors"]
        # The tied embedding may be there twice: of the two the head has more bits.
        weights["model.embed_tokens.weight"] = weights.setdefault(
            "lm_head.weight", weights["model.embed_tokens.weight"]
        )
        model.load_state_dict(weights, assign=True)
        tokenizer: Any = _build_tokenizer(
            found["tokenizer"],
            chat_template=found["tokenizer_config"]["chat_template"],
            model_max_length=config.max_position_embeddings,
        )
    except Exception as error:  # whatever packages of other releases make of the file
        raise LeanKError(
            f"transformers and its package `gguf` cannot read `{gguf}`: {first_line(error)}",
            hint="run bin/setup, which installs releases that can",
        ) from error
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    generation = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if also_ends:
        generation["eos_token_id"] = [config.eos_token_id, *tokenizer.convert_tokens_to_ids(list(also_ends))]
    content = {"_name_or_path": model_id, **json.loads(model.config.to_json_string())}
    for file, written in (("config.json", content), ("generation_config.json", generation)):
        (folder / file).write_text(json.dumps(written, indent=2) + "\n")


def _build_tokenizer(described: Mapping[str, Any], **settings: Any) -> Any:
    """The tokenizer that a file describes; a token that is unused is none of its tokens."""
    tokens, kinds = described["tokens"], described["token_type"]
    vocabulary = {token: place for place, token in enumerate(tokens) if kinds[place] != _UNUSED}
    merges: Any = [tuple(pair.split(" ")) for pair in described["merges"]]
    tokenizer: Any
    names: dict[str, Any] = {"unk_token": None}
    for name in ("bos", "eos", "pad", "unk"):
        if (place := described.get(f"{name}_token_id")) is not None:
            names[f"{name}_token"] = tokens[place]
    if described["pre_tokenizer_type"] == "qwen2":
        tokenizer = Qwen2Tokenizer(vocabulary, merges, **names, **settings)
    else:  # `smollm`: every digit by itself, and then as GPT-2
        backend = Tokenizer(models.BPE(vocabulary, merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names, **settings)  # type: ignore[no-untyped-call]
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kinds[place] == _CONTROL)
            for token, place in vocabulary.items()
            if kinds[place] in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer
