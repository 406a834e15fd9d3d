"""Shard writer of an export: a plan's edits, one range of bytes at a time from the source.

Rows of a permuted tensor are runs of bytes, so they are copied inside the kernel like everything else; only
columns, and heads that a basis of V is folded into, pass through memory, a few megabytes at a time. A thread
of its own hashes the file right behind the writer, while the pages are still in memory. Peak memory depends
on no size of the model.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from torch import Tensor

from leank_convert.errors import LeanKError
from leank_convert.export.fold import fold_bytes
from leank_convert.export.plan import TensorEdit
from leank_convert.safetensors_file import SafetensorsHeader, TensorInfo, encode_header

_BUFFER_BYTES = 8 << 20
# What is copied before the hash may follow, and what is read to hash it: the latter stays in the CPU's cache.
_COPY_BYTES = 16 << 20
_HASH_BYTES = 256 << 10
# Larger writes were five times slower where this was measured (Linux 6, ext4).
_WRITE_BYTES = 256 << 10


@dataclass(frozen=True)
class _Span:
    """Bytes of the source, copied as they are."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Columns:
    """A tensor of the source whose columns are put in another order, a run of them for each row."""

    tensor: TensorInfo
    start: int
    runs: int
    edit: TensorEdit


@dataclass(frozen=True)
class _Rows:
    """A head's rows of V in a tensor of the source, which a basis is folded into."""

    tensor: TensorInfo
    start: int
    stop: int
    basis: Tensor


_Piece = _Span | _Columns | _Rows


class _Output:
    """A file that is written from start to end, and hashed behind its writer."""

    def __init__(self, descriptor: int, path: Path, hasher: Executor) -> None:
        self.descriptor = descriptor
        self._path, self._hasher = path, hasher
        self._digest, self._length = hashlib.sha256(), 0
        self._steps: list[Future[None]] = []

    def write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            count = os.write(self.descriptor, view[:_WRITE_BYTES])
            view = view[count:]
        self.wrote(len(content))

    def wrote(self, count: int) -> None:
        """Take note that so many bytes came to the end of the file."""
        self._steps.append(self._hasher.submit(self._follow, self._length, self._length + count))
        self._length += count

    def digest(self) -> str:
        """The file's SHA-256, once the hash has come to its end."""
        for step in self._steps:
            step.result()
        return self._digest.hexdigest()

    def _follow(self, start: int, stop: int) -> None:
        buffer = memoryview(bytearray(min(_HASH_BYTES, stop - start)))
        with self._path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                count = file.readinto(buffer[: stop - start]) or 0
                if not count:
                    raise OSError(errno.EIO, "it became shorter while it was written", str(self._path))
                self._digest.update(buffer[:count])
                start += count


def write_shard(
    source: SafetensorsHeader,
    path: Path,
    *,
    edits: Mapping[str, TensorEdit],
    metadata: Mapping[str, str],
    hasher: Executor,
    added: Mapping[str, Tensor] = MappingProxyType({}),
) -> Callable[[], str]:
    """Write one shard; `sync_path` flushes it to the disk.

    Args:
        source: The source shard's header.
        path: The file to write.
        edits: Permuted and folded tensors by name, of any shard.
        metadata: The new file's `__metadata__`.
        hasher: Hashes what is written, in order: it has one thread.
        added: Tensors in float32 that follow the source's.

    Returns:
        What waits for the hash and returns the file's SHA-256, in hexadecimal.

    Raises:
        LeanKError: If the source cannot be read, or ends before its header says.
        OSError: If the file cannot be written; carries the file's name.
    """
    entries = [(t.name, t.dtype, t.shape, t.num_bytes) for t in source.tensors.values()]
    entries += [(name, "F32", tuple(tensor.shape), tensor.nbytes) for name, tensor in added.items()]
    with source.path.open("rb") as reader, path.open("wb") as writer:
        output = _Output(writer.fileno(), path, hasher)
        try:
            output.write(encode_header(entries, metadata))
            for piece in _merge(_split(source, edits)):
                if isinstance(piece, _Span):
                    _copy_span(reader.fileno(), output, piece, source.path)
                elif isinstance(piece, _Rows):
                    rows = _read(reader.fileno(), piece.start, piece.stop - piece.start, source.path)
                    output.write(fold_bytes(rows, piece.tensor.dtype, len(piece.basis), piece.basis, 0))
                else:
                    _copy_columns(reader.fileno(), output, piece, source.path)
            for tensor in added.values():
                output.write(tensor.float().numpy().astype("<f4").tobytes())
        except OSError as error:
            # Writes through a descriptor do not know the file's name.
            raise OSError(error.errno, error.strerror, str(path)) from error
    return output.digest


