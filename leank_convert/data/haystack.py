"""Where running text comes from: a file or a dataset that the recipe names, or the built-in grammar.

A file or a dataset is read once, up to `_MAX_BYTES`, and cut into sentences; a sample takes consecutive
ones from a random place on and goes on at the beginning where the text ends.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import random
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from transformers import PreTrainedTokenizerBase

from leank_convert.data.grammar import draw_sentence
from leank_convert.errors import LeanKError
from leank_convert.recipe import HaystackSection

_logger = logging.getLogger("leank_convert")

# 32 MiB are the text of some eighty contexts of 96K tokens, and are read in two seconds.
_MAX_BYTES = 2**25
# Samples are filled sentence by sentence, so what has no full stops is cut at white space.
_MAX_SENTENCE = 400
_PIECE = re.compile(rf"\S.{{0,{_MAX_SENTENCE - 1}}}(?=\s|$)|\S.{{0,{_MAX_SENTENCE - 1}}}")
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(
    r"""(?<=[.!?\u2026])\s+|(?<=[.!?\u2026]["'\u201d\u2019\u00bb)\]])\s+|(?<=[\u3002\uff01\uff1f])\s*"""
)
_SUFFIXES = (".txt", ".json", ".jsonl")


class Haystack(Protocol):
    """Running text without end."""

    @property
    def digest(self) -> str:
        """Of all text that can come out of it."""

    def read(self, rng: random.Random) -> Iterator[str]:
        """Sentences, for ever."""


class GrammarHaystack:
    """Sentences of the built-in grammar, each drawn."""

    digest = "grammar"

    def read(self, rng: random.Random) -> Iterator[str]:
        """Sentences, for ever."""
        while True:
            yield draw_sentence(rng)


class TextHaystack:
    """Sentences of a text, in its order.

    Args:
        sentences: One or more.
    """

    def __init__(self, sentences: Sequence[str]) -> None:
        self._sentences = sentences
        self.digest = hashlib.sha256("\n".join(sentences).encode()).hexdigest()

    def read(self, rng: random.Random) -> Iterator[str]:
        """Sentences from a random place on, for ever."""
        place = rng.randrange(len(self._sentences))
        while True:
            yield self._sentences[place % len(self._sentences)]
            place += 1


def open_haystack(section: HaystackSection, control_tokens: Collection[str]) -> Haystack:
    """Read what the recipe names.

    Args:
        section: The recipe's section.
        control_tokens: What a tokenizer takes for control tokens wherever it stands: no sentence with one
            of them is used.

    Raises:
        LeanKError: If the file or dataset is missing, cannot be read, or holds no text.
    """
    if section.source is None:
        return GrammarHaystack()
    path = _expand(section.source)
    if path.suffix in _SUFFIXES or path.is_file():
        _refuse_dataset_keys(path, section)
        texts = _read_file(path, section.column)
    else:
        texts = _read_dataset(section.source, section)
    sentences = [sentence for text in texts for sentence in _split(text)]
    if control_tokens:
        control = re.compile("|".join(map(re.escape, control_tokens)))
        sentences = [sentence for sentence in sentences if not control.search(sentence)]
    if not sentences:
        raise LeanKError(
            f"haystack `{section.source}` holds no text",
            hint="see `data.haystack.source` and `data.haystack.column`",
        )
    return TextHaystack(sentences)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What a tokenizer takes for control tokens wherever it stands."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def _split(text: str) -> Iterator[str]:
    """Sentences of a text, without line breaks."""
    for paragraph in _PARAGRAPH_END.split(text):
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            if len(sentence) > _MAX_SENTENCE:
                yield from _PIECE.findall(sentence)
            elif sentence:
                yield sentence


def _expand(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:
        raise LeanKError(
            f"haystack `{source}` begins with `~` and nobody's home", hint="write the folder out"
        ) from None


def _refuse_dataset_keys(path: Path, section: HaystackSection) -> None:
    """Refuse what a file has not, which would be ignored otherwise."""
    given = section.model_dump(include={"config", "split"}, exclude_defaults=True)
    if given:
        keys = " and ".join(f"`data.haystack.{key}`" for key in given)
        raise LeanKError(f"{keys} is for datasets, and haystack `{path}` is a file", hint="leave it out")


def _read_file(path: Path, column: str) -> list[str]:
    if path.suffix not in _SUFFIXES:
        raise LeanKError(
            f"haystack `{path}` has the suffix `{path.suffix}`",
            hint=f"`data.haystack.source` takes {', '.join(_SUFFIXES)}, or the hub id of a dataset",
        )
    try:
        with path.open("rb") as file:
            if path.suffix == ".jsonl":
                return _read_jsonl(file, path, column)
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise LeanKError(
            f"haystack `{path}` does not exist",
            hint=f"`data.haystack.source` is looked up from `{Path.cwd()}`",
        ) from None
    except OSError as error:
        raise LeanKError(f"haystack `{path}` cannot be read: {error.strerror}") from None
    whole = len(content) <= _MAX_BYTES
    if path.suffix == ".json":
        if not whole:
            raise LeanKError(
                f"haystack `{path}` has more than {_size(_MAX_BYTES)}",
                hint="a JSON file has to be read whole: make it `.jsonl`, a record a line",
            )
        return _read_json(_decode(content, str(path)), path, column)
    if not whole:
        _tell_cut(path)
    return [_decode(content[:_MAX_BYTES], str(path), whole=whole)]


def _read_jsonl(file: BinaryIO, path: Path, column: str) -> list[str]:
    texts: list[str] = []
    num_bytes = number = 0
    while line := file.readline(_MAX_BYTES + 1):
        number += 1
        num_bytes += len(line)
        place = f"{path}:{number}"
        if num_bytes > _MAX_BYTES:
            if not any(texts):
                raise LeanKError(
                    f"haystack `{place}`: the first record with text ends beyond {_size(_MAX_BYTES)}",
                    hint="cut it into smaller records, or make it a `.txt` file",
                )
            _tell_cut(path)
            break
        if not line.strip():
            continue
        try:
            record = json.loads(_decode(line, place))
        except json.JSONDecodeError as error:
            raise LeanKError(
                f"haystack `{place}` is not JSON: {error.msg} at column {error.colno}",
                hint="a `.jsonl` file holds one record a line; name it `.json` if it is one list",
            ) from None
        except (ValueError, RecursionError) as error:
            raise _unreadable(place, error) from None
        texts.append(_text_of(record, column, place))
    return texts


def _read_json(content: str, path: Path, column: str) -> list[str]:
    try:
        records = json.loads(content)
    except json.JSONDecodeError as error:
        raise LeanKError(
            f"haystack `{path}:{error.lineno}` is not JSON: {error.msg} at column {error.colno}",
            hint="name it `.jsonl` if it holds one record a line",
        ) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(records, list):
        raise LeanKError(f"haystack `{path}` holds a {type(records).__name__}, not a list of records")
    return [_text_of(record, column, f"{path}: record {index}") for index, record in enumerate(records)]


def _unreadable(place: object, error: Exception) -> LeanKError:
    """JSON that Python does not read: nested too deep, or with a number of too many digits."""
    return LeanKError(f"haystack `{place}` cannot be read: {error}")


def _text_of(record: Any, column: str, place: str) -> str:
    """The text of a record; null is none."""
    if not isinstance(record, dict):
        raise LeanKError(f"haystack `{place}` is a {type(record).__name__}, not a record with keys")
    if column not in record:
        keys = ", ".join(f"`{key}`" for key in record) or "none"
        raise LeanKError(
            f"haystack `{place}` has no `{column}`; its keys: {keys}", hint="set `data.haystack.column`"
        )
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise LeanKError(
            f"haystack `{place}`: `{column}` is a {type(text).__name__}, not text",
            hint="set `data.haystack.column`",
        )
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return (text or "").encode(errors="replace").decode()


def _read_dataset(source: str, section: HaystackSection) -> list[str]:
    try:
        import datasets
    except ImportError:
        raise LeanKError(
            f"haystack `{source}` is no file, and the package `datasets`, which reads datasets, is missing",
            hint="install it: `pip install leank-convert[datasets]`; a file ends in " + ", ".join(_SUFFIXES),
        ) from None
    texts = []
    num_bytes = 0
    # The library's errors are of many kinds, from its own to those of file systems; each has its reason.
    try:
        # Streaming fetches no more than is read; without a network only what was fetched before is there.
        dataset = datasets.load_dataset(
            source, section.config, split=section.split, streaming=not datasets.config.HF_HUB_OFFLINE
        )
        for index, record in enumerate(dataset):
            text = _text_of(record, section.column, f"{source}: {section.split} record {index}")
            num_bytes += len(text.encode())
            texts.append(text)
            if num_bytes > _MAX_BYTES:
                _tell_cut(source)
                break
    except LeanKError:
        raise
    except Exception as error:
        raise LeanKError(
            f"haystack `{source}` (config {section.config or 'not set'}, split {section.split}) cannot be "
            f"read: {error}",
            hint="see `data.haystack.source`, `config` and `split`; without a network, a `.jsonl` file does",
        ) from error
    return texts


def _decode(content: bytes, place: str, *, whole: bool = True) -> str:
    """Decode UTF-8; where it is not `whole`, the end may be in the middle of a character."""
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=whole)
    except UnicodeDecodeError as error:
        raise LeanKError(
            f"haystack `{place}` is not UTF-8: {error.reason} at byte {error.start}",
            hint="convert it, as with `iconv -t utf-8`",
        ) from None


def _tell_cut(source: object) -> None:
    _logger.warning("haystack `%s` is large; its first %s are used", source, _size(_MAX_BYTES))


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"
