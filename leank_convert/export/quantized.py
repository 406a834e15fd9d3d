"""Sources with quantized weights: which can be permuted exactly, and what moves with them.

Heads are rows or columns of a weight, which is stored in numbers for one element each, or for several: packed
into one, or scaled by it. Blocks of whole heads change places exactly if no number is for parts of two.
Whatever an export does not permute is copied as it is, in whichever layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from safetensors import safe_open
from torch import Tensor

from leank_convert.checkpoint_io import CONFIG_NAME, FLOAT_DTYPES, Checkpoint
from leank_convert.errors import LeanKError, cut, shorten
from leank_convert.families import attention_tensor
from leank_convert.safetensors_file import TensorInfo
from leank_convert.value_weights import stored_in

_BYTE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
_BESIDE = {"weight_scale": "OI", "weight_scale_inv": "OI", "weight_zero_point": "OI"}
# How a `quant_method` stores a weight [out, in]: what each tensor's dimensions run over, outputs or inputs,
# in capitals where one number is for several of them. `*` runs over all elements, row by row.
_LAYOUTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "compressed-tensors": {"weight": "oi", "weight_packed": "oI", "weight_g_idx": "i", **_BESIDE},
        "fp8": {"weight": "oi", **_BESIDE},
        "fbgemm_fp8": {"weight": "oi", **_BESIDE},
        "gptq": {"qweight": "Io", "qzeros": "IO", "scales": "Io", "g_idx": "i"},
        "awq": {"qweight": "iO", "qzeros": "IO", "scales": "Io"},
        "bitsandbytes": {"weight": "*", "weight.absmax": "*", "weight.nested_absmax": "*", "SCB": "o"},
    }
)
_WEIGHTS = {"weight", "weight_packed", "qweight"}
_SCALES = {"weight_scale", "weight_scale_inv", "scales", "weight.absmax", "SCB"}
# Of every input, its group; where groups lie in the order of inputs, engines may leave the index unread.
_INDEXES = {"weight_g_idx", "g_idx"}
# What only stands beside a weight of several elements to a number.
_PACKED = {"weight_packed", "qweight", "weight.quant_map"}
# Numbers for the whole of a product, and what is the same whatever the order of heads.
_NUMBERS = {
    *("input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "weight_format"),
    *("input_global_scale", "weight_global_scale"),
}
_KEPT = {"weight_shape", "weight.quant_map", "weight.nested_quant_map"}
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale")
_HINT = "convert the model it was quantized from, or one with smaller groups or a scale for each row"


def check_quantization(checkpoint: Checkpoint) -> None:
    """Check what config.json says of quantization, apart from weights.

    Raises:
        LeanKError: If it makes no sense, or more than weights and the inputs of products is quantized.
    """
    given = checkpoint.config.get("quantization_config")
    if given is None:
        return
    file = checkpoint.folder / CONFIG_NAME
    if not isinstance(given, Mapping) or _method(checkpoint) is None:
        raise LeanKError(
            f"`{file}`: `quantization_config` is {cut(given)}, without a `quant_method`", hint=_HINT
        )
    if given.get("kv_cache_scheme") is not None:
        raise _of_another_cache(f"`{file}`: `quantization_config.kv_cache_scheme`")
    transforms = given.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise LeanKError(
            f"`{file}`: `quantization_config.transform_config` rotates what is between weights, so heads "
            "cannot be put in another order",
            hint=_HINT,
        )


def check_cache_scales(checkpoint: Checkpoint, layer: int) -> None:
    """Refuse, by a LeanKError, scales for a quantized cache beside a layer's attention."""
    for name in _CACHE_SCALES:
        tensor = attention_tensor(layer, name)
        if checkpoint.find(tensor) is not None:
            raise _of_another_cache(f"`{checkpoint.folder}`: tensor `{tensor}`")


def _of_another_cache(what: str) -> LeanKError:
    return LeanKError(
        f"{what} is for a quantized K/V cache of another kind than a pruned one",
        hint="convert the variant of the model without it, and add `--kv-dtype fp8` for a cache in FP8",
    )


def is_quantized(checkpoint: Checkpoint, weight: str) -> bool:
    """Whether a weight is there in another form than a plain tensor, in a checkpoint of quantized weights."""
    if checkpoint.config.get("quantization_config") is None:
        return False
    found, stored = checkpoint.find(weight), stored_in(checkpoint, weight)
    if found is not None:
        return found.dtype not in FLOAT_DTYPES or bool(stored - {"weight"})
    stem = weight.removesuffix(".weight")
    packed = (name for name in checkpoint.names_in(stem.rpartition(".")[0]) if name.startswith(f"{stem}_"))
    others = {*stored, *packed} - {*_BESIDE, *_SCALES, *_NUMBERS}
    return any(not name.endswith("bias") for name in others)


def check_scaled(checkpoint: Checkpoint, weight: str) -> None:
    """Refuse, by a LeanKError, a quantized weight without the scale that its layout is known to give it."""
    found, method = checkpoint.find(weight), _method(checkpoint) or ""
    stored = stored_in(checkpoint, weight)
    coded = stored & _PACKED or (found is not None and found.dtype in _BYTE_DTYPES)
    if method in _LAYOUTS and coded and not stored & _SCALES:
        raise LeanKError(
            f"`{checkpoint.folder}`: tensor `{weight}` is quantized by `{method}`, and its scale is missing",
            hint="download the model again",
        )


