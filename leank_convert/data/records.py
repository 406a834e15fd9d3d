"""Records of .json and .jsonl files and of datasets of the hub, each with its place for error messages."""

from __future__ import annotations

import codecs
import glob
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from leank_convert.errors import LeanKError, first_line

# Keys and types are those of a file's first records, so that many.
_CHUNK_BYTES = 2**26
_FORM = (
    "a .jsonl file is a record a line, a .json file a list of records, in UTF-8 and with the same keys "
    "throughout; `datasets` counts rows from 0"
)
_logger = logging.getLogger("leank_convert")


def read_records(
    path: Path, what: str, field: str | None = None
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Read the records of a file: JSON lines, or a JSON list, or what one JSON object has under `field`.

    Keys that are null are left out: `datasets` gives null for every key that another record has.

    Args:
        path: Ends in .jsonl or .json.
        what: What messages call the file, such as `haystack`.
        field: Is looked up where a .json file begins with an object; None: that object is the record.

    Yields:
        A record's place, such as ``haystack `a.jsonl`: record 3``, and the record.

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
    options = {"field": field, "encoding": "utf-8-sig", "chunksize": _CHUNK_BYTES, "streaming": True}
    rows = _load(place, _FORM, "json", "train", data_files=file_name, **options)
    for number, row in enumerate(rows, start=1):
        yield f"{place}: record {number}", {key: value for key, value in row.items() if value is not None}


def read_dataset(
    source: str, config: str | None, split: str, what: str
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Read a dataset of the hub, its records with their places as `read_records`.

    Raises:
        LeanKError: If the package `datasets` is missing or cannot read it.
    """
    place = f"{what} `{source}` (config {config or 'not set'}, split {split})"
    hint = "check its id, configuration and split; without a network, a `.jsonl` file does"
    for number, record in enumerate(_load(place, hint, source, split, name=config), start=1):
        yield f"{what} `{source}`: {split} record {number}", record


def read_text(path: Path, what: str, max_bytes: int) -> str:
    """Read UTF-8 text: of a file with more than `max_bytes` the beginning, and a warning says so.

    Raises:
        LeanKError: If the file cannot be read.
    """
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
            folder = empty if path == "json" else None
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
