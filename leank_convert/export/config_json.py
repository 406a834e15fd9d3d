"""The `leank` block and the config.json of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from leank_convert.architectures import Architecture
from leank_convert.checkpoint_masks import FORMAT_WITH_MASK_TENSORS, encode_masks
from leank_convert.errors import LeanKError, cut
from leank_convert.export.runtime_files import auto_map
from leank_convert.head_layout import HeadLayout
from leank_convert.mask import ChannelMask, MaskProvenance
from leank_convert.windows import Windows

FORMAT_VERSION = 2
LEANK_KEYS = (
    "format_version",
    "widths",
    "head_permutation",
    "channel_masks",
    "sink_size",
    "recent_size",
    "flush_size",
    "prune",
    "pruning_ratio_asked",
    "pruning_ratio",
    "width_multiple",
    "config_overrides",
    "files",
)
# What format 2 added, and what its shards' metadata leave out: it says nothing to a reader there.
_NEW_KEYS = ("channel_masks", "config_overrides")
_NOT_IN_METADATA = ("channel_masks", "files")


def build_leank_facts(
    mask: ChannelMask,
    known: MaskProvenance,
    layout: HeadLayout,
    windows: Windows,
    config_overrides: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Build the `leank` block without its digests.

    Args:
        mask: The mask.
        known: Its provenance.
        layout: The heads' order and widths.
        windows: Window sizes.
        config_overrides: Keys of the source's config.json that were replaced, None where that is not known.
    """
    reordered = [
        mask.channel_mask[layer][list(permutation)]
        for layer, permutation in enumerate(layout.head_permutation)
    ]
    return {
        "format_version": FORMAT_VERSION,
        "widths": [list(layer) for layer in layout.widths],
        "head_permutation": [list(layer) for layer in layout.head_permutation],
        "channel_masks": encode_masks(torch.stack(reordered)),
        "sink_size": windows.sink_size,
        "recent_size": windows.recent_size,
        "flush_size": windows.flush_size,
        "prune": windows.prune,
        "pruning_ratio_asked": known.pruning_ratio_asked,
        "pruning_ratio": mask.pruning_ratio,
        "width_multiple": known.width_multiple,
        "config_overrides": None if config_overrides is None else dict(config_overrides),
    }


def leank_keys(format_version: object) -> tuple[str, ...]:
    """The keys of the `leank` block in one of the formats that are known.

    Raises:
        LeanKError: If it is another.
    """
    if format_version == FORMAT_VERSION and type(format_version) is int:
        return LEANK_KEYS
    if format_version == FORMAT_WITH_MASK_TENSORS and type(format_version) is int:
        return tuple(key for key in LEANK_KEYS if key not in _NEW_KEYS)
    raise LeanKError(
        f"`leank.format_version` is {cut(format_version)}; this release knows {FORMAT_WITH_MASK_TENSORS} and "
        f"{FORMAT_VERSION}",
        hint="update leank-convert",
    )


def metadata_facts(leank: Mapping[str, Any]) -> dict[str, Any]:
    """What every shard's header metadata carries of the `leank` block."""
    return {key: value for key, value in leank.items() if key not in _NOT_IN_METADATA}


def check_head_table(leank: Mapping[str, Any], key: str, num_layers: int, num_heads: int) -> None:
    """Check that a `leank` block has one whole number per layer and KV head under a key.

    Raises:
        LeanKError: If it has not.
    """
    rows = leank.get(key)
    if not (
        isinstance(rows, list)
        and len(rows) == num_layers
        and all(isinstance(row, list) and len(row) == num_heads for row in rows)
        and all(type(value) is int for row in rows for value in row)
    ):
        raise LeanKError(f"`leank.{key}` is no table of {num_layers} layers and {num_heads} KV heads")


def build_config(
    config: Mapping[str, Any], architecture: Architecture, leank: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, Any]:
    """Build a checkpoint's config.json from its source's.

    Args:
        config: The source's, overrides applied.
        architecture: The source's family.
        leank: The `leank` block without digests.
        files: SHA-256 by file name.
    """
    return {
        **config,
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
