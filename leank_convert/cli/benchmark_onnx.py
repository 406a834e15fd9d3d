"""The `benchmark onnx` command."""

from __future__ import annotations

import os

import click

from leank_convert.benchmark.geometries import GEOMETRIES
from leank_convert.cli.benchmark_options import finish, read_layers, sizes

_TOY = "tiny"
_LENGTHS = [4096, 8192, 16384, 32768]
_TOY_LENGTHS = [3, 96]
_THREADS = 2


def _read_some(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    if value == "all":
        raise click.BadParameter("a model of all layers would not be one of a few hundred MB; name some")
    return None if value is None else read_layers(ctx, param, value)


@click.command()
@click.option("--mask", metavar="FILE|ID", help="Mask to run with. Default: a synthetic one.")
@click.option("--recipe", metavar="NAME|FILE", help="Take mask, windows and shape from a recipe.")
@click.option(
    "--geometry",
    type=click.Choice(list(GEOMETRIES)),
    help=f"Attention's shape. Default: the mask's if there is one, else Llama's; `{_TOY}` tests the command.",
)
@click.option(
    "--length",
    "lengths",
    callback=sizes("tokens"),
    multiple=True,
    metavar="TOKENS",
    help="Cached tokens; repeatable. Default: 4k, 8k, 16k and 32k.",
)
@click.option(
    "--layers",
    callback=_read_some,
    metavar="0,10",
    help="Layers of the mask. Default: four that take about the whole mask's share of bytes.",
)
@click.option(
    "--weights",
    type=click.Choice(["float32", "int8", "int4"]),
    default="float32",
    show_default=True,
    help="Of both graphs; the caches stay float32.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help=f"Of onnxruntime. Default: {_THREADS}, or as many cores as there are.",
)
@click.option(
    "--rounds", type=click.IntRange(1), help="Measurements of each figure. Default: 21, of a toy 3."
)
def onnx(
    mask: str | None,
    recipe: str | None,
    geometry: str | None,
    lengths: list[tuple[int, ...]],
    layers: list[int] | None,
    weights: str,
    threads: int | None,
    rounds: int | None,
) -> None:
    """A decode step on onnxruntime against the same exporter's dense graph, on the CPU."""
    from leank_convert.benchmark.onnx_decoding import benchmark_onnx
    from leank_convert.benchmark.subject import choose_subject

    toy = geometry == _TOY
    document = benchmark_onnx(
        choose_subject(mask, recipe, geometry),
        [tokens for (tokens,) in lengths] or (_TOY_LENGTHS if toy else _LENGTHS),
        layers=layers,
        weights=None if weights == "float32" else weights,
        threads=threads or min(_THREADS, os.cpu_count() or 1),
        rounds=rounds or (3 if toy else 21),
    )
    finish(document)
