"""Records of .json and .jsonl files and of datasets, each with its place for error messages."""

from __future__ import annotations

import codecs
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from leank_convert.errors import LeanKError

_logger = logging.getLogger("leank_convert")


def read_records(path: Path, what: str, max_bytes: int = sys.maxsize) -> Iterator[tuple[str, Any]]:
    """Read a .jsonl file, a record a line, or a .json file: the records of its list, or its one object.

    pyarrow's reader, which `datasets` has for such files, takes a missing key for null and names no line.

    Args:
        path: Ends in .jsonl or .json.
        what: What messages call the file, such as `haystack`.
        max_bytes: Of a longer .jsonl file the records before this are read, and a warning says so.

    Yields:
        A record's place, such as ``haystack `a.jsonl:3` ``, and the record.

    Raises:
        LeanKError: If the file cannot be read or is not JSON (names the line), or if a .json file is longer.
    """
    if path.suffix == ".jsonl":
        yield from _read_lines(path, what, max_bytes)
        return
    with _opened(path, what) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise LeanKError(
                f"{what} `{path}` has more than {_describe_size(max_bytes)}",
                hint="a JSON file has to be read whole: make it `.jsonl`, a record a line",
            )
        text = _decode(file.read(), f"{what} `{path}`")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise LeanKError(
            f"{what} `{path}:{error.lineno}` is not JSON: {error.msg} at column {error.colno}",
            hint="name it `.jsonl` if it holds one record a line",
        ) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"{what} `{path}`", error) from None
    if isinstance(content, list):
        yield from ((f"{what} `{path}: record {index}`", record) for index, record in enumerate(content))
    else:
        yield f"{what} `{path}`", content


def read_text(path: Path, what: str, max_bytes: int) -> str:
    """Read UTF-8 text: of a file with more than `max_bytes` the beginning, and a warning says so.

    Raises:
        LeanKError: If the file cannot be read.
    """
    with _opened(path, what) as file:
        content = file.read(max_bytes)
        whole = not file.read(1)
    if not whole:
        warn_cut(f"{what} `{path}`", max_bytes)
    return _decode(content, f"{what} `{path}`", whole=whole)


def read_dataset(source: str, config: str | None, split: str, what: str) -> Iterator[tuple[str, Any]]:
    """Read a dataset of the hub, its records with their places as `read_records`.

    Raises:
        LeanKError: If the package `datasets` is missing or cannot read it.
    """
    try:
        import datasets
    except ImportError:
        raise LeanKError(
            f"{what} `{source}` is no file, and the package `datasets`, which reads datasets, is missing",
            hint="install it: `pip install 'leank-convert[datasets]'`; a file ends in .txt, .json or .jsonl",
        ) from None
    # The library's errors are of many kinds, from its own to those of file systems; each has its reason.
    try:
        # Streaming fetches no more than is read; without a network only what was fetched before is there.
        streaming = not datasets.config.HF_HUB_OFFLINE
        dataset = datasets.load_dataset(source, config, split=split, streaming=streaming)
        for index, record in enumerate(dataset):
            yield f"{what} `{source}: {split} record {index}`", record
    except Exception as error:
        raise LeanKError(
            f"{what} `{source}` (config {config or 'not set'}, split {split}) cannot be read: {error}",
            hint="check its id, configuration and split; without a network, a `.jsonl` file does",
        ) from error


def warn_cut(source: str, max_bytes: int) -> None:
    """Warn that only the beginning of a source is used."""
    _logger.warning("%s is large; its first %s are used", source, _describe_size(max_bytes))


def _read_lines(path: Path, what: str, max_bytes: int) -> Iterator[tuple[str, Any]]:
    num_bytes = 0
    with _opened(path, what) as file:
        for number, line in enumerate(file, start=1):
            place = f"{what} `{path}:{number}`"
            num_bytes += len(line)
            if num_bytes > max_bytes:
                if number == 1:
                    raise LeanKError(
                        f"{place}: the first record ends beyond {_describe_size(max_bytes)}",
                        hint="cut it into smaller records",
                    )
                warn_cut(f"{what} `{path}`", max_bytes)
                return
            if not line.strip():
                continue
            try:
                record = json.loads(_decode(line, place))
            except json.JSONDecodeError as error:
                raise LeanKError(
                    f"{place} is not JSON: {error.msg} at column {error.colno}",
                    hint="a `.jsonl` file holds one record a line; name it `.json` if it is one list",
                ) from None
            except (ValueError, RecursionError) as error:
                raise _unreadable(place, error) from None
            yield place, record


def _unreadable(place: str, error: Exception) -> LeanKError:
    """JSON that Python does not read: nested too deep, or with a number of too many digits."""
    return LeanKError(f"{place} cannot be read: {error}")


@contextmanager
def _opened(path: Path, what: str) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise LeanKError(
            f"{what} `{path}` does not exist", hint=f"it is looked up from `{Path.cwd()}`"
        ) from None
    except OSError as error:
        raise LeanKError(f"{what} `{path}` cannot be read: {error.strerror}") from None


def _decode(content: bytes, place: str, *, whole: bool = True) -> str:
    """Decode UTF-8; where it is not `whole`, the end may be in the middle of a character."""
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=whole)
    except UnicodeDecodeError as error:
        raise LeanKError(
            f"{place} is not UTF-8: {error.reason} at byte {error.start}",
            hint="convert it, as with `iconv -t utf-8`",
        ) from None


def _describe_size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"
