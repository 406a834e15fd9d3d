"""Files: atomic writes, JSON, SHA-256 digests."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from leank_convert.errors import LeanKError

_BLOCK_SIZE = 1 << 20
_SAMPLED_BYTES = 8 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        LeanKError: If the file is missing, cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LeanKError(f"cannot read `{path}`: {error.strerror}") from error
    except ValueError as error:
        raise LeanKError(f"`{path}` is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LeanKError(f"`{path}` holds a `{type(value).__name__}`, not an object")
    return value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file; none if there is no such file.

    A line that is no object is left out: a dying machine tears the one it was writing.
    """
    if not path.is_file():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file so that it holds the old content or the new whole, whenever the process or machine dies.

    Args:
        path: The file. What is written to first lies beside it, as `<name>.partial`.
        content: All of it, or its parts in order.

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
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_path(path: Path) -> None:
    """Flush a file or a folder to the disk.

    Raises:
        OSError: If that fails, as it may for want of space; carries the file's name.
    """
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
