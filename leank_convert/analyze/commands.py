"""The `analyze` command: options, and one call each. Imports torch only inside it."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("artifact", metavar="MASK|CKPT")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="Folder to write: a page that opens offline, its figures as PNG, the numbers as JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document to stdout.")
def analyze(artifact: str, out: Path | None, as_json: bool) -> None:
    """Tell how a mask's channels are distributed: over RoPE pairs, layers and heads, and what that saves.

    MASK|CKPT is a mask file, a training run, a converted checkpoint, or the hub id of one. Writes files only
    with --out.
    """
    from leank_convert.analyze.distribution import analyze_mask
    from leank_convert.analyze.report import check_writable, describe, write_analysis
    from leank_convert.analyze.source import load_artifact
    from leank_convert.analyze.text import render_analysis

    if out is not None:
        check_writable(out)
    mask, element_bytes = load_artifact(artifact)
    analysis = analyze_mask(mask, element_bytes)
    if out is not None:
        for path in write_analysis(mask, analysis, artifact, out):
            click.echo(path, err=True)
    if as_json:
        click.echo(json.dumps(analysis.to_dict()))
    else:
        click.echo(render_analysis(describe(analysis, artifact), analysis), nl=False)
