"""The `adapter` command."""

from __future__ import annotations

from pathlib import Path

import click

from leank_convert.cli.export import quiet_transformers
from leank_convert.cli.options import out_option


@click.command(short_help="Convert a LoRA of the original for a checkpoint.")
@click.argument("lora")
@click.option("--checkpoint", required=True, metavar="OUT", help="The checkpoint that it is to be loaded on.")
@out_option
def adapter(lora: str, checkpoint: str, out: Path) -> None:
    """Convert LORA, an adapter of the original model, for a checkpoint made from it.

    There KV heads are in another order. The result is loaded by PEFT or `model.load_adapter`, and then does
    what LORA does to the original. LORA is a folder or a hub id. DoRA, biases and modules that were trained
    whole are converted, too.
    """
    quiet_transformers()
    from leank_convert.export.adapter import convert_adapter

    click.echo(convert_adapter(lora, checkpoint, out))
