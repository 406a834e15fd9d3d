"""Errors a user can act on: one message, one hint, one exit code."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class LeanKError(Exception):
    """A mistake or a fault in one sentence, with a remedy where there is one.

    `str(error)` is both, in Python's words: an option of the command line is the argument that it gives. The
    command line prints ``error: <message>`` and ``hint: <hint>`` as they are, and leaves with `exit_code`.

    Args:
        message: What is wrong; names the file, tensor or key, and the value.
        hint: What to do about it. Options stand in backticks, alone or with their value.
        exit_code: The process's exit code: 2 for what the user can fix.
    """

    def __init__(self, message: str, hint: str | None = None, exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        told = self.message + (f"\nhint: {self.hint}" if self.hint else "")
        return re.sub(r"`--([a-z-]+)(?: ([^`]+))?`", _restate_option, told)


class RecipeError(LeanKError):
    """What is wrong with one recipe: a sentence per problem, without its name."""

    def __init__(self, name: str, problems: Sequence[str], hint: str | None = None) -> None:
        self.problems = tuple(problems)
        listed = "".join(f"\n  {problem}" for problem in problems)
        what = problems[0] if len(problems) == 1 else f"{len(problems)} problems:{listed}"
        super().__init__(f"recipe `{shorten(name)}`: {what}", hint)


class NotFiniteError(LeanKError):
    """Numbers that are not finite, as a sentence says; exit code 1."""

    def __init__(self, message: str) -> None:
        hint = "float16 overflows where bfloat16 and float32 do not: see `model.dtype`"
        super().__init__(message, hint, exit_code=1)


class LeanKMemoryError(LeanKError):
    """Memory does not suffice; with less to hold it may."""


_SWITCHES = ("all-channels", "force", "overwrite", "resume", "trust")
_LISTS = {"length": "lengths", "set": "overrides", "task": "tasks"}


def _restate_option(found: re.Match[str]) -> str:
    """`--overwrite` as `overwrite=True`, `--set a=b` as `overrides=["a=b"]`."""
    option, value = found[1], "True" if found[1] in _SWITCHES else found[2]
    if value and value != "True" and not value.isdigit():
        value = '"' + value.strip("'") + '"'
    if value and option in _LISTS:
        value = f"[{value}]"
    name = _LISTS.get(option, option.replace("-", "_"))
    return f"`{name}={value}`" if value else f"`{name}`"


_CUT_LENGTH = 120
_CUT = reprlib.Repr()
_CUT.maxstring = _CUT.maxother = _CUT.maxlong = 80
_CUT.maxlevel = 3


def cut(value: object) -> str:
    """A value for a message, short however large or deep it is.

    Text comes in quotes, so that `1` and `"1"` differ.
    """
    if isinstance(value, int) and abs(value) >= 10**40:  # its digits alone may take minutes
        return f"an integer of {value.bit_length()} bits"
    text = _CUT.repr(value)
    return text if len(text) <= _CUT_LENGTH else f"{text[:_CUT_LENGTH]}…"


def shorten(text: str, length: int = 80) -> str:
    """A name for a message, in one line and cut short; without quotes, unlike `cut`."""
    start = text[:length]
    shown = start if start.isprintable() else repr(start)[1:-1]
    return shown if len(text) <= length else f"{shown}…"


def first_line(error: Exception) -> str:
    """The first line of an error's message, cut short; the hub's errors go on with request ids and advice."""
    return shorten((str(error).strip().splitlines() or [type(error).__name__])[0], 300)


@contextmanager
def out_of_memory(what: str, hint: str) -> Iterator[None]:
    """Say what memory does not suffice for, such as `8 prompts`, instead of torch's or numpy's error.

    Raises:
        LeanKMemoryError: In place of `torch.OutOfMemoryError` or `MemoryError`; exit code 1.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # By its name: this module is read where torch is not, and `torch.OutOfMemoryError` is a RuntimeError.
        # On the CPU torch has no error of its own for it.
        if (
            isinstance(error, RuntimeError)
            and type(error).__name__ != "OutOfMemoryError"
            and "can't allocate memory" not in str(error)
        ):
            raise
        raise LeanKMemoryError(
            f"memory does not suffice for {what}: {first_line(error)}", hint=hint, exit_code=1
        ) from error
