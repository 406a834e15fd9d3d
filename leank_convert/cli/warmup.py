"""The `warmup` command."""

from __future__ import annotations

import json
from pathlib import Path

import click

from leank_convert.cli.options import checkpoint_argument, json_option, trust_option


@click.command(short_help="Compile and check a checkpoint's kernels for this GPU.")
@checkpoint_argument
@click.option("--device", help="CUDA device to compile for. Default: the current one.")
@trust_option
@json_option
def warmup(checkpoint: Path, device: str | None, trust: bool, as_json: bool) -> None:
    """Compile and check CHECKPOINT's kernels for this machine's GPU, into TILELANG_CACHE_DIR."""
    from leank_convert.warmup import render_warm_up, warm_up

    facts = warm_up(checkpoint, device, trust=trust)
    click.echo(json.dumps(facts) if as_json else render_warm_up(facts))
