"""The `leank` block of a checkpoint's config.json: keys, reading, consistency checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from leank_convert._runtime.configuration_leank import FORMAT_VERSION, LeanKSettings, read_settings
from leank_convert.architectures import ModelFacts
from leank_convert.errors import LeanKError, cut
from leank_convert.fields import first_problem

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
# How many directions of V every head keeps of a pruned token `[L][H_kv]`, where the mask prunes V.
VALUE_WIDTHS_KEY = "value_widths"
# True where the runtime rotates V into the mask file's basis as it is stored, as it is not in the weights.
VALUE_BASIS_KEY = "value_basis"
_LARGEST = 2**63 - 1
# What the shards' metadata leave out: it says nothing to a reader there.
_NOT_IN_METADATA = ("channel_masks", "files")


class _MeasuredOn(BaseModel, strict=True, extra="forbid"):
    """The data that FP8 scales were measured on."""

    num_tokens: Annotated[int, Field(ge=1, le=_LARGEST)]
    tasks: list[str]
    seed: Annotated[int, Field(ge=0, le=_LARGEST)]


class _Told(BaseModel, strict=True):
    """Values that neither the runtime nor the mask depends on."""

    pruning_ratio_asked: float | None
    width_multiple: int | None
    config_overrides: dict[str, Any] | None
    kv_scales: _MeasuredOn | None = None


def metadata_facts(leank: Mapping[str, Any]) -> dict[str, Any]:
    """What every shard's header metadata carries of a block."""
    return {key: value for key, value in leank.items() if key not in _NOT_IN_METADATA}


def encode_masks(channel_masks: Tensor) -> list[str]:
    """Write masks bool [L, H_kv, D] as hex digits, a string per layer; a byte's highest bit comes first."""
    return [layer.tobytes().hex() for layer in np.packbits(channel_masks.cpu().numpy(), axis=-1)]


def read_block(leank: Mapping[str, Any], facts: ModelFacts, *, origin: str) -> LeanKSettings:
    """Read a block as the checkpoint's own runtime does, and check what that takes on trust.

    Windows, widths and channel masks are in the checkpoint's head order; the facts are of its source.

    Raises:
        LeanKError: If it is of another format, lacks a key, or contradicts itself or the model.
    """
    kinds = ["full_attention" if n in facts.layers else "other" for n in range(facts.num_hidden_layers)]
    config: Any = SimpleNamespace(
        leank=leank, num_key_value_heads=facts.num_key_value_heads, head_dim=facts.head_dim, layer_types=kinds
    )
    try:
        settings = read_settings(config)
        _check_keys(leank)
        _check_values(leank, facts)
    except (ValueError, LeanKError) as error:
        raise LeanKError(
            f"`{origin}`: {getattr(error, 'message', str(error)).removeprefix('config.json: ')}",
            hint="export the checkpoint again; `leank-convert verify` lists everything that is wrong",
        ) from error
    return settings


def _check_keys(leank: Mapping[str, Any]) -> None:
    expected = set(LEANK_KEYS) | set(CACHE_KEYS if not leank.keys().isdisjoint(CACHE_KEYS) else ())
    expected |= {LAYERS_KEY, KEY_MEAN_KEY, VALUE_WIDTHS_KEY, VALUE_BASIS_KEY} & leank.keys()
    for key in sorted(expected - set(leank)):
        raise LeanKError(f"the `leank` block has no `{key}`")
    for key in sorted(set(leank) - expected):
        raise LeanKError(f"the `leank` block has key {cut(key)}, which format {FORMAT_VERSION} does not know")


def _check_values(leank: Mapping[str, Any], facts: ModelFacts) -> None:
    for layer, row in enumerate(leank["widths"]):
        if row != sorted(row):
            raise LeanKError(f"`leank.widths[{layer}]` is {cut(row)}, not ascending")
    total = math.prod(facts.mask_shape)
    reached, given = 1 - sum(map(sum, leank["widths"])) / total, leank["pruning_ratio"]
    if type(given) not in (int, float) or not math.isclose(reached, given, abs_tol=1e-9):
        raise LeanKError(f"`leank.pruning_ratio` is {cut(given)}; the widths give {reached}")
    try:
        told = _Told.model_validate(leank)
    except ValidationError as error:
        raise first_problem(error, "`leank.") from None
    if told.kv_scales is not None and leank.get("kv_dtype") == "int4":
        raise LeanKError("`leank.kv_scales` goes with `kv_dtype` `fp8`; an int4 cache has none")
