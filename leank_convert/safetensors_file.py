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

from leank_convert.errors import LeanKError, cut, first_line
from leank_convert.files import MAX_JSON_BYTES, open_file, parse_json

# Bits per element of every dtype that the safetensors package reads: a file with another loads nowhere.
DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
_MAX_DIMS = 16
_MAX_NAME = 200
_MAX_NUMBER = 2**63


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
        LeanKError: If the file is missing, is not safetensors, is truncated, has a dtype that the safetensors
            package does not read, or its offsets do not fit.
    """
    with open_file(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        header_size = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_size > file_size - 8:
            raise _damaged(
                path, f"its header claims {header_size} bytes, the file has {file_size}", file_size
            )
        if header_size > MAX_JSON_BYTES:
            raise LeanKError(f"`{path}`: a header of {header_size} bytes is none of a model's weights")
        text = file.read(header_size)
    try:
        entries = parse_json(text)
        if not isinstance(entries, dict):
            raise ValueError("it is no object")
        metadata = entries.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("`__metadata__` is no object of texts")
        tensors = sorted((_read_entry(name, entry) for name, entry in entries.items()), key=_by_offset)
    except ValueError as error:
        raise _damaged(path, f"its header cannot be parsed: {first_line(error)}", file_size) from error
    data_start, offset = 8 + header_size, 0
    for tensor in tensors:
        if tensor.start != offset or tensor.stop < tensor.start:
            raise _damaged(
                path, f"tensor `{tensor.name}` begins at byte {tensor.start}, not {offset}", file_size
            )
        if tensor.dtype not in DTYPE_BITS:
            raise LeanKError(
                f"`{path}`: tensor `{tensor.name}` has dtype {cut(tensor.dtype)}, which the safetensors "
                "package cannot read"
            )
        bits = math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype]
        if 8 * tensor.num_bytes != bits:
            raise _damaged(
                path,
                f"tensor `{tensor.name}` of shape {cut(list(tensor.shape))} and dtype {tensor.dtype} "
                f"has {tensor.num_bytes} bytes, not {bits / 8:.15g}",
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


def is_name(text: str) -> bool:
    """Whether a text may name a tensor or a file of them, and can stand in a message as it is."""
    return 0 < len(text) <= _MAX_NAME and text.isprintable()


def _read_entry(name: str, entry: object) -> TensorInfo:
    if not is_name(name):
        raise ValueError(f"{cut(name)} is not a valid tensor name")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor `{name}` is not described by `dtype`, `shape` and `data_offsets`")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    # The package multiplies in 64 bits, and a size of 0 hides no overflow from it.
    if not (
        _is_list_of_sizes(shape)
        and len(shape) <= _MAX_DIMS
        and math.prod(max(1, size) for size in shape) < _MAX_NUMBER >> 6
    ):
        raise ValueError(f"tensor `{name}` has shape {cut(shape)}")
    if not (_is_list_of_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"tensor `{name}` has `data_offsets` {cut(offsets)}")
    if not isinstance(dtype, str):
        raise ValueError(f"tensor `{name}` has dtype {cut(dtype)}")
    return TensorInfo(name, dtype, tuple(shape), *offsets)


def _is_list_of_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _MAX_NUMBER for size in value)


def _by_offset(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.start, tensor.stop


def _damaged(path: Path, detail: str, file_size: int) -> LeanKError:
    return LeanKError(
        f"`{path}` is truncated or damaged: {detail} (file size: {file_size} bytes)",
        hint="download or copy the file again",
    )
