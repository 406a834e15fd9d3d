"""Sources with quantized weights: which can be permuted exactly, and what moves with them.

A weight of one byte an element moves like any other, rows or columns, if every scale belongs to the whole
tensor, to one row, or to a block that holds no parts of two heads; scales of rows and blocks then move, too.
Whatever an export does not permute is copied as it is, in whichever layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from leank_convert.checkpoint_io import CONFIG_NAME, Checkpoint
from leank_convert.errors import LeanKError, cut, shorten
from leank_convert.families import attention_tensor

FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_BYTE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
# `quant_method`s whose layout is known: how they store a weight that cannot be permuted, None if it can be.
_LAYOUTS: Mapping[str, str | None] = MappingProxyType(
    {
        "compressed-tensors": None,
        "fp8": None,
        "fbgemm_fp8": None,
        "awq": "packs several weights into one integer, in an order of its own",
        "gptq": "packs several inputs into one integer, and may scale them in an order of its own (`g_idx`)",
        "mxfp4": "packs two inputs into one byte",
    }
)
# Beside a weight in its module: what belongs to its elements, and numbers for all inputs of its product.
_SCALES = ("weight_scale", "weight_scale_inv", "weight_zero_point")
_NUMBERS = ("input_scale", "input_zero_point", "input_scale_ub", "activation_scale")
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale")
_HINT = "convert the model it was quantized from, or one with a scale for each tensor or row"


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
    """Refuse scales for a quantized cache beside a layer's attention.

    Raises:
        LeanKError: If there are any.
    """
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
    found = checkpoint.find(weight)
    if found is not None:
        return found.dtype not in FLOAT_DTYPES or bool(_beside(checkpoint, weight))
    stem = weight.removesuffix(".weight")
    packed = (name for name in checkpoint.names_in(stem.rpartition(".")[0]) if name.startswith(f"{stem}_"))
    others = {*_beside(checkpoint, weight), *packed} - {*_SCALES, *_NUMBERS}
    return any(not name.endswith("bias") for name in others)


def check_scaled(checkpoint: Checkpoint, weight: str) -> None:
    """Check that a weight in one byte an element has a scale, where the layout is known to give it one.

    Raises:
        LeanKError: If it has none.
    """
    found, method = checkpoint.find(weight), _method(checkpoint) or ""
    known = _LAYOUTS.get(method, "") is None and found is not None and found.dtype in _BYTE_DTYPES
    if known and not {*_beside(checkpoint, weight)} & {*_SCALES}:
        raise LeanKError(
            f"`{checkpoint.folder}`: tensor `{weight}` is quantized by `{method}`, and its scale is missing",
            hint="download the model again",
        )


def find_moving_scales(
    checkpoint: Checkpoint, weight: str, shape: tuple[int, ...], dim: int, num_blocks: int
) -> list[str]:
    """Find the tensors that are to be permuted together with a quantized weight.

    Args:
        checkpoint: The source.
        weight: The weight's name.
        shape: What its shape has to be, [out, in].
        dim: The dimension that is permuted.
        num_blocks: Blocks of that dimension, of whole heads, that change places.

    Raises:
        LeanKError: If the weight cannot be permuted exactly.
    """
    method = _method(checkpoint) or ""
    layout = _LAYOUTS.get(method, "stores weights in a layout that is not known here")
    found, others = checkpoint.find(weight), _beside(checkpoint, weight)
    if layout is None and found is None:
        names = ", ".join(f"`{name}`" for name in others[:4])
        layout = f"stores it as {names}, several elements to a number"
    elif layout is None and found is not None and found.dtype not in (*_BYTE_DTYPES, *FLOAT_DTYPES):
        layout = f"stores it in {found.dtype}, several elements to a number"
    if layout is not None:
        raise _refused(weight, method, layout)
    moving = []
    for other in others:
        info = checkpoint.find(f"{weight.removesuffix('.weight')}.{other}")
        assert info is not None
        if other in _NUMBERS and math.prod(info.shape) == 1:
            continue
        if other not in _SCALES or len(info.shape) > 2:
            raise _refused(
                weight, method, f"has `{other}` {list(info.shape)} beside it, which is not known here"
            )
        count = (*info.shape, 1, 1)[dim]  # a scale for each row may have one dimension
        size, left_over = divmod(shape[dim], max(1, count))
        if count == 1:
            continue
        # The last block may be cut short. A size that follows from their number is wrong then, and none of
        # the powers of two that sizes are.
        if left_over or size & (size - 1) or (shape[dim] // num_blocks) % size:
            raise _refused(
                weight,
                method,
                f"has {count} scales for its {shape[dim]} {('rows', 'columns')[dim]} (`{other}`), of which "
                f"heads have {shape[dim] // num_blocks} each: a scale is shared by parts of two heads",
            )
        moving.append(info.name)
    return moving


def _method(checkpoint: Checkpoint) -> str | None:
    given = checkpoint.config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    return method if isinstance(method, str) else None


def _beside(checkpoint: Checkpoint, weight: str) -> list[str]:
    """Tensors of a weight's module but for it and the bias, without the module's path."""
    names = (name.rpartition(".")[2] for name in checkpoint.names_in(weight.removesuffix(".weight")))
    return sorted(name for name in names if name not in ("weight", "bias"))


def _refused(weight: str, method: str, reason: str) -> LeanKError:
    return LeanKError(
        f"`{weight}` is quantized by `{shorten(method)}`, which {reason}; its heads cannot be put in another "
        "order exactly",
        hint=_HINT,
    )