def _split(source: SafetensorsHeader, edits: Mapping[str, TensorEdit]) -> Iterator[_Piece]:
    for tensor in source.tensors.values():
        start = source.data_start + tensor.start
        edit = edits.get(tensor.name)
        if edit is None:
            yield _Span(start, start + tensor.num_bytes)
        elif (runs := edit.count_runs(tensor.shape)) > 1 or (edit.bases and edit.dim):
            yield _Columns(tensor, start, runs, edit)
        else:
            block = tensor.num_bytes // len(edit.permutation)
            for old in edit.permutation:
                first, stop = start + old * block, start + (old + 1) * block
                basis = None if edit.bases is None else edit.bases[old]
                yield _Span(first, stop) if basis is None else _Rows(tensor, first, stop, basis)


def _merge(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    held: _Piece | None = None
    for piece in pieces:
        if isinstance(held, _Span) and isinstance(piece, _Span) and held.stop == piece.start:
            held = _Span(held.start, piece.stop)
            continue
        if held is not None:
            yield held
        held = piece
    if held is not None:
        yield held


def _copy_span(reader: int, output: _Output, span: _Span, path: Path) -> None:
    start = span.start
    while start < span.stop:
        count = min(_COPY_BYTES, span.stop - start)
        try:
            copied = os.copy_file_range(reader, output.descriptor, count, offset_src=start)
        except OSError:  # it cannot, between these two files; or what follows finds out which one fails
            break
        if copied == 0:
            raise _ended_early(path)
        output.wrote(copied)
        start += copied
    while start < span.stop:
        content = _read(reader, start, min(_BUFFER_BYTES, span.stop - start), path)
        output.write(content)
        start += len(content)


def _copy_columns(reader: int, output: _Output, columns: _Columns, path: Path) -> None:
    num_rows, edit = columns.runs, columns.edit
    row_bytes = columns.tensor.num_bytes // num_rows
    blocks = np.array(edit.permutation)
    rows_at_once = max(1, _BUFFER_BYTES // row_bytes)
    for first in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - first)
        content = _read(reader, columns.start + first * row_bytes, rows * row_bytes, path)
        heads = np.frombuffer(content, dtype=np.uint8).reshape(rows, len(blocks), -1)
        moved = heads[:, blocks]
        for place, old in enumerate(edit.permutation):
            basis = None if edit.bases is None else edit.bases[old]
            if basis is not None:
                folded = fold_bytes(moved[:, place].tobytes(), columns.tensor.dtype, rows, basis, 1)
                moved[:, place] = np.frombuffer(folded, dtype=np.uint8).reshape(rows, -1)
        output.write(moved.tobytes())


def _read(reader: int, start: int, count: int, path: Path) -> bytes:
    content = bytearray()
    while len(content) < count:
        try:
            part = os.pread(reader, count - len(content), start + len(content))
        except OSError as error:
            raise LeanKError(f"cannot read `{path}`: {error.strerror}") from error
        if not part:
            raise _ended_early(path)
        content += part
    return bytes(content)


def _ended_early(path: Path) -> LeanKError:
    return LeanKError(
        f"`{path}` became shorter while it was read", hint="leave the source alone during an export"
    )
