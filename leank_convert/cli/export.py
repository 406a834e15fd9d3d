"""The `export` command, with the checks and the closing report that `train` shares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leank_convert.cli.options import (
    FiniteRange,
    device_option,
    hub_options,
    kv_dtype_option,
    out_option,
    overwrite_option,
    recipe_option,
    set_option,
    window_options,
)

if TYPE_CHECKING:
    from leank_convert.recipe import Recipe


@click.command()
@click.argument("model")
@out_option
@click.option(
    "--mask",
    "mask_path",
    metavar="FILE|ID|NAME",
    help="Mask: .safetensors, .npy, .pth, a hub id, or a packaged one's name (`leank-convert masks`).",
)
@click.option(
    "--pruning-ratio",
    type=FiniteRange(0, 1, max_open=True),
    help="Which of several packaged masks. Default: the only one, else that for 0.7.",
)
@click.option("--all-channels", is_flag=True, help="Keep every channel: the dense model in a LeanK cache.")
@recipe_option
@set_option
@window_options
@click.option("--prune", type=click.Choice(["eager", "deferred"]), default="eager", show_default=True)
@kv_dtype_option
@click.option(
    "--key-mean",
    is_flag=True,
    help="Centre keys: measure their mean on the recipe's data, where the mask has none. --kv-dtype does so.",
)
@click.option(
    "--force", is_flag=True, help="With --kv-dtype: write a checkpoint whose cache loses answers, too."
)
@device_option
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["checkpoint", "onnx"]),
    default="checkpoint",
    show_default=True,
    help="onnx: a graph for onnxruntime, with a runner that needs no PyTorch.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    help="With --format onnx: of weights and cache. float16 takes half the space, but onnxruntime's CPU "
    "converts it at every step. Default: float32.",
)
@click.option(
    "--weights",
    type=click.Choice(["int8", "int4"]),
    help="With --format onnx: quantize all weights but the embedding, not the cache. Default: as --dtype.",
)
@click.option(
    "--opset",
    type=click.IntRange(1, 100),
    help="With --format onnx: version of the ONNX operators. Default: 23.",
)
@overwrite_option
@hub_options
def export(
    model: str,
    out: Path,
    mask_path: str | None,
    pruning_ratio: float | None,
    all_channels: bool,
    recipe_name: str | None,
    overrides: tuple[str, ...],
    sink_size: int | None,
    recent_size: int | None,
    flush_size: int | None,
    prune: str,
    kv_dtype: str | None,
    key_mean: bool,
    force: bool,
    device: str | None,
    file_format: str,
    dtype: str | None,
    weights: str | None,
    opset: int | None,
    overwrite: bool,
    base_model: str | None,
    repo_id: str | None,
    private: bool,
) -> None:
    """Write MODEL's pruned checkpoint, or its ONNX graph, from a mask.

    Without --mask: the mask that `train --mask-only` left in --out, else the recipe's `mask`, else the
    packaged one of MODEL, as far as MODEL is a hub id, lies in the hub's cache, or is a folder whose
    config.json names one. With --format onnx MODEL may also be a checkpoint that was written before: its mask
    and windows are taken.
    """
    if mask_path and all_channels:
        raise click.UsageError("--mask and --all-channels exclude each other")
    if pruning_ratio is not None and all_channels:
        raise click.UsageError("--pruning-ratio and --all-channels exclude each other")
    check_hub_options(base_model, repo_id, private)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key.split(".")[0] not in ("windows", "mask", "model"):
            raise click.UsageError(
                f"--set {key} has no effect: export reads `windows`, `mask` and `model` alone"
            )
    recipe: str | Recipe | None = recipe_name
    if recipe_name or overrides:
        from leank_convert.recipe_choice import require_recipe

        recipe = require_recipe(recipe_name, model, run=out, overrides=overrides)  # before torch is imported
    graph_options = {"opset": opset, "dtype": dtype, "weights": weights}
    given: dict[str, Any] = {name: value for name, value in graph_options.items() if value is not None}
    options: dict[str, Any] = {
        "pruning_ratio": pruning_ratio,
        "recipe": recipe,
        "overrides": overrides,
        "all_channels": all_channels,
        "sink_size": sink_size,
        "recent_size": recent_size,
        "flush_size": flush_size,
        "overwrite": overwrite,
    }
    if file_format == "onnx":
        _check_onnx_options(base_model, repo_id)
        quiet_transformers()
        from leank_convert.onnx import export_onnx

        click.echo(export_onnx(model, mask_path, out, **given, **options))
        return
    for name in given:
        raise click.UsageError(f"--{name} goes with --format onnx")
    options |= {"prune": prune, "base_model": base_model}
    if force and kv_dtype is None:
        raise click.UsageError("--force goes with --kv-dtype, whose cache is tried")
    if kv_dtype is not None or key_mean:
        quiet_transformers()
        from leank_convert.convert import export_model

        export_model(model, mask_path, out, kv_dtype=kv_dtype, device=device, force=force, **options)
    else:
        if device is not None:
            raise click.UsageError("--device goes with --kv-dtype and --key-mean, which measure there")
        from leank_convert.export import export_checkpoint

        export_checkpoint(model, mask_path, out, **options)
    finish_export(out, repo_id, private)


def check_hub_options(base_model: str | None, repo_id: str | None, private: bool) -> None:
    """Refuse what the hub would refuse when everything else is done."""
    if base_model is not None:
        from leank_convert.hub import check_base_model

        check_base_model(base_model)
    if private and repo_id is None:
        raise click.UsageError("--private goes with --push-to-hub")
    if repo_id is not None:
        from leank_convert.hub import check_repo_id

        check_repo_id(repo_id)


def finish_export(out: Path, repo_id: str | None, private: bool) -> None:
    """Print where the checkpoint lies, and upload it if that was asked for."""
    click.echo(out)
    if repo_id is not None:
        from leank_convert.hub import push_to_hub

        click.echo(push_to_hub(out, repo_id, private=private))


def quiet_transformers() -> None:
    """Keep transformers' own loading bars out of the terminal; ours say more."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _check_onnx_options(base_model: str | None, repo_id: str | None) -> None:
    """Refuse options that a graph has no use for."""
    context = click.get_current_context()
    if context.get_parameter_source("prune") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--prune goes with checkpoints; a graph's host always reads the prompt whole")
    for name in ("kv_dtype", "key_mean", "force", "device"):
        if context.params[name]:
            raise click.UsageError(
                f"--{name.replace('_', '-')} goes with checkpoints; a graph's cache has the dtype of --dtype"
            )
    if base_model is not None:
        raise click.UsageError("--base-model has no effect with --format onnx, which writes no model card")
    if repo_id is not None:
        raise click.UsageError("--push-to-hub uploads checkpoints; upload a graph with `hf upload`")
