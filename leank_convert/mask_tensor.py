"""Reading mask tensors from files of any origin: size, shape, dtype and values checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from leank_convert.architectures import MAX_CHANNELS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from leank_convert.checkpoint_io import ratios_hint
from leank_convert.errors import LeanKError, cut, first_line
from leank_convert.safetensors_file import SafetensorsHeader, read_header

# MAX_CHANNELS of the widest dtype, and something for what lies around them; and a basis of V.
_MAX_FILE_BYTES = 9 * MAX_CHANNELS
_MAX_BASIS_BYTES = 1 << 30
_NUMBER_DTYPES = {
    torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def check_file(path: Path) -> None:
    """Check that a mask is a file, and not larger than any mask; raises LeanKError."""
    if not path.is_file():
        if path.exists():
            raise LeanKError(f"mask `{path}` is a {'folder' if path.is_dir() else 'device or a pipe'}")
        raise LeanKError(f"mask `{path}` does not exist", hint=ratios_hint(path.parent))
    size, most = path.stat().st_size, _MAX_FILE_BYTES
    if size > most and path.suffix == ".safetensors" and "value_basis" in read_header(path).tensors:
        most += _MAX_BASIS_BYTES
    if size > most:
        raise LeanKError(f"mask `{path}` has {size} bytes; no mask has more than {most}")


def load_stored(header: SafetensorsHeader, name: str) -> Tensor:
    """Load a tensor of a safetensors file, whatever its shape and dtype; LeanKError if it cannot be read."""
    try:
        with safe_open(header.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise LeanKError(f"mask `{header.path}` cannot be read: {first_line(error)}") from error
    return tensor


def load_pickle(path: Path) -> Tensor:
    """Load the one plain tensor [L, H_kv, D] of a pickle, nothing of which is executed; else LeanKError."""
    hint = "save it with `torch.save(tensor, path)`, a tensor without a class, layout or device of its own"
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            raise TypeError(type(value).__name__)
    except OSError as error:
        raise LeanKError(f"cannot read mask `{path}`: {error.strerror or first_line(error)}") from error
    except Exception as error:  # damaged zip files and pickles fail in as many ways as there are bytes
        raise LeanKError(f"mask `{path}` is not a pickle of one plain tensor", hint=hint) from error
    return value.detach()


def load_array(path: Path) -> Tensor:
    """Load an array [L, H_kv, D] that `numpy.save` wrote; LeanKError if the file holds anything else."""
    try:
        # Mapped: by itself numpy makes room for whatever shape a header claims.
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        _check_shape(values.shape, path)
        return torch.from_numpy(np.array(values))
    except LeanKError:
        raise
    except OSError as error:
        raise LeanKError(f"cannot read mask `{path}`: {error.strerror or first_line(error)}") from error
    except Exception as error:  # numpy parses the header as Python, and lets that parser's errors out
        raise LeanKError(f"mask `{path}` is not an array of numbers: {first_line(error)}") from error


def to_bool(values: Tensor, path: Path) -> Tensor:
    """Turn zeros and ones [L, H_kv, D] of any dtype into bool; LeanKError if they are none."""
    _check_shape(values.shape, path)
    if values.dtype not in _NUMBER_DTYPES:
        raise LeanKError(
            f"mask `{path}` has dtype {str(values.dtype).removeprefix('torch.')}",
            hint="a mask holds zeros and ones: bool, integers or floats",
        )
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
    largest = (MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM)
    if math.prod(sizes) > MAX_CHANNELS or any(size > most for size, most in zip(sizes, largest, strict=True)):
        raise LeanKError(
            f"mask `{path}` is a tensor of shape {cut(sizes)}, which exceeds any model's: at most "
            f"{MAX_LAYERS} layers, {MAX_HEADS} KV heads, a head_dim of {MAX_HEAD_DIM} and {MAX_CHANNELS} "
            "channels in all"
        )


def in_checkpoint_order(values: Tensor, head_permutation: Sequence[Sequence[int]]) -> Tensor:
    """Bring what is known of heads [L, H_kv, …] into a checkpoint's order `[layer][new] = old`."""
    return torch.stack([heads[list(order)] for heads, order in zip(values, head_permutation, strict=True)])
