"""Refusals of click's own in the style of all others: lower case, names in backticks, a hint."""

from __future__ import annotations

import re

import click

from leank_convert.errors import LeanKError, shorten


def print_error(error: LeanKError) -> None:
    """Print an error to stderr, and its hint."""
    click.echo(f"error: {error}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)


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
