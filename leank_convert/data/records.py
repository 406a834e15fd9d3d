"""Records of .json, .jsonl and .parquet files and of the hub's datasets, each with its place for messages."""

from __future__ import annotations

import codecs
import glob
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TypeVar

from leank_convert.errors import LeanKError, cut, first_line

# Keys and types are those of a file's first records, so that many.
_CHUNK_BYTES = 2**26
_FORM = (
    "a .jsonl file is a record a line, a .json file a list of records, in UTF-8 and with the same keys "
    "throughout; `datasets` counts rows from 0"
)
_Kind = TypeVar("_Kind")
_logger = logging.getLogger("leank_convert")


def read_records(
    path: Path, what: str, field: str | None = None
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Read a .jsonl, .parquet or .json file, a list or what an object has under `field`: places and records.

    A place, such as ``haystack `a.jsonl`: record 3``, begins with `what`. A .json file of one object without
    a `field` is that record. Keys that are null are left out: `datasets` gives null for every key that
    another record has.

    Raises:
        LeanKError: If the package `datasets` is missing or cannot read the file.
    """
    place = f"{what} `{path}`"
    with _opened(path, place) as file:
        beginning = file.read(4096).lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    if not beginning:
        return
    if path.suffix != ".json" or not beginning.startswith(b"{"):
        field = None
    file_name = glob.escape(str(path.absolute()))
    if path.suffix == ".parquet":
        rows = _load(place, "download it again", "parquet", "train", data_files=file_name, streaming=True)
    else:
        options = {"field": field, "encoding": "utf-8-sig", "chunksize": _CHUNK_BYTES, "streaming": True}
        rows = _load(place, _FORM, "json", "train", data_files=file_name, **options)
    for number, row in enumerate(rows, start=1):
        yield f"{place}: record {number}", {key: value for key, value in row.items() if value is not None}


def read_field(record: Any, key: str, kind: type[_Kind], place: str, form: str) -> _Kind:
    """What a record has under a key; LeanKError, hinting at `form`, if nothing or of another kind."""
    value = record.get(key) if isinstance(record, dict) else None
    if value is None:
        raise LeanKError(f"{place} has no `{key}`", hint=form)
    if not isinstance(value, kind):
        raise LeanKError(f"{place}: `{key}` is {cut(value)}", hint=form)
    return value


def read_texts(record: Any, key: str, place: str, form: str) -> list[str]:
    """What a record has under a key, a list of texts; as `read_field`."""
    texts = read_field(record, key, list, place, form)
    if not all(isinstance(text, str) for text in texts):
        raise LeanKError(f"{place}: `{key}` is {cut(texts)}, not a list of texts", hint=form)
    return texts


def read_dataset(
    source: str, config: str | None, split: str, what: str
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Read a dataset of the hub, its records with their places; raises as `read_records`."""
    place = f"{what} `{source}` (config {config or 'not set'}, split {split})"
    hint = "check its id, configuration and split; without a network, a `.jsonl` file does"
    for number, record in enumerate(_load(place, hint, source, split, name=config), start=1):
        yield f"{what} `{source}`: {split} record {number}", record


def read_text(path: Path, what: str, max_bytes: int) -> str:
    """Read UTF-8 text, with a warning no more than `max_bytes` of it; LeanKError if that fails."""
    place = f"{what} `{path}`"
    with _opened(path, place) as file:
        content = file.read(max_bytes)
        whole = not file.read(1)
    if not whole:
        warn_cut(place, max_bytes)
    try:
        # What is cut may end in the middle of a character.
        return codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=whole)
    except UnicodeDecodeError as error:
        raise LeanKError(
            f"{place} is not UTF-8: {error.reason} at byte {error.start}",
            hint="convert it, as with `iconv -t utf-8`",
        ) from None


def warn_cut(place: str, max_bytes: int) -> None:
    """Warn that only the beginning of a source is used."""
    _logger.warning("%s is large; its first %d MiB are used", place, max_bytes >> 20)


def _load(place: str, hint: str, path: str, split: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """The rows of `datasets.load_dataset`, whose errors become one sentence, and nothing else is printed."""
    try:
        import datasets
    except ImportError:
        raise LeanKError(
            f"{place} is read by the package `datasets`, which is missing",
            hint="install it: `pip install 'leank-convert[datasets]'`; running text in .txt needs none",
        ) from None
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # Streaming fetches no more than is read; without a network only what was fetched before is there.
    arguments.setdefault("streaming", not datasets.config.HF_HUB_OFFLINE)
    # The library's errors are of many kinds, from its own to those of file systems; each has its reason.
    try:
        # A file is streamed from where it lies: the cache would hold an empty folder and a lock.
        with TemporaryDirectory(prefix="leank-convert-") as empty:
            folder = empty if path in ("json", "parquet") else None
            rows = datasets.load_dataset(path, split=split, cache_dir=folder, **arguments)
        yield from rows
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        reason = ("no " if isinstance(cause, KeyError) else "") + first_line(cause)
        raise LeanKError(f"{place} cannot be read: {reason}", hint=hint) from error
    finally:
        datasets.logging.set_verbosity(verbosity)


@contextmanager
def _opened(path: Path, place: str) -> Iterator[BinaryIO]:
    try:
        if path.exists() and not path.is_file():
            raise LeanKError(f"{place} is a folder, a pipe or a device, not a file")
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise LeanKError(f"{place} does not exist", hint=f"it is looked up from `{Path.cwd()}`") from None
    except OSError as error:
        raise LeanKError(f"{place} cannot be read: {error.strerror}") from None
