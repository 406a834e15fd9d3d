"""The `masks` and `recipes` commands."""

from __future__ import annotations

import click

from leank_convert.cli.options import json_option


@click.command(short_help="List the packaged masks.")
@json_option
def masks(as_json: bool) -> None:
    """List the packaged masks: of which model, how much they prune, who made and evaluated them."""
    from leank_convert.mask_listing import render_masks

    click.echo(render_masks(as_json=as_json), nl=as_json)


@click.command()
@click.argument("name", required=False)
@click.option("--keys", is_flag=True, help="Print every key a recipe may have, with default and meaning.")
@json_option
def recipes(name: str | None, keys: bool, as_json: bool) -> None:
    """List the packaged recipes, or print the one called NAME."""
    from leank_convert.recipe_listing import render

    click.echo(render(name, keys=keys, as_json=as_json), nl=as_json)
