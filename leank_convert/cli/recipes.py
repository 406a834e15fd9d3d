"""The `recipes` command."""

from __future__ import annotations

import click

from leank_convert.cli.options import json_option


@click.command()
@click.argument("name", required=False)
@click.option("--keys", is_flag=True, help="Print every key a recipe may have, with default and meaning.")
@json_option
def recipes(name: str | None, keys: bool, as_json: bool) -> None:
    """List the packaged recipes, or print the one called NAME."""
    from leank_convert.recipe_listing import render

    click.echo(render(name, keys=keys, as_json=as_json), nl=as_json)
