"""Haystack: running text of a file or a dataset that the recipe names, or of the built-in grammar.

A file or a dataset is read once, up to `_MAX_BYTES`, and cut into sentences; a sample takes consecutive ones
from a random place on and goes on at the beginning where the text ends.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from leank_convert.data.grammar import draw_sentence
from leank_convert.data.records import read_dataset, read_records, read_text, warn_cut
from leank_convert.errors import LeanKError
from leank_convert.files import user_path
from leank_convert.recipe import HAYSTACK_SUFFIXES, HaystackSection

# 32 MiB are the text of some eighty contexts of 96K tokens, and are read in two seconds.
_MAX_BYTES = 2**25
# Samples are filled sentence by sentence, so what has no full stops is cut at white space.
_MAX_SENTENCE = 400
_PIECE = re.compile(rf"\S.{{0,{_MAX_SENTENCE - 1}}}(?=\s|$)|\S.{{0,{_MAX_SENTENCE - 1}}}")
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(
    r"""(?<=[.!?\u2026])\s+|(?<=[.!?\u2026]["'\u201d\u2019\u00bb)\]])\s+|(?<=[\u3002\uff01\uff1f])\s*"""
)


class Haystack:
    """Running text without end: the sentences of a text in their order, or those that a grammar draws."""

    def __init__(self, sentences: Sequence[str] | None = None, text: str = "") -> None:
        self._sentences = sentences
        self.text = text  # as it is, line breaks and all; empty where there is none
        self.digest = "grammar"  # of all text that can come out of it
        if sentences is not None:
            self.digest = hashlib.sha256("\n".join(sentences).encode()).hexdigest()

    def read(self, rng: random.Random) -> Iterator[str]:
        """Sentences for ever; those of a text from a random place on."""
        if self._sentences is None:
            while True:
                yield draw_sentence(rng)
        place = rng.randrange(len(self._sentences))
        while True:
            yield self._sentences[place % len(self._sentences)]
            place += 1


def open_haystack(section: HaystackSection, control: re.Pattern[str]) -> Haystack:
    """Read what the recipe names, less sentences with `control` tokens; LeanKError if there is no text."""
    if section.source is None:
        return Haystack()
    texts = list(_read_texts(section, section.source))
    sentences = [sentence for text in texts for sentence in _split(text) if not control.search(sentence)]
    if not sentences:
        raise LeanKError(
            f"haystack `{section.source}` holds no text",
            hint="see `data.haystack.source` and `data.haystack.column`",
        )
    return Haystack(sentences, control.sub("", "\n\n".join(texts)))


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """What a tokenizer takes for control tokens wherever it stands."""
    found = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return re.compile("|".join(map(re.escape, found)) or r"(?!)")


def _read_texts(section: HaystackSection, source: str) -> Iterator[str]:
    """The texts of a file's or a dataset's records, up to `_MAX_BYTES`."""
    path = user_path(source)
    if path.suffix not in HAYSTACK_SUFFIXES and not path.is_file():
        records = read_dataset(source, section.config, section.split, "haystack")
    else:
        _check_file(path, section)
        if path.suffix == ".txt":
            yield read_text(path, "haystack", _MAX_BYTES)
            return
        records = read_records(path, "haystack")
    num_bytes = 0
    with closing(records):
        for place, record in records:
            text = _text_of(record, section.column, place)
            yield text
            num_bytes += len(text.encode())
            if num_bytes > _MAX_BYTES:
                warn_cut(f"haystack `{source}`", _MAX_BYTES)
                return


def _check_file(path: Path, section: HaystackSection) -> None:
    """Refuse a file of another kind, and what a file has not, which would be ignored otherwise."""
    given = section.model_dump(include={"config", "split"}, exclude_defaults=True)
    if given:
        keys = " and ".join(f"`data.haystack.{key}`" for key in given)
        raise LeanKError(f"{keys} is for datasets, and haystack `{path}` is a file", hint="leave it out")
    if path.suffix not in HAYSTACK_SUFFIXES:
        raise LeanKError(
            f"haystack `{path}` has the suffix `{path.suffix}`",
            hint=f"`data.haystack.source` takes {', '.join(HAYSTACK_SUFFIXES)}, or the hub id of a dataset",
        )


def _text_of(record: dict[str, Any], column: str, place: str) -> str:
    """The text of a record; null, which only datasets of the hub have, is none."""
    if column not in record:
        keys = ", ".join(f"`{key}`" for key in record) or "none"
        raise LeanKError(f"{place} has no `{column}`; its keys: {keys}", hint="set `data.haystack.column`")
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise LeanKError(
            f"{place}: `{column}` is `{text!r:.80}`, a {type(text).__name__}, not text",
            hint="set `data.haystack.column`",
        )
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return (text or "").encode(errors="replace").decode()


def _split(text: str) -> Iterator[str]:
    for paragraph in _PARAGRAPH_END.split(text):
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if len(sentence) > _MAX_SENTENCE:
                yield from _PIECE.findall(sentence)
            elif sentence:
                yield sentence
