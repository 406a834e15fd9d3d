"""The `export-onnx` command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from leank_convert.cli.export import check_choices, quiet_transformers
from leank_convert.cli.options import mask_options, out_option, overwrite_option


@click.command("export-onnx", short_help="Write MODEL's pruned ONNX graph and a host for it.")
@click.argument("model")
@out_option
@mask_options
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="Of weights and cache. float16 takes half the space, but onnxruntime's CPU converts it at every "
    "step.",
)
@click.option(
    "--weights",
    type=click.Choice(["int8", "int4"]),
    help="Quantize all weights but the embedding, not the cache. Default: as --dtype.",
)
@click.option(
    "--opset",
    type=click.IntRange(1, 100),
    default=23,
    show_default=True,
    help="Version of the ONNX operators.",
)
@overwrite_option
def export_onnx(
    model: str,
    out: Path,
    mask_path: str | None,
    dtype: str,
    weights: str | None,
    opset: int,
    overwrite: bool,
    **choices: Any,
) -> None:
    """Write MODEL's pruned ONNX graph, with a host for onnxruntime that needs no PyTorch.

    MODEL is a model, with a mask as `export` finds it, or a checkpoint that was written before: its mask and
    windows are taken.
    """
    options = check_choices(model, out, mask_path, **choices)
    quiet_transformers()
    from leank_convert.onnx import export_onnx

    options |= {"dtype": dtype, "weights": weights, "opset": opset, "overwrite": overwrite}
    click.echo(export_onnx(model, mask_path, out, **options))
