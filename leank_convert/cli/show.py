"""The commands that show what there is: `inspect`, `masks` and `recipes`."""

from __future__ import annotations

import json
import re

import click

from leank_convert.cli.options import MAX_TOKENS, check_beside, json_option
from leank_convert.errors import LeanKError, shorten

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGT", start=1)}


def _read_bytes(given: str) -> int:
    """Read an amount of memory: a number and its unit."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]i?)?B", given)
    if found is None:
        raise click.BadParameter(f"`{shorten(given)}` is no amount of memory such as 40GiB or 1.5GB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


@click.command(short_help="Show what is in a mask, checkpoint, ONNX folder or model.")
@click.argument("path")
@click.option("--with-recipe", is_flag=True, help="Print the recipe, too, that the mask was made by.")
@click.option(
    "--memory",
    type=_read_bytes,
    metavar="AMOUNT",
    help="How many requests vLLM holds in that much cache, such as 40GiB.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, MAX_TOKENS),
    help="Tokens of such a request, prompt and answer. Default: 8192.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["fp8"]),
    help="Of that cache. Default: the checkpoint's own, else the model's dtype.",
)
@json_option
def inspect(
    path: str,
    with_recipe: bool,
    memory: int | None,
    tokens: int | None,
    kv_dtype: str | None,
    as_json: bool,
) -> None:
    """Show what is in a mask, a checkpoint or an ONNX folder: widths, ratio, bytes, provenance.

    PATH is a file, a folder, or the name of a packaged mask. Of a model that is not converted, its folder,
    config.json or hub id, the bytes are shown that pruning would save.
    """
    from leank_convert.inspection import inspect_artifact, render_inspection

    check_beside("--memory", memory is not None, {"--tokens": tokens, "--kv-dtype": kv_dtype})
    facts = inspect_artifact(path, memory, tokens or 8192, kv_dtype)
    if with_recipe and not (facts.get("provenance") or {}).get("recipe"):
        raise LeanKError(
            f"`{path}` does not say by which recipe it was made", hint="leave `--with-recipe` out"
        )
    click.echo(
        json.dumps(facts) if as_json else render_inspection(facts, with_recipe=with_recipe), nl=as_json
    )


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
