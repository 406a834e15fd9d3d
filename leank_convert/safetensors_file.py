"""Safetensors files as bytes: read and check a header, write a file.

The `safetensors` package loads a file's tensors and serialises them again. Conversion moves most bytes
without looking at them and must not hold a shard in memory, so it works on offsets; and this writer puts
the same bytes for the same content every time.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leank_convert.errors import LeanKError

# Bytes per element. A dtype that is not listed here is carried along without a check of its size.
DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry in a header; `start` and `stop` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file holds, without its data.

    Attributes:
        path: The file.
        tensors: By name, in the order of their bytes.
        metadata: The file's `__metadata__`.
        data_start: Where the tensors' bytes begin in the file.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int

    @property
    def num_data_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_header(path: Path) -> SafetensorsHeader:
    """Read a file's header and check it against the file's size.

    Raises:
        LeanKError: If the file is missing, is not safetensors, is truncated, or its offsets do not fit.
    """
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            header_size = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_size > min(file_size - 8, _MAX_HEADER_BYTES):
                raise _damaged(
                    path, f"its header claims {header_size} bytes, the file has {file_size}", file_size
                )
            text = file.read(header_size)
    except OSError as error:
        raise LeanKError(f"cannot read `{path}`: {error.strerror}") from error
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", None) or {}
        tensors = sorted((_read_entry(name, entry) for name, entry in entries.items()), key=_by_offset)
        metadata = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, "its header cannot be parsed", file_size) from error
    data_start, offset = 8 + header_size, 0
    for tensor in tensors:
        if tensor.start != offset or tensor.stop < tensor.start:
            raise _damaged(
                path, f"tensor `{tensor.name}` begins at byte {tensor.start}, not {offset}", file_size
            )
        expected = math.prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)
        if tensor.dtype in DTYPE_BYTES and tensor.num_bytes != expected:
            raise _damaged(
                path,
                f"tensor `{tensor.name}` of shape {list(tensor.shape)} and dtype {tensor.dtype} "
                f"has {tensor.num_bytes} bytes, not {expected}",
                file_size,
            )
        offset = tensor.stop
    if data_start + offset != file_size:
        raise _damaged(path, f"its header promises {data_start + offset} bytes", file_size)
    return SafetensorsHeader(
        path=path,
        tensors={tensor.name: tensor for tensor in tensors},
        metadata=metadata,
        data_start=data_start,
    )


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Encode the part of a file that comes before its data.

    Args:
        tensors: Name, dtype, shape and bytes of each tensor, in the order of their bytes.
        metadata: The file's `__metadata__`.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins aligned
    return len(text).to_bytes(8, "little") + text


def _read_entry(name: str, entry: Mapping[str, Any]) -> TensorInfo:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(name)
    return TensorInfo(name, str(entry["dtype"]), shape, start, stop)


def _by_offset(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.start, tensor.stop


def _damaged(path: Path, detail: str, file_size: int) -> LeanKError:
    return LeanKError(
        f"`{path}` is truncated or damaged: {detail} (file size: {file_size} bytes)",
        hint="download or copy the file again",
    )
