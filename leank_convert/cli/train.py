"""The `train` command."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from leank_convert.cli.export import (
    check_hub_options,
    check_text_model,
    finish_export,
    quiet_transformers,
)
from leank_convert.cli.options import (
    SEED,
    FiniteRange,
    check_beside,
    hub_options,
    kv_dtype_option,
    method_options,
    print_result,
    recipe_option,
    results_option,
    set_option,
    text_model_option,
    value_ratio_option,
    window_options,
)


@click.command()
@click.argument("model")
@results_option("Folder to write. Needed unless --dry-run.")
@recipe_option
@set_option
@method_options
@click.option(
    "--pruning-ratio",
    "pruning_ratios",
    type=FiniteRange(0, 1, max_open=True),
    multiple=True,
    help="Share of channels to remove. Repeated: a checkpoint of each, OUT/ratio-0.5 and its like.",
)
@click.option(
    "--mask",
    metavar="MASK",
    help="Learn V's directions beside this mask of K, by --value-pruning-ratio; K's channels stay its.",
)
@value_ratio_option
@window_options
@kv_dtype_option
@click.option("--seed", type=SEED, help="Seed of the samples, and of a random mask.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out; without one, start it.")
@click.option("--mask-only", is_flag=True, help="Stop at the mask: write no checkpoint.")
@click.option("--device", help="Device to train on. Default: cuda if there is one, else cpu.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print steps, tokens, memory and time by one measured context; train nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON document.")
@text_model_option
@hub_options
def train(
    model: str,
    out: Path | None,
    recipe_name: str | None,
    overrides: tuple[str, ...],
    pruning_ratios: tuple[float, ...],
    kv_dtype: str | None,
    resume: bool,
    mask_only: bool,
    device: str | None,
    dry_run: bool,
    as_json: bool,
    base_model: str | None,
    repo_id: str | None,
    private: bool,
    no_text_model: bool,
    **flags: Any,
) -> None:
    """Learn MODEL's channel mask and write its pruned checkpoint.

    MODEL is a hub id, a local folder, or `testbed`, the small model that ships with leank-convert. Started by
    `torchrun -m leank_convert train …` or `accelerate launch`, several GPUs share the samples of a step.
    """
    if mask_only and repo_id:
        raise click.UsageError("--mask-only writes no checkpoint that --push-to-hub could upload")
    if mask_only and base_model:
        raise click.UsageError("--mask-only writes no model card that --base-model could be in")
    if mask_only and kv_dtype:
        raise click.UsageError("--mask-only writes no checkpoint that --kv-dtype could be of")
    check_beside("--dry-run", dry_run, {"--json": as_json})
    if out is None and not dry_run:
        raise click.UsageError("Missing option '-o' / '--out'.")
    check_hub_options(base_model, repo_id, private)
    check_text_model(model, no_text_model)
    flags["pruning_ratio"] = pruning_ratios[0] if len(pruning_ratios) == 1 else pruning_ratios or None
    given = {
        f"windows.{key}" if key.endswith("_size") else key: value
        for key, value in flags.items()
        if value is not None
    }
    from leank_convert.train.choice import choose_recipe

    run = out if resume else None
    recipe = choose_recipe(
        recipe_name, model, run=run, overrides=overrides, flags=given, training=True, device=device
    )
    if recipe.derivation and os.environ.get("RANK", "0") == "0":
        click.echo(recipe.to_yaml(), err=True)
    if repo_id and len(recipe.pruning_ratios) > 1:
        raise click.UsageError("--push-to-hub takes one checkpoint, and the recipe asks for several ratios")
    quiet_transformers()
    if dry_run:
        from leank_convert.device import is_first_process
        from leank_convert.train.forecast import Forecast, forecast

        if is_first_process():
            found = replace(forecast(model, recipe, device=device), kv_dtype=kv_dtype)
            print_result(found, Forecast.render, None, as_json=as_json)
        return
    assert out is not None
    from leank_convert.convert import convert_model

    for path in convert_model(
        model,
        out,
        recipe,
        resume=resume,
        mask_only=mask_only,
        base_model=base_model,
        kv_dtype=kv_dtype,
        device=device,
    ):
        if mask_only:
            click.echo(path)
        else:
            finish_export(path, repo_id, private)
