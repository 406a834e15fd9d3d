"""Config class of a family: transformers' own reading of a config.json, with every default in it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from leank_convert.errors import LeanKError
from leank_convert.families import Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MAX_REASON = 300


def build_config(
    config: Mapping[str, object], architecture: Architecture, *, origin: str
) -> PreTrainedConfig:
    """Build the family's config object from a config.json, without running code of a checkpoint.

    Raises:
        LeanKError: If transformers refuses it, or this release of transformers has no such family.
    """
    # Imported here: it takes more than a second, which an import of the toolkit need not.
    import transformers

    config_class: Any = getattr(transformers, architecture.config_class, None)
    if config_class is None:
        raise LeanKError(
            f"`{origin}`: transformers {transformers.__version__} has no `{architecture.config_class}`, "
            f"which `model_type` `{architecture.model_type}` needs",
            hint="install a newer transformers",
        )
    values = state_rotary_dim(config, architecture)
    values.pop("model_type", None)
    with refused_by_transformers(origin):
        # The class writes into what it is given.
        built: PreTrainedConfig = config_class.from_dict(copy.deepcopy(values))
    return built


def state_rotary_dim(config: Mapping[str, object], architecture: Architecture) -> dict[str, Any]:
    """Copy a config.json and state its `rotary_dim` as `partial_rotary_factor`, too.

    MiniMax-M2's has the first alone. transformers before 5.18 reads the second alone: it rotates whole heads.
    """
    values = dict(config)
    rotated, head_dim = (values.get(key) for key in ("rotary_dim", "head_dim"))
    is_missing = architecture.partial_rotary and values.get("partial_rotary_factor") is None
    if is_missing and isinstance(rotated, int) and isinstance(head_dim, int) and head_dim > 0:
        values["partial_rotary_factor"] = rotated / head_dim
    return values


def known_keys(architecture: Architecture) -> frozenset[str]:
    """The config class's keys, by each of their names; LeanKError if transformers has no such family."""
    built = build_config({}, architecture, origin=f"defaults of {architecture.config_class}")
    return frozenset({*built.to_dict(), *built.attribute_map, *built.attribute_map.values()})


def complete_config(
    config: Mapping[str, object], architecture: Architecture, *, origin: str
) -> dict[str, Any]:
    """Complete a config.json with the defaults of the family's config class.

    Two that mean the same, an older and a newer form of it say, are equal when completed.

    Raises:
        LeanKError: As `build_config`.
    """
    built = build_config(config, architecture, origin=origin)
    with refused_by_transformers(origin):  # a key of the config may have taken the method's place
        return built.to_dict()


@contextmanager
def refused_by_transformers(origin: str) -> Iterator[None]:
    """Put what transformers says of a config.json into one LeanKError, and nothing of what it logs."""
    try:
        with quiet_transformers(logging.CRITICAL):  # it prints the whole config first
            yield
    except Exception as error:  # of as many kinds as there are keys
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"unknown value or missing key: {reason}"
        raise LeanKError(
            f"`{origin}` is refused by transformers: {reason[:_MAX_REASON]}",
            hint="compare it, and any `model.config_overrides`, with the config.json of the original model",
        ) from error


@contextmanager
def quiet_transformers(level: int) -> Iterator[None]:
    """Let transformers log nothing below a level, for a while."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(level)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
