"""Shard writer of an export: a plan's edits, one range of bytes at a time from the source.

Rows of a permuted tensor are runs of bytes, so they are copied inside the kernel like everything else; only
columns pass through memory, a few megabytes at a time. Peak memory depends on no size of the model.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from leank_convert.errors import LeanKError
from leank_convert.export.plan import AddedTensor, TensorEdit
from leank_convert.safetensors_file import SafetensorsHeader, TensorInfo, encode_header

_BUFFER_BYTES = 8 << 20
# What a kernel or a file system answers where it cannot copy between these two files by itself.
_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True)
class _Span:
    """Bytes of the source, copied as they are."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Columns:
    """A tensor of the source whose columns are put in another order."""

    tensor: TensorInfo
    start: int
    permutation: tuple[int, ...]


def write_shard(
    source: SafetensorsHeader,
    path: Path,
    *,
    edits: Mapping[str, TensorEdit],
    added: Sequence[AddedTensor],
    metadata: Mapping[str, str],
) -> None:
    """Write one shard; `sync_path` flushes it to the disk.

    Args:
        source: The source shard's header.
        path: The file to write.
        edits: Permuted tensors by name, of any shard.
        added: New tensors, written behind the source's.
        metadata: The new file's `__metadata__`.

    Raises:
        LeanKError: If the source ends before its header says.
        OSError: If the file cannot be written; carries the file's name.
    """
    tensors = [(t.name, t.dtype, t.shape, t.num_bytes) for t in source.tensors.values()]
    tensors += [(new.tensor, "BOOL", new.shape, len(new.data)) for new in added]
    with source.path.open("rb") as reader, path.open("wb") as writer:
        try:
            _write(writer.fileno(), encode_header(tensors, metadata))
            for piece in _merge(_split(source, edits)):
                if isinstance(piece, _Span):
                    _copy_span(reader.fileno(), writer.fileno(), piece, source.path)
                else:
                    _copy_columns(reader.fileno(), writer.fileno(), piece, source.path)
            for new in added:
                _write(writer.fileno(), new.data)
        except OSError as error:
            # Writes through a descriptor do not know the file's name.
            raise OSError(error.errno, error.strerror, str(path)) from error


def _split(source: SafetensorsHeader, edits: Mapping[str, TensorEdit]) -> Iterator[_Span | _Columns]:
    for tensor in source.tensors.values():
        start = source.data_start + tensor.start
        edit = edits.get(tensor.name)
        if edit is None:
            yield _Span(start, start + tensor.num_bytes)
        elif edit.dim == 1:
            yield _Columns(tensor, start, edit.permutation)
        else:
            block = tensor.num_bytes // len(edit.permutation)
            for old in edit.permutation:
                yield _Span(start + old * block, start + (old + 1) * block)


def _merge(pieces: Iterable[_Span | _Columns]) -> Iterator[_Span | _Columns]:
    held: _Span | _Columns | None = None
    for piece in pieces:
        if isinstance(held, _Span) and isinstance(piece, _Span) and held.stop == piece.start:
            held = _Span(held.start, piece.stop)
            continue
        if held is not None:
            yield held
        held = piece
    if held is not None:
        yield held


def _copy_span(reader: int, writer: int, span: _Span, path: Path) -> None:
    start = span.start
    while start < span.stop:
        try:
            copied = os.copy_file_range(reader, writer, span.stop - start, offset_src=start)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            break
        if copied == 0:
            raise _ended_early(path)
        start += copied
    while start < span.stop:
        content = _read(reader, start, min(_BUFFER_BYTES, span.stop - start), path)
        _write(writer, content)
        start += len(content)


def _copy_columns(reader: int, writer: int, columns: _Columns, path: Path) -> None:
    num_rows = columns.tensor.shape[0]
    row_bytes = columns.tensor.num_bytes // num_rows
    blocks = np.array(columns.permutation)
    rows_at_once = max(1, _BUFFER_BYTES // row_bytes)
    for first in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - first)
        content = _read(reader, columns.start + first * row_bytes, rows * row_bytes, path)
        heads = np.frombuffer(content, dtype=np.uint8).reshape(rows, len(blocks), -1)
        _write(writer, heads[:, blocks].tobytes())


def _read(reader: int, start: int, count: int, path: Path) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = os.pread(reader, count - len(content), start + len(content))
        if not part:
            raise _ended_early(path)
        content += part
    return bytes(content)


def _write(writer: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(writer, view) :]


def _ended_early(path: Path) -> LeanKError:
    return LeanKError(
        f"`{path}` became shorter while it was read", hint="leave the source alone during an export"
    )
