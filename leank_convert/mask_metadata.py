"""Codec of a mask file's header metadata: a data class to texts by key, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from leank_convert.errors import LeanKError, cut
from leank_convert.files import parse_json

# Entries that stand there as they are; all others are JSON.
_TEXTS = {"model", "model_type", "method", "recipe", "made_by", "source", "evaluation", "value_weights"}
_Record = TypeVar("_Record")


def encode(record: Any) -> dict[str, str]:
    """Turn a data class into texts, without those of its fields that are None."""
    values = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {
        name: value if name in _TEXTS else encode_value(value)
        for name, value in values.items()
        if value is not None
    }


def encode_value(value: object) -> str:
    """Turn a value into JSON; equal values give equal texts."""
    return json.dumps(value, sort_keys=True, default=lambda it: vars(it) if is_dataclass(it) else {**it})


def decode(kind: type[_Record], metadata: Mapping[str, str]) -> _Record:
    """Read a data class; the file may come from others.

    Raises:
        LeanKError: If a field is missing, or is not of its type or within its bounds.
    """
    values = {}
    for name in {entry.name for entry in fields(kind)} & metadata.keys():  # type: ignore[arg-type]
        try:
            values[name] = metadata[name] if name in _TEXTS else parse_json(metadata[name].encode())
        except ValueError as error:
            raise LeanKError(f"header metadata `{name}` is {cut(metadata[name])}, no JSON") from error
    try:
        # As JSON, of which strict pydantic makes tuples and data classes.
        return TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        problem = "is missing" if wrong["type"] == "missing" else f"is {cut(wrong['input'])}: {wrong['msg']}"
        raise LeanKError(f"header metadata `{'.'.join(map(str, wrong['loc']))}` {problem}") from error
