"""Refusals of click's own in the style of all others: lower case, names in backticks, a hint."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from leank_convert.errors import LeanKError, cut, shorten

_LONGEST_LINE = 1000


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


def restate(error: click.ClickException) -> LeanKError:
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
