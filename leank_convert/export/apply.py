"""Shard writer of an export: a plan's edits, one range of bytes at a time from the source.

Rows of a permuted tensor are runs of bytes, so they are copied inside the kernel like everything else; only
columns, and heads that a basis of V is folded into, pass through memory, a few megabytes at a time. Peak
memory depends on no size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import numpy as np
from torch import Tensor

from leank_convert.errors import LeanKError
from leank_convert.export.fold import fold_bytes
from leank_convert.export.plan import TensorEdit
from leank_convert.safetensors_file import SafetensorsHeader, TensorInfo, encode_header

_BUFFER_BYTES = 8 << 20
# Larger writes were five times slower where this was measured (Linux 6, ext4).
_WRITE_BYTES = 256 << 10


def write_shard(
    source: SafetensorsHeader,
    path: Path,
    *,
    edits: Mapping[str, TensorEdit],
    metadata: Mapping[str, str],
    added: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write one shard, `added` tensors in float32 behind the source's; `sync_path` flushes it.

    Raises:
        LeanKError: If the source cannot be read, or ends before its header says.
        OSError: If the file cannot be written; carries the file's name.
    """
    entries = [(t.name, t.dtype, t.shape, t.num_bytes) for t in source.tensors.values()]
    entries += [(name, "F32", tuple(tensor.shape), tensor.nbytes) for name, tensor in added.items()]
    with source.path.open("rb") as source_file, path.open("wb") as file:
        reader, writer = source_file.fileno(), file.fileno()
        try:
            _write(writer, encode_header(entries, metadata))
            for tensor in source.tensors.values():
                _copy_tensor(reader, writer, source, tensor, edits.get(tensor.name))
            for values in added.values():
                _write(writer, values.float().numpy().astype("<f4").tobytes())
        except OSError as error:
            # Writes through a descriptor do not know the file's name.
            raise OSError(error.errno, error.strerror, str(path)) from error


def _copy_tensor(
    reader: int, writer: int, source: SafetensorsHeader, tensor: TensorInfo, edit: TensorEdit | None
) -> None:
    start = source.data_start + tensor.start
    if edit is None:
        _copy(reader, writer, start, tensor.num_bytes, source.path)
        return
    if (runs := edit.count_runs(tensor.shape)) > 1 or (edit.bases and edit.dim):
        _copy_columns(reader, writer, start, tensor, runs, edit, source.path)
        return
    block = tensor.num_bytes // len(edit.permutation)
    for old in edit.permutation:
        basis = None if edit.bases is None else edit.bases[old]
        if basis is None:
            _copy(reader, writer, start + old * block, block, source.path)
        else:
            rows = _read(reader, start + old * block, block, source.path)
            _write(writer, fold_bytes(rows, tensor.dtype, len(basis), basis, 0))


def _copy(reader: int, writer: int, start: int, count: int, path: Path) -> None:
    """Copy bytes of the source as they are."""
    stop = start + count
    # Where it cannot, between these two files, or fails, what follows finds out which one does.
    with suppress(OSError):
        while start < stop:
            copied = os.copy_file_range(reader, writer, stop - start, offset_src=start)
            if copied == 0:
                break
            start += copied
    for place in range(start, stop, _BUFFER_BYTES):
        _write(writer, _read(reader, place, min(_BUFFER_BYTES, stop - place), path))


def _copy_columns(
    reader: int, writer: int, start: int, tensor: TensorInfo, num_rows: int, edit: TensorEdit, path: Path
) -> None:
    """Put the columns of a tensor in another order, a run of them for each row."""
    row_bytes = tensor.num_bytes // num_rows
    rows_at_once = max(1, _BUFFER_BYTES // row_bytes)
    for first in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - first)
        content = _read(reader, start + first * row_bytes, rows * row_bytes, path)
        heads = np.frombuffer(content, dtype=np.uint8).reshape(rows, len(edit.permutation), -1)
        moved = heads[:, edit.permutation]
        for place, old in enumerate(edit.permutation):
            basis = None if edit.bases is None else edit.bases[old]
            if basis is not None:
                folded = fold_bytes(moved[:, place].tobytes(), tensor.dtype, rows, basis, 1)
                moved[:, place] = np.frombuffer(folded, dtype=np.uint8).reshape(rows, -1)
        _write(writer, moved.tobytes())


def _read(reader: int, start: int, count: int, path: Path) -> bytes:
    content = bytearray()
    while len(content) < count:
        try:
            part = os.pread(reader, count - len(content), start + len(content))
        except OSError as error:
            raise LeanKError(f"cannot read `{path}`: {error.strerror}") from error
        if not part:
            raise LeanKError(
                f"`{path}` became shorter while it was read", hint="leave the source alone during an export"
            )
        content += part
    return bytes(content)


def _write(writer: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(writer, view[:_WRITE_BYTES]) :]
