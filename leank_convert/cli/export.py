"""The commands `export` and `export-onnx`, and the checks and the closing report that `train` shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from leank_convert.cli.options import (
    check_beside,
    device_option,
    hub_options,
    kv_dtype_option,
    mask_options,
    out_option,
    overwrite_option,
    text_model_option,
    value_ratio_option,
)


@click.command()
@click.argument("model")
@out_option
@mask_options
@click.option("--prune", type=click.Choice(["eager", "deferred"]), default="eager", show_default=True)
@kv_dtype_option
@click.option(
    "--key-mean",
    is_flag=True,
    help="Centre keys: measure their mean on the recipe's data, where the mask has none. --kv-dtype does so.",
)
@value_ratio_option
@click.option(
    "--adapter",
    metavar="LORA",
    help="Convert this LoRA of MODEL for the checkpoint, too, to OUT/adapter: see `leank-convert adapter`.",
)
@click.option(
    "--force", is_flag=True, help="With --kv-dtype: write a checkpoint whose cache loses answers, too."
)
@device_option
@overwrite_option
@text_model_option
@hub_options
def export(
    model: str,
    out: Path,
    mask_path: str | None,
    kv_dtype: str | None,
    key_mean: bool,
    value_pruning_ratio: float | None,
    adapter: str | None,
    force: bool,
    device: str | None,
    base_model: str | None,
    repo_id: str | None,
    private: bool,
    **choices: Any,
) -> None:
    """Write MODEL's pruned checkpoint from a mask.

    Without --mask: the mask that `train --mask-only` left in --out, else the recipe's `mask`, else the
    packaged one of MODEL, as far as MODEL is a hub id, lies in the hub's cache, or is a folder whose
    config.json names one.
    """
    check_hub_options(base_model, repo_id, private)
    measures = kv_dtype is not None or key_mean or value_pruning_ratio is not None
    options = check_choices(model, out, mask_path, measures=measures, base_model=base_model, **choices)
    check_beside("--kv-dtype, whose cache is tried", kv_dtype is not None, {"--force": force})
    from leank_convert.checkpoint_io import ADAPTER_FOLDER
    from leank_convert.export import adapter as adapters

    beside, overwrite = out / ADAPTER_FOLDER, choices["overwrite"]
    if adapter is not None:
        adapters.check_adapter(adapter, beside, model=model, checkpoint=out, overwrite=overwrite)
    if measures:
        quiet_transformers()
        from leank_convert.convert import export_model

        options |= {"key_mean": key_mean, "value_pruning_ratio": value_pruning_ratio, "force": force}
        export_model(model, mask_path, out, kv_dtype=kv_dtype, device=device, **options)
    else:
        measuring = "--kv-dtype, --key-mean and --value-pruning-ratio, which measure there"
        check_beside(measuring, False, {"--device": device})
        from leank_convert.export import export_checkpoint

        export_checkpoint(model, mask_path, out, **options)
    if adapter is not None:
        click.echo(adapters.convert_adapter(adapter, out, beside, base_model=repo_id, overwrite=overwrite))
    finish_export(out, repo_id, private, adapter=adapter is not None)


@click.command("export-onnx", short_help="Write MODEL's pruned ONNX graph and a host for it.")
@click.argument("model")
@out_option
@mask_options
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="Of weights and cache. float16 halves files and cache; in memory onnxruntime's CPU holds weights in "
    "float32 all the same, and is slower.",
)
@click.option(
    "--weights",
    type=click.Choice(["int8", "int4"]),
    help="Quantize all weights but the embedding, not the cache. Default: as --dtype.",
)
@overwrite_option
@text_model_option
def export_onnx(model: str, out: Path, mask_path: str | None, **choices: Any) -> None:
    """Write MODEL's pruned ONNX graph, with a host for onnxruntime that needs no PyTorch.

    MODEL is a model, with a mask as `export` finds it, or a checkpoint that was written before: its mask and
    windows are taken.
    """
    options = check_choices(model, out, mask_path, **choices)
    quiet_transformers()
    from leank_convert.onnx import export_onnx

    click.echo(export_onnx(model, mask_path, out, **options))


def check_choices(
    model: str,
    out: Path,
    mask_path: str | None,
    *,
    recipe_name: str | None,
    overrides: tuple[str, ...],
    no_text_model: bool,
    measures: bool = False,
    **choices: Any,
) -> dict[str, Any]:
    """An export's options, checked, as its keyword arguments; the recipe of `mask_options` is found.

    An export that measures something does so on the recipe's data, and finds it by what it measures.
    """
    check_text_model(model, no_text_model)
    for name, value in (("--mask", mask_path), ("--pruning-ratio", choices["pruning_ratio"])):
        if value is not None and choices["all_channels"]:
            raise click.UsageError(f"{name} and --all-channels exclude each other")
    read = ("windows", "mask", *(("model", "data", "seed") if measures else ("model.config_overrides",)))
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith(read):
            known = ", ".join(f"`{name}`" for name in read)
            raise click.UsageError(f"--set {key} has no effect: this export reads {known} alone")
    recipe: Any = recipe_name
    if (recipe_name or overrides) and not measures:
        from leank_convert.recipe_file import require_recipe

        recipe = require_recipe(recipe_name, model, run=out, overrides=overrides)  # before torch is imported
    return {**choices, "recipe": recipe, "overrides": overrides}


def check_text_model(model: str, refused: bool) -> None:
    """Refuse a model that also reads images where that was asked for."""
    if refused:
        from leank_convert.hub import resolve_model
        from leank_convert.text_part import refuse_whole

        refuse_whole(resolve_model(model))


def check_hub_options(base_model: str | None, repo_id: str | None, private: bool) -> None:
    """Refuse what the hub would refuse when everything else is done."""
    from leank_convert.hub import check_base_model, check_repo_id

    check_base_model(base_model)
    check_beside("--push-to-hub", repo_id is not None, {"--private": private})
    if repo_id is not None:
        check_repo_id(repo_id)


def finish_export(out: Path, repo_id: str | None, private: bool, *, adapter: bool = False) -> None:
    """Print where the checkpoint lies, and upload it if that was asked for, its converted adapter, too."""
    click.echo(out)
    if repo_id is not None:
        from leank_convert.hub import push_to_hub

        click.echo(push_to_hub(out, repo_id, private=private, adapter=adapter))


def quiet_transformers() -> None:
    """Keep transformers' own loading bars out of the terminal; ours say more."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
