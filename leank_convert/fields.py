"""Typed, range-checked access to a JSON object's values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leank_convert.errors import LeanKError, cut

if TYPE_CHECKING:
    from pydantic import ValidationError


@dataclass(frozen=True)
class Fields:
    """The values of one JSON object."""

    values: Mapping[str, object]  # by key
    origin: str  # where they stand, for messages

    def whole_number(self, key: str, least: int, most: int) -> int:
        """An integer within bounds, both included; LeanKError if it is missing or something else."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refused(key, f"not a whole number from {least} to {most}")
        return value

    def number(self, key: str, least: float, most: float, *, below: bool = False) -> float:
        """A finite number within bounds, both included, or `below` the upper one; LeanKError if not."""
        value = self.values.get(key)
        outside = isinstance(value, bool) or (below and value == most)
        if not isinstance(value, int | float) or outside or not least <= value <= most:
            bound = f"below {most:g}" if below else f"{most:g}"
            raise self.refused(key, f"not a number from {least:g} to {bound}")
        return value

    def flag(self, key: str) -> bool:
        """True or false, false where it is missing; LeanKError if it is something else."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.refused(key, "neither true nor false")
        return value

    def text(self, key: str, choices: Collection[str] | None = None) -> str:
        """A text, one of `choices` where they are given; LeanKError if it is missing or something else."""
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.refused(key, "not a text")
        if choices is not None and value not in choices:
            raise self.refused(key, f"not one of {', '.join(choices)}")
        return value

    def refused(self, key: str, reason: str) -> LeanKError:
        """The error that says why a value is refused."""
        if key not in self.values:
            return LeanKError(f"`{self.origin}` has no `{key}`")
        return LeanKError(f"`{self.origin}`: `{key}` is {cut(self.values[key])}, {reason}")


def first_problem(error: ValidationError, start: str) -> LeanKError:
    """The error that says what pydantic refuses first, in a sentence of `start`, the key and why."""
    wrong = error.errors(include_url=False)[0]
    problem = "is missing" if wrong["type"] == "missing" else f"is {cut(wrong['input'])}: {wrong['msg']}"
    return LeanKError(f"{start}{'.'.join(map(str, wrong['loc']))}` {problem}")
