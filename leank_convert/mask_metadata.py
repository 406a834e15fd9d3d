"""Checks of a mask file's header metadata: what a file claims of its mask's origin, by type and bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leank_convert.architectures import MAX_CHANNELS, MAX_HEAD_DIM, MAX_HEADS
from leank_convert.errors import LeanKError, cut, first_line
from leank_convert.fields import Fields
from leank_convert.held_out import HeldOut
from leank_convert.recipe_yaml import parse_yaml
from leank_convert.rope import check_rope_parameters
from leank_convert.windows import MAX_WINDOW, Windows

_SIZES = ("sink_size", "recent_size", "flush_size")
_MAX_NAME = 1000
_MAX_TOKENS = 2**40


def check_provenance(known: Fields, shape: Sequence[int]) -> None:
    """Check the types and bounds of a provenance, and that its sizes are those of the mask [L, H_kv, D].

    Raises:
        LeanKError: If one of them is wrong.
    """
    given = known.values.keys()
    for key in ("model", "model_type", "method", *given & {"made_by", "source", "evaluation"}):
        if len(known.text(key)) > _MAX_NAME:
            raise known.refused(key, f"longer than {_MAX_NAME} characters")
    if "layers" in given:
        _check_layers(known, shape[0])
        shape = (known.whole_number("num_hidden_layers", 1, MAX_CHANNELS), *shape[1:])
    for key, size in zip(("num_hidden_layers", "num_key_value_heads", "head_dim"), shape, strict=True):
        if known.whole_number(key, 1, MAX_CHANNELS) != size:
            raise known.refused(key, f"not the mask's {size}")
    if known.whole_number("num_attention_heads", 1, MAX_HEADS) % shape[1]:
        raise known.refused("num_attention_heads", f"not a multiple of {shape[1]} KV heads")
    sink_size, recent_size, flush_size = (known.whole_number(key, 0, MAX_WINDOW) for key in _SIZES)
    Windows(sink_size, recent_size, flush_size)
    rope = known.values["rope_parameters"]
    if not isinstance(rope, Mapping):
        raise known.refused("rope_parameters", "not an object")
    check_rope_parameters(rope, head_dim=shape[2], origin="rope_parameters")
    if "pruning_ratio_asked" in given:
        known.number("pruning_ratio_asked", 0, 1)
    if "width_multiple" in given:
        known.whole_number("width_multiple", 1, MAX_HEAD_DIM)
    if "key_mean_tokens" in given:
        known.whole_number("key_mean_tokens", 1, _MAX_TOKENS)
    if "seed" in given:
        known.whole_number("seed", 0, 2**64)
    if "recipe" in given:
        try:
            recipe = parse_yaml(known.text("recipe"))
        except ValueError as error:
            raise known.refused("recipe", f"no YAML: {first_line(error)}") from error
        if not isinstance(recipe, dict):
            raise known.refused("recipe", "no YAML of a recipe")
    versions = known.values.get("versions", {})
    if not isinstance(versions, Mapping) or not all(
        isinstance(version, str) and len(name) + len(version) <= _MAX_NAME
        for name, version in versions.items()
    ):
        raise known.refused("versions", "not an object of texts")


def read_held_out(value: Any, path: Path) -> HeldOut:
    """Read how held-out samples were answered.

    Raises:
        LeanKError: If it is something else.
    """
    if not isinstance(value, dict):
        raise LeanKError(f"mask `{path}`: header metadata `held_out` is {cut(value)}, not an object")
    try:
        return HeldOut(**value)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("held_out", *wrong["loc"])))
        problem = "is missing" if wrong["type"] == "missing" else f"is {cut(wrong['input'])}: {wrong['msg']}"
        raise LeanKError(f"mask `{path}`: header metadata `{key}` {problem}") from error


def _check_layers(known: Fields, count: int) -> None:
    """Check the numbers of a mask's layers, where it is not of all."""
    layers, most = known.values["layers"], known.whole_number("num_hidden_layers", 1, MAX_CHANNELS)
    if (
        not isinstance(layers, list)
        or not all(type(layer) is int and 0 <= layer < most for layer in layers)
        or sorted(set(layers)) != layers
        or len(layers) != count
    ):
        raise known.refused("layers", f"not the numbers of {count} of {most} layers, ascending")
