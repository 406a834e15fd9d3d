"""The command line: reads options, calls the toolkit, prints. Imports torch only inside a command.

Text for people goes to stderr, results to stdout; `--json` makes stdout one JSON document.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leank_convert.analyze.commands import analyze
from leank_convert.benchmark.commands import benchmark, warmup
from leank_convert.errors import LeanKError
from leank_convert.evaluate.commands import evaluate
from leank_convert.export_command import check_hub_options, export, finish_export, quiet_transformers
from leank_convert.options import (
    hub_options,
    json_option,
    method_options,
    recipe_option,
    set_option,
    window_options,
)

if TYPE_CHECKING:
    from leank_convert.recipe import Recipe


class _Group(click.Group):
    """Turns the toolkit's errors into `error:` and `hint:` lines and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LeanKError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"error: {error}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            raise  # click's own: the reader of stdout has gone
        except OSError as error:
            # A full disk, a folder that may not be written: nothing a traceback would explain.
            if ctx.params.get("debug") or error.strerror is None:
                raise
            click.echo(f"error: `{error.filename or 'output'}`: {error.strerror}", err=True)
            ctx.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="leank-convert")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Learn which channels of an LLM's K cache it needs; write a checkpoint that keeps only those."""
    logging.basicConfig(
        format="%(levelname)s: %(message)s",
        level=logging.DEBUG if debug else logging.WARNING,
        stream=sys.stderr,
    )
    logging.addLevelName(logging.WARNING, "warning")


@main.command()
@click.argument("model")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write. Needed unless --dry-run.",
)
@recipe_option
@set_option
@method_options
@click.option(
    "--pruning-ratio",
    "pruning_ratios",
    type=click.FloatRange(0, 1, max_open=True),
    multiple=True,
    help="Share of channels to remove. Repeated: a checkpoint of each, OUT/ratio-0.5 and its like.",
)
@window_options
@click.option("--seed", type=click.IntRange(0), help="Seed of the samples, and of a random mask.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option("--mask-only", is_flag=True, help="Stop at the mask: write no checkpoint.")
@click.option("--device", help="Device to train on. Default: cuda if there is one, else cpu.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print steps, tokens, memory and time by a measured prefill; train nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON document.")
@hub_options
def train(
    model: str,
    out: Path | None,
    recipe_name: str | None,
    overrides: tuple[str, ...],
    method: str | None,
    budget: str | None,
    pruning_ratios: tuple[float, ...],
    sink_size: int | None,
    recent_size: int | None,
    flush_size: int | None,
    seed: int | None,
    resume: bool,
    mask_only: bool,
    device: str | None,
    dry_run: bool,
    as_json: bool,
    repo_id: str | None,
    private: bool,
) -> None:
    """Learn MODEL's channel mask and write its pruned checkpoint.

    MODEL is a hub id, a local folder, or `testbed`, the small model that ships with leank-convert. Started by
    `torchrun -m leank_convert train …` or `accelerate launch`, several GPUs share the samples of a step.
    """
    if mask_only and repo_id:
        raise click.UsageError("--mask-only writes no checkpoint that --push-to-hub could upload")
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    check_hub_options(repo_id, private)
    flags = {
        "method": method,
        "budget": budget,
        "pruning_ratio": pruning_ratios[0] if len(pruning_ratios) == 1 else pruning_ratios or None,
        "windows.sink_size": sink_size,
        "windows.recent_size": recent_size,
        "windows.flush_size": flush_size,
        "seed": seed,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    from leank_convert.recipe_file import find_recipe, load_recipe

    recipe = load_recipe(recipe_name or find_recipe(model), overrides, flags=given)
    if repo_id and len(recipe.pruning_ratios) > 1:
        raise click.UsageError("--push-to-hub takes one checkpoint, and the recipe asks for several ratios")
    quiet_transformers()
    from leank_convert.device import is_first_process

    if dry_run:
        if is_first_process():
            _print_plan(recipe, device, model, as_json)
        return
    if out is None:
        raise click.UsageError("Missing option '-o' / '--out'.")
    from leank_convert.export import check_exportable, export_checkpoint, recover
    from leank_convert.methods import make_masks
    from leank_convert.train import TrainingDirectory

    directory = TrainingDirectory(out)
    changed = recipe.model.config_overrides
    folders = [result.out for result in directory.results(recipe).values()]
    if is_first_process():
        # Before hours of training, not after. Only a run that is resumed may replace a checkpoint beside it.
        for folder in folders:
            recover(folder)
        directory.check_usable(recipe, resume=resume)
        resumed = resume and directory.state.exists()
        for folder in folders:
            check_exportable(model, folder, config_overrides=changed, overwrite=resumed)
    masks = make_masks(recipe, out, resume=resume, device=device, model_override=model)
    for folder, mask in masks.items():
        if mask_only:
            click.echo(TrainingDirectory(folder).mask)
            continue
        export_checkpoint(model, mask, folder, config_overrides=changed, overwrite=resumed)
        finish_export(folder, repo_id, private)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--source",
    metavar="MODEL",
    help="The model it was made from: compares every weight; for an ONNX folder, what both make of a prompt.",
)
@json_option
def verify(folder: Path, source: str | None, as_json: bool) -> None:
    """Check a checkpoint or an ONNX folder: digests, shapes, masks, the graph. Exits 1 if any fails.

    A graph is run by onnxruntime. With --source a checkpoint's weights, and the answers of a graph, are
    compared with the model's.
    """
    if source is not None:
        quiet_transformers()
    from leank_convert.verify import verify_artifact

    report = verify_artifact(folder, source)
    if as_json:
        click.echo(json.dumps(report.to_dict()))
    else:
        for check in report.checks:
            click.echo(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    if not report.ok:
        sys.exit(1)


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def inspect(path: Path, as_json: bool) -> None:
    """Show what is in a mask file, a checkpoint or an ONNX folder: widths, ratio, bytes, provenance."""
    from leank_convert.inspection import inspect_artifact, render_inspection

    facts = inspect_artifact(path)
    click.echo(json.dumps(facts) if as_json else render_inspection(facts), nl=as_json)


@main.command()
@click.argument("name", required=False)
@click.option("--keys", is_flag=True, help="Print every key a recipe may have, with default and meaning.")
@json_option
def recipes(name: str | None, keys: bool, as_json: bool) -> None:
    """List the packaged recipes, or print the one called NAME."""
    from leank_convert.recipe_listing import render

    click.echo(render(name, keys=keys, as_json=as_json), nl=as_json)


main.add_command(analyze)
main.add_command(benchmark)
main.add_command(evaluate)
main.add_command(export)
main.add_command(warmup)


def _print_plan(recipe: Recipe, device: str | None, model: str, as_json: bool) -> None:
    from leank_convert.train.dry_run import plan_training

    plan = plan_training(recipe, device=device, model_override=model)
    click.echo(json.dumps(plan.to_dict()) if as_json else plan.render(), nl=as_json)
