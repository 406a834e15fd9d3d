"""Errors of others in the style of ours: lower case, one sentence, names in backticks, a hint.

Those of click, of files, and of libraries that fail while they are imported, with the installed versions.
"""

from __future__ import annotations

import errno
import linecache
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from traceback import walk_tb

import click

from leank_convert.errors import LeanKError, cut, first_line, shorten

_LONGEST_LINE = 1000
_OWN = "leank_convert"


def print_error(error: LeanKError) -> None:
    """Print an error to stderr, and its hint; names in them may be of any length and any characters."""
    told = f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else "")
    for line in told.split("\n"):
        click.echo(shorten(line, _LONGEST_LINE), err=True)


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments that can be no text, and those without content; raises UsageError."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        # No path has a NUL; and what is not UTF-8 could not be printed, nor stand in a file's header.
        if "\0" in argument or argument.encode(errors="replace").decode() != argument:
            raise click.UsageError(f"argument {cut(argument)} is not text in UTF-8 without NUL characters")
        # A shell makes them of variables that are not set, and an empty path is the current folder.
        if not argument or re.fullmatch(r"--[a-z-]+=", argument):
            option = argument or (before if before.startswith("-") else "")
            place = f" of `{option.removesuffix('=')}`" if option else ""
            raise click.UsageError(f"the value{place} is empty: is a variable not set?")


def restate_usage(error: click.ClickException) -> LeanKError:
    """Say in one sentence what click refuses."""
    possibilities = getattr(error, "possibilities", None)  # of an option or a command that does not exist
    said = " ".join((error.message if possibilities else error.format_message()).split())
    said = said.replace("a valid integer range", "a whole number").replace("a valid float range", "a number")
    message = re.sub(r"'([^'`]*)'", r"`\1`", said[:1].lower() + said[1:]).removesuffix(".")
    context = getattr(error, "ctx", None)
    if possibilities:
        hint = f"did you mean `{possibilities[0]}`?"
    else:
        hint = f"see `{context.command_path if context else 'leank-convert'} --help`"
    return LeanKError(shorten(message, 300), hint, error.exit_code)


def restate(error: Exception) -> LeanKError | None:
    """Say in one sentence what went wrong, be it a file or an import; None of what nobody foresaw."""
    if isinstance(error, LeanKError):
        return error
    if (refusal := _restate_import(error)) is not None or not isinstance(error, OSError):
        return refusal
    if error.errno is None:  # a library's, whose sentence it is
        return LeanKError(first_line(error))
    name = str(error.filename or "output")
    name = cut(name) if error.errno == errno.ENAMETOOLONG else f"`{name}`"
    return LeanKError(f"{name}: {error.strerror or first_line(error)}")


def _restate_import(error: Exception) -> LeanKError | None:
    """Say which library failed while code of ours imported it; None if something else failed."""
    library = _library_of(error)
    if library is None:
        return None
    versions = {}
    for name in (library, "torch", "transformers"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    own = versions.pop(library, None)
    others = " and ".join(f"{name} {found}" for name, found in versions.items())
    beside = f" with {others}" if others else ""
    message = f"{library} {own} cannot be imported{beside}" if own else f"{library} cannot be imported"
    wanted = _requirements({library, "torch", "transformers"})
    said = first_line(error).rstrip(".")
    return LeanKError(f"{message}: {said}", f"pip install -U {' '.join(wanted)}")


def _library_of(error: Exception) -> str | None:
    """The library of the import statement of ours during which an error came; None outside of one."""
    own = [
        linecache.getline(frame.f_code.co_filename, line).split()
        for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).split(".")[0] == _OWN
    ]
    if not own or own[-1][:1] not in (["import"], ["from"]):
        return None
    library = own[-1][1].split(".")[0]
    return library if library != _OWN else None


def _requirements(libraries: set[str]) -> list[str]:
    """What this release asks of libraries, as pip's arguments, in its own order."""
    try:
        asked = distribution("leank-convert").requires or []
    except PackageNotFoundError:
        asked = []
    known = {re.split(r"[^\w.-]", text, maxsplit=1)[0]: text for text in asked if "extra ==" not in text}
    return [f'"{text}"' for name, text in known.items() if name in libraries] or sorted(libraries)
