"""Safetensors files as bytes: read and check a header, write a file.

The `safetensors` package checks a file, loads its tensors and serialises them again. Conversion moves most
bytes without looking at them and must not hold a shard in memory, so it works on offsets; and this writer
puts the same bytes for the same content every time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from leank_convert.errors import LeanKError, cut, first_line
from leank_convert.files import MAX_JSON_BYTES, open_file, parse_json

_MAX_NAME = 200


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry in a header; `start` and `stop` count from the end of the header.

    `stored_name` is what the file calls it, where that is not `name`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    stored_name: str = ""

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file holds, without its data."""

    path: Path
    tensors: Mapping[str, TensorInfo]  # by name, in the order of their bytes
    metadata: Mapping[str, str]  # the file's `__metadata__`
    data_start: int  # where the tensors' bytes begin in the file

    @property
    def num_data_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def rename(self, name_of: Callable[[str], str | None]) -> SafetensorsHeader:
        """Return the header with other names, without the tensors that have none."""
        named = ((name_of(name), tensor) for name, tensor in self.tensors.items())
        tensors = {new: replace(tensor, name=new, stored_name=tensor.name) for new, tensor in named if new}
        return replace(self, tensors=tensors)


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of a file that the safetensors package takes.

    Raises:
        LeanKError: If the file is missing, is not safetensors, is truncated, has a dtype that the safetensors
            package does not read, its offsets do not fit, or a name in it could not stand in a message.
    """
    with open_file(path) as file:
        header_size = int.from_bytes(file.read(8), "little")
        text = file.read(min(header_size, MAX_JSON_BYTES))
        file_size = os.fstat(file.fileno()).st_size
    if MAX_JSON_BYTES < header_size < file_size:
        raise LeanKError(f"`{path}`: a header of {header_size} bytes is none of a model's weights")
    try:
        with safe_open(path, framework="np"):  # checks the whole of it, against the file's size, too
            entries = parse_json(text)
        for name in entries:
            if not is_name(name):
                raise ValueError(f"{cut(name)} is not a valid tensor name")
    except (SafetensorError, ValueError, OSError) as error:
        raise LeanKError(
            f"`{path}` is truncated or damaged: {first_line(error)} (file size: {file_size} bytes)",
            hint="download or copy the file again",
        ) from error
    metadata = entries.pop("__metadata__", None) or {}
    tensors = [
        TensorInfo(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    return SafetensorsHeader(path, {tensor.name: tensor for tensor in tensors}, metadata, 8 + header_size)


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Encode what precedes a file's data, by tensors' name, dtype, shape and bytes in order, and metadata."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins aligned
    return len(text).to_bytes(8, "little") + text


def is_name(text: str) -> bool:
    """Whether a text may name a tensor or a file of them, and can stand in a message as it is."""
    return 0 < len(text) <= _MAX_NAME and text.isprintable()