def find_moving(
    checkpoint: Checkpoint, weight: str, shape: tuple[int, ...], dim: int, num_blocks: int
) -> dict[str, int]:
    """Find the tensors that move with a quantized weight [out, in], whose blocks of `dim` change places.

    By name, of how many runs, one behind the other, each is: in each the blocks change places. LeanKError if
    the weight cannot be permuted exactly.
    """
    method, stored = _method(checkpoint) or "", stored_in(checkpoint, weight)
    layout = _LAYOUTS.get(method)
    if layout is None:
        raise _refused(weight, method, "stores weights in a layout that is not known here")
    if not stored & _WEIGHTS:
        names = ", ".join(f"`{name}`" for name in sorted(stored)[:4])
        raise _refused(weight, method, f"stores it as {names}, a layout that is not known here")
    moving: dict[str, int] = {}
    # Inputs take their group's number along, or groups move with them.
    grouped = dim == 0 or not any(_reorders(checkpoint, weight, name, shape) for name in stored & _INDEXES)
    for name in sorted(stored):
        info = _find(checkpoint, weight, name)
        if name in _KEPT or (name in _NUMBERS and math.prod(info.shape) == 1):
            if name == "weight_format" and _read(checkpoint, info).any():
                raise _refused(weight, method, f"stores it in tiles (`{name}`)")
            continue
        held = f"has `{name}` {list(info.shape)} for a weight {list(shape)}"
        letters = layout.get(name)
        if letters is None or not _fits(info, letters, shape):
            raise _refused(weight, method, f"{held}, which is not known here")
        if grouped == (name in _INDEXES) and name not in _WEIGHTS:
            continue
        runs = _count_runs(info, letters, shape, dim, num_blocks)
        if runs is None:
            size = f"{shape[dim] // num_blocks} {('rows', 'columns')[dim]}"
            shared = "numbers are for parts of two heads, or for no power of two"
            raise _refused(weight, method, f"{held}, of which heads have {size} each: {shared}")
        if runs:
            moving[info.name] = runs
    return moving


def _fits(info: TensorInfo, letters: str, shape: tuple[int, ...]) -> bool:
    """Whether numbers take whole bytes, and there are as many as a weight has rows or columns."""
    if info.num_bytes < math.prod(info.shape) or (letters != "*" and len(info.shape) > len(letters)):
        return False
    if letters == "i" and info.dtype not in ("I32", "I64"):
        return False
    sizes = dict(zip("oi", shape, strict=False))
    counts = (*info.shape, 1, 1)  # a scale for each row may have one dimension
    return all(sizes.get(letter, count) == count for letter, count in zip(letters, counts, strict=False))


def _count_runs(
    info: TensorInfo, letters: str, shape: tuple[int, ...], dim: int, num_blocks: int
) -> int | None:
    """In how many runs blocks of a tensor change places: 0 if it stays, None if they cannot."""
    at = letters.lower().find("oi"[dim])
    if letters == "*":
        count, size, runs = math.prod(info.shape), math.prod(shape), math.prod(shape[:dim])
        whole = size // runs
    elif at < 0:
        return 0
    else:
        count, size, runs = (*info.shape, 1, 1)[at], shape[dim], math.prod(info.shape[:at])
        whole = size
    share, left_over = divmod(size, max(1, count))
    # The last block may be cut short. A size that follows from their number is wrong then, and none of the
    # powers of two that sizes are.
    exact = not left_over and not share & (share - 1)
    packed = info.dtype == "I32" and size <= 32  # into one number for all
    if not packed and (count == 1 or (exact and share % whole == 0)):
        return 0
    return runs if exact and whole // num_blocks % share == 0 else None


def _reorders(checkpoint: Checkpoint, weight: str, name: str, shape: tuple[int, ...]) -> bool:
    """Whether an index of inputs' groups puts these in another order than inputs."""
    info = _find(checkpoint, weight, name)
    index = _read(checkpoint, info) if _fits(info, "i", shape) else torch.zeros(0)
    return bool((index[1:] < index[:-1]).any())


def _find(checkpoint: Checkpoint, weight: str, name: str) -> TensorInfo:
    info = checkpoint.find(f"{weight.removesuffix('.weight')}.{name}")
    assert info is not None
    return info


def _read(checkpoint: Checkpoint, info: TensorInfo) -> Tensor:
    shard = checkpoint.shard_of(info.name)
    assert shard is not None
    with safe_open(checkpoint.shards[shard].path, "pt") as file:
        tensor: Tensor = file.get_tensor(info.name)
    return tensor


def _method(checkpoint: Checkpoint) -> str | None:
    given = checkpoint.config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    return method if isinstance(method, str) else None


def _refused(weight: str, method: str, reason: str) -> LeanKError:
    return LeanKError(
        f"`{weight}` is quantized by `{shorten(method)}`, which {reason}; its heads cannot be put in another "
        "order exactly",
        hint=_HINT,
    )
