"""The `analyze` command: options, and a call for each part of the analysis."""

from __future__ import annotations

from pathlib import Path

import click

from leank_convert.cli.options import (
    MAX_COUNT,
    SEED,
    check_beside,
    device_option,
    json_option,
    print_result,
    recipe_option,
    results_option,
    set_option,
)


@click.command(short_help="Show how a mask's channels are distributed.")
@click.argument("artifact", metavar="MASK|CKPT")
@click.option("--model", help="The mask's model: measures its queries and keys, too.")
@click.option(
    "-n",
    "--num-samples",
    type=click.IntRange(1, MAX_COUNT),
    help="Prompts of each task at each of four lengths. Default: 2.",
)
@click.option("--seed", type=SEED, help="Held-out prompts. Default: 1000000.")
@recipe_option
@set_option
@device_option
@results_option("Folder to write: a page that opens offline, and the numbers as JSON.")
@json_option
def analyze(
    artifact: str,
    model: str | None,
    num_samples: int | None,
    seed: int | None,
    recipe_name: str | None,
    overrides: tuple[str, ...],
    device: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Show how a mask's channels are distributed: over RoPE pairs, layers and heads, and what that saves.

    MASK|CKPT is a mask file, a training run, a converted checkpoint, or the hub id of one. With --model: also
    whether the same channels are large in every task and at every length, and which heads live on high
    frequencies. Writes files only with --out.
    """
    given = {"--recipe": recipe_name, "--set": overrides, "--device": device}
    check_beside("--model", model is not None, {**given, "--num-samples": num_samples, "--seed": seed})
    from leank_convert.analyze.report import AnalysisReport, check_writable, load_artifact
    from leank_convert.report.distribution import analyze_mask

    if out is not None:
        check_writable(out)
    mask, element_bytes, kv_dtype = load_artifact(artifact)
    measured = None
    if model is not None:
        from leank_convert.analyze.measurement import measure
        from leank_convert.files import user_path
        from leank_convert.recipe_file import require_recipe

        recipe = require_recipe(recipe_name, model, run=user_path(artifact), overrides=overrides)
        asked = {"num_samples": num_samples or 2, "seed": 1_000_000 if seed is None else seed}
        measured = measure(mask, artifact, model, recipe, **asked, device=device, progress=True)
    report = AnalysisReport(mask, analyze_mask(mask, element_bytes, kv_dtype), measured, artifact)
    if out is not None:
        click.echo(report.write(out), err=True)
    print_result(report, AnalysisReport.to_text, None, as_json=as_json)
