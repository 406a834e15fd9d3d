"""The `verify` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from leank_convert.cli.export import quiet_transformers
from leank_convert.cli.options import json_option
from leank_convert.tables import listing


@click.command(short_help="Check a checkpoint or an ONNX folder.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--source",
    metavar="MODEL",
    help="The model it was made from: compares weights, config and tokenizer; for an ONNX folder, what both "
    "make of a prompt.",
)
@json_option
def verify(folder: Path, source: str | None, as_json: bool) -> None:
    """Check a checkpoint or an ONNX folder: digests, shapes, masks, the graph. Exits 1 if any fails.

    Nothing of a checkpoint is run; a graph is, by onnxruntime. With --source all that a checkpoint takes over
    from the model, and the answers of a graph, are compared with the model's.
    """
    if source is not None:
        quiet_transformers()
    from leank_convert.verify import verify_checkpoint

    report = verify_checkpoint(folder, source)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        rows = [("ok" if check.ok else "FAIL", f"{check.name}: {check.detail}") for check in report.checks]
        click.echo("\n".join(listing(rows)))
    if not report.ok:
        sys.exit(1)
