"""The `inspect` command."""

from __future__ import annotations

import json
from pathlib import Path

import click

from leank_convert.cli.options import json_option


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--with-recipe", is_flag=True, help="Print the recipe, too, that the mask was made by.")
@json_option
def inspect(path: Path, with_recipe: bool, as_json: bool) -> None:
    """Show what is in a mask, a checkpoint or an ONNX folder: widths, ratio, bytes, provenance.

    PATH is a file, a folder, or the name of a packaged mask.
    """
    from leank_convert.inspection import inspect_artifact, render_inspection

    facts = inspect_artifact(path)
    click.echo(
        json.dumps(facts) if as_json else render_inspection(facts, with_recipe=with_recipe), nl=as_json
    )
