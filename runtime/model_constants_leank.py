"""What a checkpoint says of keys and values beside its masks: scales for FP8, the mean of keys, a basis of V.

Scales are buffers of the attention modules, loaded like weights; the other two lie in the mask's file.

Attention's output is linear in V. Where the basis whose directions are dropped cannot be folded into weights,
V is rotated into it as it is stored, and the output back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from .configuration_leank import LeanKSettings
from .constants_leank import Constants
from .files_leank import MASK_FILE, is_mask_file
from .fp8_leank import EXPONENTS, SCALE_NAMES

_HINT = "copy or export the checkpoint again"


def add_scales(attentions: Sequence[Any], settings: LeanKSettings) -> None:
    """Give attention modules the buffers that a checkpoint's scales are loaded into."""
    shape = (settings.num_key_value_heads, settings.head_dim)
    for attention in attentions:
        for name in SCALE_NAMES:
            # On no `meta` device, so that what is not loaded stays what no cache is built with.
            attention.register_buffer(name, torch.full(shape, torch.nan, dtype=torch.float32, device="cpu"))


def check_loaded(missing: Collection[str], source: str) -> None:
    """Raise a ValueError if a scale is among missing tensors: in its place is whatever memory held."""
    scales = sorted(name for name in missing if name.endswith(SCALE_NAMES))
    if scales:
        raise ValueError(f"`{source}`: tensor `{scales[0]}` is missing; {_HINT}")


def load_mask_tensors(
    block: Mapping[str, Any], settings: LeanKSettings, path: Path | None, source: str
) -> tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]:
    """Read the mean of keys and the basis of V of a checkpoint from its mask's file; None for none.

    Of every pruned layer, in the checkpoint's head order, `[1, H_kv, D]` and `[H_kv, D, D]` with a
    direction per column, fp32, on the CPU. `path` is what `find_mask_file` found in `source`. Raises a
    ValueError if the file is missing or is not the one that was exported, or a tensor makes no sense.
    """
    if not (settings.has_key_mean or settings.has_value_basis):
        return None, None
    shape = tuple(settings.channel_masks.shape)
    wanted: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {}
    if settings.has_key_mean:
        wanted["key_mean"] = "the mean of keys", torch.float16, shape
    if settings.has_value_basis:
        wanted["value_basis"] = "the basis of V", torch.float32, (*shape, shape[-1])
    if path is None or not is_mask_file(path, block):
        held = " and ".join(name for name, *_ in wanted.values())
        raise ValueError(
            f"`{source}`: `{MASK_FILE}`, which holds {held}, is missing or not the file that was exported; "
            f"{_HINT}"
        )
    found: dict[str, list[torch.Tensor]] = {}
    for name, (_, dtype, expected) in wanted.items():
        try:
            tensor = load(path.read_bytes())[name]
        except (KeyError, SafetensorError) as error:
            raise ValueError(f"`{path}` holds no tensor `{name}` that can be read; {_HINT}") from error
        if tensor.dtype != dtype or tuple(tensor.shape) != expected or not bool(tensor.isfinite().all()):
            raise ValueError(
                f"`{path}`: `{name}` is {tensor.dtype} {list(tensor.shape)}, not finite "
                f"{str(dtype).removeprefix('torch.')} {list(expected)}; {_HINT}"
            )
        orders = block["head_permutation"]  # the file has the heads in the model's own order
        found[name] = [own[list(order)].float() for own, order in zip(tensor, orders, strict=True)]
    means = found.get("key_mean")
    return None if means is None else [mean[None] for mean in means], found.get("value_basis")


def constants_of(
    attentions: Sequence[Any],
    settings: LeanKSettings,
    key_means: Sequence[torch.Tensor] | None,
    value_bases: Sequence[torch.Tensor] | None,
) -> list[Constants]:
    """Return what is known of each channel, layer by layer; what lacks or is wrong raises a ValueError."""
    constants = [Constants()] * len(attentions)
    if hasattr(attentions[0], SCALE_NAMES[0]):
        scales = [[getattr(attention, name) for name in SCALE_NAMES] for attention in attentions]
        check_scales(scales)
        constants = [Constants(None, *(scale[None] for scale in own)) for own in scales]
    lacks_mean = settings.has_key_mean and key_means is None
    if lacks_mean or (settings.has_value_basis and value_bases is None):
        lacking = "mean of keys" if lacks_mean else "basis of V"
        raise ValueError(
            f"this model was made from its config alone, and the {lacking} lies in its checkpoint; load "
            "it by `from_pretrained`"
        )
    if key_means is None:
        return constants
    return [own._replace(key_mean=mean) for own, mean in zip(constants, key_means, strict=True)]


def check_scales(scales: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raise a ValueError if a scale of any layer is no power of two that every dtype has, or is offloaded.

    `scales` are those of keys and of values of every layer, `[H_kv, D]` each.
    """
    for number, layer in enumerate(scales):
        for name, scale in zip(SCALE_NAMES, layer, strict=True):
            if scale.is_meta:
                raise ValueError(
                    f"layer {number}: `{name}` is offloaded and cannot be read; load the model without "
                    "`offload_buffers`"
                )
    # On one device, which layers need not be.
    layers = torch.stack([torch.stack([scale.float().cpu() for scale in layer]) for layer in scales])
    fraction, exponent = torch.frexp(layers)
    low, high = EXPONENTS
    wrong = ((fraction != 0.5) | (exponent <= low) | (exponent > high + 1)).nonzero()
    if len(wrong):
        layer, place = wrong[0, :2].tolist()
        value = float(layers[tuple(wrong[0])])
        raise ValueError(
            f"layer {layer}: `{SCALE_NAMES[place]}` holds {value}, which is no power of two from 2^{low} to "
            f"2^{high}; {_HINT}"
        )


def rotate(values: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return V `[B, H_kv, S, D]` in a basis `[H_kv, D, D]`, a direction per column, rounded once."""
    wide = torch.promote_types(values.dtype, torch.float32)
    with torch.autocast(values.device.type, enabled=False):
        return (values.to(wide) @ basis.to(wide)).to(values.dtype)


def rotate_back(out: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return attention's output `[B, H, S, D]` over V in a basis as it is over V itself."""
    batch_size, _, _, head_dim = out.shape
    of_heads = out.reshape(batch_size, len(basis), -1, head_dim)
    return rotate(of_heads, basis.mT).view(out.shape)
