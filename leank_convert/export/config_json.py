"""The `leank` block and the config.json of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from leank_convert._runtime.configuration_leank import FORMAT_VERSION
from leank_convert.config_class import state_rotary_dim
from leank_convert.export.runtime_files import auto_map
from leank_convert.families import Architecture
from leank_convert.head_layout import HeadLayout
from leank_convert.leank_block import (
    KEY_MEAN_KEY,
    LAYERS_KEY,
    VALUE_BASIS_KEY,
    VALUE_WIDTHS_KEY,
    encode_masks,
)
from leank_convert.mask import ChannelMask
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.mask_tensor import in_checkpoint_order
from leank_convert.windows import Windows


def build_leank_facts(
    mask: ChannelMask,
    known: MaskProvenance,
    layout: HeadLayout,
    windows: Windows,
    config_overrides: Mapping[str, Any],
    cache: Mapping[str, Any] = MappingProxyType({}),
    *,
    folds_values: bool = True,
) -> dict[str, Any]:
    """Build the `leank` block without its digests; `cache` is what `kv_scales.describe_cache` says.

    `folds_values` tells whether a basis of V is in the weights, else the runtime rotates V into it.
    """
    orders, values = layout.head_permutation, mask.value_widths
    return {
        "format_version": FORMAT_VERSION,
        "widths": [list(layer) for layer in layout.widths],
        "head_permutation": [list(layer) for layer in orders],
        "channel_masks": encode_masks(in_checkpoint_order(mask.channel_mask, orders)),
        **windows.sizes,
        "prune": windows.prune,
        "pruning_ratio_asked": known.pruning_ratio_asked,
        "pruning_ratio": mask.pruning_ratio,
        "width_multiple": known.width_multiple,
        "config_overrides": dict(config_overrides),
        **cache,
        **({} if known.layers is None else {LAYERS_KEY: list(known.layers)}),
        **({} if mask.key_mean is None else {KEY_MEAN_KEY: True}),
        **({} if values is None else {VALUE_WIDTHS_KEY: in_checkpoint_order(values, orders).tolist()}),
        **({} if values is None or folds_values else {VALUE_BASIS_KEY: True}),
    }


def build_config(
    config: Mapping[str, Any], architecture: Architecture, leank: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, Any]:
    """Build a checkpoint's config.json from its source's, overrides applied, and SHA-256 by file name."""
    return {
        **state_rotary_dim(config, architecture),
        "model_type": architecture.leank_model_type,
        "architectures": [f"LeanK{architecture.causal_lm_class}"],
        "auto_map": auto_map(architecture),
        "leank": {**leank, "files": dict(sorted(files.items()))},
    }


def encode_json(value: object) -> bytes:
    """Encode a JSON file; lists of plain numbers stay on one line."""
    return (_encode(value, 0) + "\n").encode()


def _encode(value: object, depth: int) -> str:
    plain = isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
    if not isinstance(value, dict | list) or not value or plain:
        return json.dumps(value, ensure_ascii=False)
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict):
        lines = [
            f"{inner}{json.dumps(str(key), ensure_ascii=False)}: {_encode(item, depth + 1)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{outer}}}"
    return "[\n" + ",\n".join(inner + _encode(item, depth + 1) for item in value) + f"\n{outer}]"
