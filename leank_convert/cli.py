"""The command line: reads options, calls the toolkit, prints. Imports torch only inside a command.

Text for people goes to stderr, results to stdout; `--json` makes stdout one JSON document.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leank_convert.analyze.commands import analyze
from leank_convert.benchmark.commands import benchmark, warmup
from leank_convert.errors import LeanKError
from leank_convert.evaluate.commands import evaluate
from leank_convert.options import (
    hub_options,
    json_option,
    method_options,
    out_option,
    overwrite_option,
    recipe_option,
    set_option,
    window_options,
)

if TYPE_CHECKING:
    from leank_convert.mask import ChannelMask
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
    _check_hub_options(repo_id, private)
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
    _quiet_transformers()
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
        _finish_export(folder, repo_id, private)


@main.command()
@click.argument("model")
@out_option
@click.option("--mask", "mask_path", metavar="FILE|ID", help="Mask: .safetensors, .npy, .pth, or a hub id.")
@click.option("--all-channels", is_flag=True, help="Keep every channel: the dense model in a LeanK cache.")
@recipe_option
@set_option
@window_options
@click.option("--prune", type=click.Choice(["eager", "deferred"]), default="eager", show_default=True)
@overwrite_option
@hub_options
def export(
    model: str,
    out: Path,
    mask_path: str | None,
    all_channels: bool,
    recipe_name: str | None,
    overrides: tuple[str, ...],
    sink_size: int | None,
    recent_size: int | None,
    flush_size: int | None,
    prune: str,
    overwrite: bool,
    repo_id: str | None,
    private: bool,
) -> None:
    """Write MODEL's pruned checkpoint from a mask.

    Without --mask: the mask that `train --mask-only` left in --out, else the recipe's `mask`.
    """
    if mask_path and all_channels:
        raise click.UsageError("--mask and --all-channels exclude each other")
    _check_hub_options(repo_id, private)
    keys = [override.partition("=")[0].strip() for override in overrides]
    for key in keys:
        if key.split(".")[0] not in ("windows", "mask", "model"):
            raise click.UsageError(
                f"--set {key} matters to training alone; export takes windows, mask and model"
            )
    recipe = _export_recipe(model, out, recipe_name, overrides)
    from leank_convert.export import export_checkpoint

    mask, origin = _choose_mask(model, out, mask_path, all_channels, recipe)
    flags = {"sink_size": sink_size, "recent_size": recent_size, "flush_size": flush_size}
    export_checkpoint(
        model,
        mask,
        out,
        **_choose_windows(flags, keys, mask, recipe),
        prune=prune,
        config_overrides=recipe.model.config_overrides if recipe else None,
        overwrite=overwrite,
        mask_origin=origin,
    )
    _finish_export(out, repo_id, private)


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--source", metavar="MODEL", help="The model it was made from: compares every weight.")
@json_option
def verify(checkpoint: Path, source: str | None, as_json: bool) -> None:
    """Check a checkpoint: digests, shapes, masks and, with --source, its weights. Exits 1 if any fails."""
    from leank_convert.verify import verify_checkpoint

    report = verify_checkpoint(checkpoint, source)
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
    """Show what is in a mask file or a checkpoint: widths, ratio, bytes per token, provenance."""
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
main.add_command(warmup)


def _check_hub_options(repo_id: str | None, private: bool) -> None:
    """Refuse what the hub would refuse when everything else is done."""
    if private and repo_id is None:
        raise click.UsageError("--private goes with --push-to-hub")
    if repo_id is not None:
        from leank_convert.hub import check_repo_id

        check_repo_id(repo_id)


def _finish_export(out: Path, repo_id: str | None, private: bool) -> None:
    """Print where the checkpoint lies, and upload it if that was asked for."""
    click.echo(out)
    if repo_id is not None:
        from leank_convert.hub import push_to_hub

        click.echo(push_to_hub(out, repo_id, private=private))


def _print_plan(recipe: Recipe, device: str | None, model: str, as_json: bool) -> None:
    from leank_convert.train.dry_run import plan_training

    plan = plan_training(recipe, device=device, model_override=model)
    click.echo(json.dumps(plan.to_dict()) if as_json else plan.render(), nl=as_json)


def _export_recipe(model: str, out: Path, name: str | None, overrides: tuple[str, ...]) -> Recipe | None:
    """The recipe that tells how the config changes: by name, of the run in `out`, or the model's, if any."""
    from leank_convert.recipe_file import find_recipe, load_recipe

    trained = out / "leank" / "recipe.yaml"
    if name is None and trained.exists():
        name = str(trained)
    if name is None:
        try:
            name = find_recipe(model)
        except LeanKError:
            if overrides:
                raise
            return None
    return load_recipe(name, overrides)


def _choose_mask(
    model: str, out: Path, mask_path: str | None, all_channels: bool, recipe: Recipe | None
) -> tuple[ChannelMask, str]:
    from leank_convert.checkpoint_io import read_config, resolve_model
    from leank_convert.mask import MASK_FILE_NAME, all_channels_mask, load_mask, resolve_mask

    if all_channels:
        from leank_convert.architectures import apply_config_overrides, read_model_facts

        config = apply_config_overrides(
            read_config(resolve_model(model)), recipe.model.config_overrides if recipe else {}
        )
        return all_channels_mask(read_model_facts(config, origin=model)), "--all-channels"
    trained = out / MASK_FILE_NAME
    if mask_path is None and trained.exists():
        mask_path = str(trained)
    if mask_path is None and recipe is not None:
        mask_path = recipe.mask
    if mask_path is None:
        raise LeanKError(
            f"no mask for `{model}`: none given, none in `{out}`, none in its recipe",
            hint=f"pass `--mask FILE`, or learn one with `leank-convert train {model} -o {out}`",
        )
    path = resolve_mask(mask_path)
    return load_mask(path), mask_path


def _choose_windows(
    flags: Mapping[str, int | None], set_keys: Sequence[str], mask: ChannelMask, recipe: Recipe | None
) -> dict[str, int | None]:
    """Each size from its flag, else `--set`, else the mask's training, else the recipe, else the default."""
    chosen = dict(flags)
    for name, value in flags.items():
        if value is not None or recipe is None:
            continue
        by_set = "windows" in set_keys or f"windows.{name}" in set_keys
        by_recipe = mask.provenance is None and name in recipe.windows.model_fields_set
        if by_set or by_recipe:
            chosen[name] = getattr(recipe.windows, name)
    return chosen


def _quiet_transformers() -> None:
    """Keep transformers' own loading bars out of the terminal; ours tell more."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
