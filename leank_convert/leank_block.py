"""The `leank` block of a checkpoint's config.json: its keys, and whether it makes sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from leank_convert.architectures import ModelFacts
from leank_convert.errors import LeanKError, cut
from leank_convert.windows import Windows

FORMAT_VERSION = 1
KV_DTYPES = ("fp8", "int4")
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
# What a checkpoint says that stores its cache in another dtype than keys and values have.
CACHE_KEYS = ("kv_dtype", "kv_scales")
# The numbers of the layers that are pruned, L of them, where not all are.
LAYERS_KEY = "layers"
# True where the mask file holds a mean of keys, which comes off every key before it is stored.
KEY_MEAN_KEY = "key_mean"
# What the shards' metadata leave out: it says nothing to a reader there.
_NOT_IN_METADATA = ("channel_masks", "files")


def metadata_facts(leank: Mapping[str, Any]) -> dict[str, Any]:
    """What every shard's header metadata carries of a block."""
    return {key: value for key, value in leank.items() if key not in _NOT_IN_METADATA}


def read_windows(leank: Mapping[str, Any]) -> Windows:
    """Read a checkpoint's window sizes, and when it prunes.

    Raises:
        LeanKError: If one makes no sense.
    """
    return Windows(*(leank[key] for key in ("sink_size", "recent_size", "flush_size", "prune")))


def check_block(leank: Mapping[str, Any], facts: ModelFacts, *, origin: str) -> None:
    """Check a block, but for its masks and digests.

    Args:
        leank: The block.
        facts: Of the model that the checkpoint was made from.
        origin: The config.json, for messages.

    Raises:
        LeanKError: If it is of another format, lacks a key, or contradicts itself or the model.
    """
    try:
        _check_keys(leank)
        read_windows(leank)
        _check_heads(leank, facts)
        _check_values(leank, facts)
    except LeanKError as error:
        raise LeanKError(
            f"`{origin}`: {error}",
            hint=error.hint or "`leank-convert verify` lists everything that is wrong with a checkpoint",
        ) from error


def _check_keys(leank: Mapping[str, Any]) -> None:
    version = leank.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise LeanKError(
            f"`leank.format_version` is {cut(version)}; this release reads {FORMAT_VERSION}",
            hint="update leank-convert",
        )
    expected = set(LEANK_KEYS) | set(CACHE_KEYS if not leank.keys().isdisjoint(CACHE_KEYS) else ())
    expected |= {LAYERS_KEY, KEY_MEAN_KEY} & leank.keys()
    for key in sorted(expected - set(leank)):
        raise LeanKError(f"the `leank` block has no `{key}`")
    for key in sorted(set(leank) - expected):
        raise LeanKError(f"the `leank` block has key {cut(key)}, which format {version} does not know")


def _check_heads(leank: Mapping[str, Any], facts: ModelFacts) -> None:
    num_layers, num_heads, head_dim = facts.mask_shape
    if leank.get(LAYERS_KEY, list(range(facts.num_hidden_layers))) != list(facts.layers):
        raise LeanKError(
            f"`leank.{LAYERS_KEY}` is {cut(leank.get(LAYERS_KEY))}, not the layers with full attention, "
            f"{list(facts.layers)}"
        )
    for key in ("widths", "head_permutation"):
        rows = leank[key]
        if not (
            isinstance(rows, list)
            and len(rows) == num_layers
            and all(isinstance(row, list) and len(row) == num_heads for row in rows)
            and all(type(value) is int for row in rows for value in row)
        ):
            raise LeanKError(f"`leank.{key}` is no table of {num_layers} layers and {num_heads} KV heads")
    for layer, (row, order) in enumerate(zip(leank["widths"], leank["head_permutation"], strict=True)):
        if row != sorted(row) or row[0] < 0 or row[-1] > head_dim:
            raise LeanKError(f"`leank.widths[{layer}]` is {cut(row)}, not ascending within 0 and {head_dim}")
        if sorted(order) != list(range(num_heads)):
            raise LeanKError(f"`leank.head_permutation[{layer}]` is {cut(order)}, no permutation")
        # Stable: heads of one width keep the order they had.
        if any(a == b and i > j for (a, i), (b, j) in pairwise(zip(row, order, strict=True))):
            raise LeanKError(f"`leank.head_permutation[{layer}]` is {cut(order)}, not stable within a bucket")


def _check_values(leank: Mapping[str, Any], facts: ModelFacts) -> None:
    total = math.prod(facts.mask_shape)
    reached, given = 1 - sum(map(sum, leank["widths"])) / total, leank["pruning_ratio"]
    if type(given) not in (int, float) or not math.isclose(reached, given, abs_tol=1e-9):
        raise LeanKError(f"`leank.pruning_ratio` is {cut(given)}; the widths give {reached}")
    for key, kinds, what in (
        ("pruning_ratio_asked", (int, float), "no number"),
        ("width_multiple", (int,), "no whole number"),
        ("config_overrides", (dict,), "no object"),
    ):
        value = leank.get(key)
        if value is not None and type(value) not in kinds:
            raise LeanKError(f"`leank.{key}` is {cut(value)}, {what}")
    if leank.get(KEY_MEAN_KEY, True) is not True:
        raise LeanKError(f"`leank.{KEY_MEAN_KEY}` is {cut(leank[KEY_MEAN_KEY])}, not true")
    if "kv_dtype" in leank and leank["kv_dtype"] not in KV_DTYPES:
        raise LeanKError(f"`leank.kv_dtype` is {cut(leank['kv_dtype'])}, not one of {', '.join(KV_DTYPES)}")
    scales = leank.get("kv_scales")
    if scales is not None and not (isinstance(scales, dict) and type(scales.get("num_tokens")) is int):
        raise LeanKError(f"`leank.kv_scales` is {cut(scales)}, no object with `num_tokens`")
    if scales is not None and leank.get("kv_dtype") == "int4":
        raise LeanKError("`leank.kv_scales` goes with `kv_dtype` `fp8`; an int4 cache has none")
