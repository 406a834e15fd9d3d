"""What the benchmark commands share: how sizes and layers are read, how one ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click


def sizes(*names: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that reads whole numbers between `x`, such as `64x32k`; `k` is 1024."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(_read_size(part) for part in text.lower().split("x"))
        except ValueError:
            numbers = ()
        if len(numbers) != len(names) or min(numbers) < 1:
            example = "x".join(("64", "32k", "128")[: len(names)])
            raise click.BadParameter(f"`{text}` is not {' x '.join(names)}, such as {example}")
        return numbers

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return None if value is None else read(value)
        return [read(text) for text in value]

    return callback


def _read_size(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def read_layers(ctx: click.Context, param: click.Parameter, value: str) -> list[int] | None:
    """A callback that reads layers between commas; None for `all`."""
    if value == "all":
        return None
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"`{value}` is neither `all` nor layers such as `0,10`") from None


def finish(document: dict[str, Any]) -> None:
    """Print a command's document, and exit 1 where a check failed."""
    from leank_convert.benchmark.report import render_json

    click.echo(render_json(document))
    if not document["ok"]:
        sys.exit(1)
