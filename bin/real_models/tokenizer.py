"""The tokenizer that a GGUF's metadata describes: a vocabulary, merges, and a name for how text is split.

It is built here: transformers' own reader of GGUF passes over what `smollm` stands for, and over the
normalization of `qwen2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

# Kinds of tokens in `tokenizer.ggml.token_type`. Unused ones fill the vocabulary up to the embedding's rows.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


class Form(NamedTuple):
    """What a name in `tokenizer.ggml.pre` stands for."""

    tokenizer_class: type[PreTrainedTokenizerFast]
    normalizer: Any
    pre_tokenizer: Any


_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
FORMS: Mapping[str, Form] = {
    # Every digit by itself, and then as GPT-2.
    "smollm": Form(
        PreTrainedTokenizerFast,
        None,
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    # As transformers' Qwen2Tokenizer.
    "qwen2": Form(
        Qwen2Tokenizer,
        normalizers.NFC(),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2_PIECES), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ),
}


def build_tokenizer(metadata: Mapping[str, Any], max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF by its metadata; a token that is unused is none of its tokens."""
    form = FORMS[metadata["tokenizer.ggml.pre"]]
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    used = [(index, token) for index, token in enumerate(tokens) if kinds[index] != _UNUSED]
    pairs = (pair.partition(" ") for pair in metadata["tokenizer.ggml.merges"])
    vocabulary = {token: index for index, token in used}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(left, right) for left, _, right in pairs]))
    if form.normalizer is not None:
        tokenizer.normalizer = form.normalizer
    tokenizer.pre_tokenizer = form.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kinds[index] == _CONTROL)
            for index, token in used
            if kinds[index] in (_CONTROL, _USER_DEFINED)
        ]
    )
    names: dict[str, str | None] = {"unk_token": None}
    for ours, theirs in _SPECIAL.items():
        if (key := f"tokenizer.ggml.{theirs}_token_id") in metadata:
            names[f"{ours}_token"] = tokens[metadata[key]]
    return form.tokenizer_class(
        tokenizer_object=tokenizer,
        **names,
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=max_length,
    )
