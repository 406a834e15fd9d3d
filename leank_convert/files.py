"""Files: bounded reading, JSON, atomic writes, SHA-256 digests."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from leank_convert.errors import LeanKError, cut, first_line

_BLOCK_SIZE = 1 << 20
_SAMPLED_BYTES = 8 << 20
# JSON of nothing but brackets takes forty times its size when parsed; an index of 100,000 tensors fits.
MAX_JSON_BYTES = 16 << 20
_MAX_JSON_DEPTH = 64


def user_path(path: str | os.PathLike[str]) -> Path:
    """What a user names as a path, be it there or not; LeanKError if no file system would take it."""
    if isinstance(path, str) and not path:
        raise LeanKError("'' cannot be a path: it is empty", hint="is a variable not set?")
    try:
        found = Path(path)
        if str(found).startswith("~"):  # no home is meant by `./~x`, whose absolute path says so for good
            found = found.expanduser() if os.fspath(path).startswith("~") else found.absolute()
        found.exists()
    except (OSError, RuntimeError, TypeError) as error:  # too long; nobody's home; a number
        named = cut(str(path) if isinstance(path, Path) else path)
        raise LeanKError(
            f"{named} cannot be a path: {getattr(error, 'strerror', error)}",
            hint="write the file's or the folder's path out",
        ) from error
    return found


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read bytes from; a pipe or a device, which may never end, is none.

    Raises:
        LeanKError: If it is missing, is something else or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise LeanKError(f"`{path}` is a folder, a pipe or a device, not a file")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise LeanKError(f"cannot read `{path}`: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; LeanKError if the file is missing, unreadable, huge or something else."""
    with open_file(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise LeanKError(f"`{path}` is larger than {MAX_JSON_BYTES >> 20} MB, the limit for a model's JSON")
    try:
        value = parse_json(content)
    except ValueError as error:
        raise LeanKError(f"`{path}` is not JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise LeanKError(f"`{path}` holds a `{type(value).__name__}`, not an object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object, empty where there is no such file; LeanKError as `read_json`."""
    return read_json(path) if path.is_file() else {}


def parse_json(content: bytes) -> Any:
    """Parse JSON as its standard has it: no key twice, no NaN, and nothing that could not be written again.

    Raises:
        ValueError: If it is something else, or nested beyond all reason.
    """
    try:
        value = json.loads(
            content.decode(),
            object_pairs_hook=_unique_keys,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_parse_float,
        )
        depth = _measure_depth(value)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if depth > _MAX_JSON_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_JSON_DEPTH} levels")
    if b"\\ud" in content.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it holds half of a surrogate pair, which is no character") from error
    return value


def _measure_depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((_measure_depth(item) for item in inner if isinstance(item, dict | list)), default=0)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {cut(twice)}")
    return found


def _parse_int(digits: str) -> int:
    _parse_float(digits)
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"number {cut(digits)} is not finite as a float")
    return value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file; none if there is no such file.

    A line that is no object is left out: a dying machine tears the one it was writing.
    """
    if not path.is_file():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, whole or by its parts, that holds the old content or the new whenever the machine dies.

    What is written to first lies beside it, as `<name>.partial`.

    Raises:
        OSError: If it cannot be written; carries the file's name.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_path(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:  # Ctrl-C and SIGTERM end a write, too
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Flush a file or a folder to the disk; an OSError, as for want of space, carries its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def sha256_of(*paths: Path) -> str:
    """The SHA-256 of a file, or of several one after another, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_SIZE):
                digest.update(block)
    return digest.hexdigest()


def digest_files(paths: Iterable[Path]) -> str:
    """A digest of a model's files that takes seconds, by their names, their sizes and what they hold.

    Of files above 16 MB only both ends are read, where the header and the last tensors lie.
    """
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            if size > _SAMPLED_BYTES:
                file.seek(max(_SAMPLED_BYTES, size - _SAMPLED_BYTES))
                digest.update(file.read())
    return digest.hexdigest()
