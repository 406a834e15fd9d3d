"""The tokenizer that a GGUF's metadata describes: a vocabulary, merges, and a name for how text is split.

It is built here: transformers' own reader of GGUF passes over what `smollm` stands for, and over the
normalization of `qwen2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from leank_convert.errors import LeanKError, cut, first_line

# Kinds of tokens in `tokenizer.ggml.token_type`. Unused ones fill the vocabulary up to the embedding's rows.
_KINDS = _NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


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


def build_tokenizer(
    gguf: Path,
    form: Form,
    tokens: list[str],
    kinds: list[int],
    merges: list[str],
    special: Mapping[str, int],
    **settings: Any,
) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF; a token that is unused is none of its tokens.

    Args:
        gguf: The file, for messages.
        form: How text is split.
        tokens: By id.
        kinds: Of each token.
        merges: In their order, as `left right`.
        special: Ids of special tokens by the tokenizer's names for them, such as `eos_token`.
        settings: Further ones of the tokenizer.

    Raises:
        LeanKError: If tokens and merges make no tokenizer.
    """
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise LeanKError(
            f"`{gguf}`: {cut(unknown[0])} in `tokenizer.ggml.token_type` is no kind of token that is known",
            hint="the files that bin/real_models/models.py names are those that are converted",
        )
    used = [(index, token) for index, token in enumerate(tokens) if kinds[index] != _UNUSED]
    try:
        vocabulary = {token: index for index, token in used}
        pairs = (pair.partition(" ") for pair in merges)
        tokenizer = Tokenizer(models.BPE(vocabulary, [(left, right) for left, _, right in pairs]))
    except Exception as error:  # the library knows no kinds of errors
        raise LeanKError(
            f"`{gguf}`: its tokens and merges make no tokenizer: {first_line(error)}",
            hint="download it again",
        ) from error
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
    names: dict[str, str | None] = {
        "unk_token": None,
        **{name: tokens[index] for name, index in special.items()},
    }
    return form.tokenizer_class(tokenizer_object=tokenizer, **names, **settings)
