"""Tensors of mask files: what a file claims is checked before memory is taken for it."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from leank_convert.architectures import MAX_CHANNELS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from leank_convert.errors import LeanKError, cut, first_line
from leank_convert.safetensors_file import SafetensorsHeader

# MAX_CHANNELS of the widest dtype, and something for what lies around them.
_MAX_FILE_BYTES = 9 * MAX_CHANNELS
_MAX_PICKLE_BYTES = 1 << 20
_NUMBER_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
# What `torch.save` names for a plain tensor or parameter, beside the class of its storage and its dtype.
_PLAIN_GLOBALS = {
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter",
    "torch.storage UntypedStorage",
    "collections OrderedDict",
}


def check_file(path: Path) -> None:
    """Check that a mask is a file, and not larger than any mask.

    Raises:
        LeanKError: If it is not.
    """
    if not path.is_file():
        if path.exists():
            raise LeanKError(f"mask `{path}` is a {'folder' if path.is_dir() else 'device or a pipe'}")
        raise LeanKError(f"mask `{path}` does not exist")
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise LeanKError(
            f"mask `{path}` has {path.stat().st_size} bytes; no mask has more than {_MAX_FILE_BYTES}"
        )


def load_stored(header: SafetensorsHeader, name: str) -> Tensor:
    """Load a tensor [L, H_kv, D] of a safetensors file.

    Raises:
        LeanKError: If it has another shape or no dtype of numbers, or cannot be read.
    """
    info = header.tensors[name]
    _check_shape(info.shape, header.path)
    if info.dtype not in _NUMBER_DTYPES:
        raise _no_numbers(header.path, info.dtype)
    try:
        with safe_open(header.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise LeanKError(f"mask `{header.path}` cannot be read: {first_line(error)}") from error
    return tensor


def load_key_mean(header: SafetensorsHeader, shape: Sequence[int]) -> Tensor:
    """Load the mean of keys float16 [L, H_kv, D] of a mask file.

    Raises:
        LeanKError: If it has another shape or dtype than it must have, is not finite, or cannot be read.
    """
    info = header.tensors["key_mean"]
    if info.dtype != "F16" or list(info.shape) != list(shape):
        raise LeanKError(
            f"mask `{header.path}`: `key_mean` is {info.dtype} {cut(list(info.shape))}, not F16 {list(shape)}"
        )
    mean = load_stored(header, "key_mean")
    wrong = (~mean.isfinite()).nonzero()
    if len(wrong):
        position = wrong[0].tolist()
        raise LeanKError(
            f"mask `{header.path}`: `key_mean` holds {mean[tuple(position)].item()} at {position}, no finite "
            "number"
        )
    return mean


def load_pickle(path: Path) -> Tensor:
    """Load the one plain tensor [L, H_kv, D] that `torch.save` wrote; nothing of the file is executed.

    Raises:
        LeanKError: If the file holds anything else.
    """
    hint = "save it with `torch.save(tensor, path)`, a tensor without a class, layout or device of its own"
    try:
        stored_bytes = _scan_pickle(path)
        # Shapes first, without memory for them: torch makes room for whatever shape a pickle claims.
        value = torch.load(path, map_location="meta", weights_only=True)
        if isinstance(value, Tensor):
            _check_shape(value.shape, path)
            if value.untyped_storage().nbytes() != stored_bytes:
                raise ValueError("its shape does not fit its data")
            value = torch.load(path, map_location="cpu", weights_only=True)
    except LeanKError:
        raise
    except Exception as error:  # damaged zip files and pickles fail in as many ways as there are bytes
        raise LeanKError(f"mask `{path}` is not a pickle of one plain tensor", hint=hint) from error
    if not isinstance(value, Tensor):
        raise LeanKError(f"mask `{path}` holds a `{type(value).__name__}`, not one plain tensor", hint=hint)
    return value.detach()


def load_array(path: Path) -> Tensor:
    """Load an array [L, H_kv, D] that `numpy.save` wrote.

    Raises:
        LeanKError: If the file holds anything else.
    """
    try:
        # Mapped: by itself numpy makes room for whatever shape a header claims.
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        _check_shape(values.shape, path)
        return torch.from_numpy(np.array(values))
    except LeanKError:
        raise
    except Exception as error:  # numpy parses the header as Python, and lets that parser's errors out
        raise LeanKError(f"mask `{path}` is not an array of numbers: {first_line(error)}") from error


def to_bool(values: Tensor, path: Path) -> Tensor:
    """Turn zeros and ones [L, H_kv, D] of any dtype of numbers into bool.

    Raises:
        LeanKError: If the shape is another, or a value is neither 0 nor 1.
    """
    _check_shape(values.shape, path)
    if values.dtype not in _NUMBER_DTYPES.values():
        raise _no_numbers(path, str(values.dtype).removeprefix("torch."))
    if values.dtype == torch.bool:
        values = values.contiguous().view(torch.uint8)  # a file may hold other bytes than 0 and 1
    numbers = values.to(torch.float64)
    other = ((numbers != 0) & (numbers != 1)).nonzero()
    if len(other):
        position = other[0].tolist()
        raise LeanKError(
            f"mask `{path}`: value {numbers[tuple(position)].item()} at {position} is not 0 or 1",
            hint="a mask says which channels are kept; scaling factors have to be selected from first",
        )
    return numbers == 1


def _check_shape(shape: Sequence[int], path: Path) -> None:
    sizes = list(shape)
    if len(sizes) != 3 or 0 in sizes:
        raise LeanKError(f"mask `{path}` is a tensor of shape {cut(sizes)}, not [layers, KV heads, head_dim]")
    layers, heads, head_dim = sizes
    if (
        layers > MAX_LAYERS
        or heads > MAX_HEADS
        or head_dim > MAX_HEAD_DIM
        or layers * heads * head_dim > MAX_CHANNELS
    ):
        raise LeanKError(
            f"mask `{path}` is a tensor of shape {cut(sizes)}, which is no model's: at most {MAX_LAYERS} "
            f"layers, {MAX_HEADS} KV heads, a head_dim of {MAX_HEAD_DIM} and {MAX_CHANNELS} channels in all"
        )


def _scan_pickle(path: Path) -> int:
    """Check that a file is what `torch.save` makes of a plain tensor; the bytes of its data.

    Even torch's restricted unpickler calls what takes any amount of memory, such as `bytearray(10**12)`.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("compressed")
        pickled = next(record for record in records if record.filename.endswith("/data.pkl"))
        if pickled.file_size > _MAX_PICKLE_BYTES:
            raise ValueError("a large pickle")
        for opcode, argument, _ in pickletools.genops(archive.read(pickled)):
            if opcode.name in ("STACK_GLOBAL", "BUILD", "NEWOBJ") or (
                opcode.name == "GLOBAL" and not _is_plain(str(argument))
            ):
                raise ValueError(opcode.name)
    (data,) = (record for record in records if "/data/" in record.filename)
    return data.file_size


def _is_plain(name: str) -> bool:
    module, _, attribute = name.partition(" ")
    return name in _PLAIN_GLOBALS or (
        module == "torch"
        and (attribute.endswith("Storage") or isinstance(getattr(torch, attribute, None), torch.dtype))
    )


def _no_numbers(path: Path, dtype: str) -> LeanKError:
    return LeanKError(
        f"mask `{path}` has dtype {dtype}", hint="a mask holds zeros and ones: bool, integers or floats"
    )
