"""`leank-convert export`, and what `train` shares with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from leank_convert.cli.options import (
    hub_options,
    out_option,
    overwrite_option,
    recipe_option,
    set_option,
    window_options,
)
from leank_convert.errors import LeanKError

if TYPE_CHECKING:
    from leank_convert.mask import ChannelMask
    from leank_convert.recipe import Recipe


@click.command()
@click.argument("model")
@out_option
@click.option("--mask", "mask_path", metavar="FILE|ID", help="Mask: .safetensors, .npy, .pth, or a hub id.")
@click.option("--all-channels", is_flag=True, help="Keep every channel: the dense model in a LeanK cache.")
@recipe_option
@set_option
@window_options
@click.option("--prune", type=click.Choice(["eager", "deferred"]), default="eager", show_default=True)
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
@click.option("--opset", type=int, help="With --format onnx: version of the ONNX operators. Default: 23.")
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
    file_format: str,
    dtype: str | None,
    weights: str | None,
    opset: int | None,
    overwrite: bool,
    repo_id: str | None,
    private: bool,
) -> None:
    """Write MODEL's pruned checkpoint, or its ONNX graph, from a mask.

    Without --mask: the mask that `train --mask-only` left in --out, else the recipe's `mask`. With --format
    onnx MODEL may also be a checkpoint that was written before: its mask and windows are taken.
    """
    if mask_path and all_channels:
        raise click.UsageError("--mask and --all-channels exclude each other")
    check_hub_options(repo_id, private)
    keys = [override.partition("=")[0].strip() for override in overrides]
    for key in keys:
        if key.split(".")[0] not in ("windows", "mask", "model"):
            raise click.UsageError(
                f"--set {key} matters to training alone; export takes windows, mask and model"
            )
    flags = {"sink_size": sink_size, "recent_size": recent_size, "flush_size": flush_size}
    graph_options = {"opset": opset, "dtype": dtype, "weights": weights}
    if file_format == "onnx":
        _check_onnx_options(repo_id)
        if _is_leank_checkpoint(model):
            sized = any(size is not None for size in flags.values())
            if mask_path or all_channels or recipe_name or overrides or sized:
                raise LeanKError(
                    f"`{model}` already is a LeanK checkpoint, with a mask and windows of its own",
                    hint="leave out --mask, --all-channels, --recipe, --set and the window sizes, or start "
                    "from the original model",
                )
            _write_graph(model, None, out, **graph_options, overwrite=overwrite)
            return
    elif given := [name for name, value in graph_options.items() if value is not None]:
        raise click.UsageError(f"--{given[0]} goes with --format onnx")
    recipe = _export_recipe(model, out, recipe_name, overrides)
    mask, origin = _choose_mask(model, out, mask_path, all_channels, recipe)
    options: dict[str, Any] = {
        **_choose_windows(flags, keys, mask, recipe),
        "config_overrides": recipe.model.config_overrides if recipe else None,
        "overwrite": overwrite,
        "mask_origin": origin,
    }
    if file_format == "onnx":
        _write_graph(model, mask, out, **graph_options, **options)
        return
    from leank_convert.export import export_checkpoint

    export_checkpoint(model, mask, out, prune=prune, **options)
    finish_export(out, repo_id, private)


def check_hub_options(repo_id: str | None, private: bool) -> None:
    """Refuse what the hub would refuse when everything else is done."""
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
    """Keep transformers' own loading bars out of the terminal; ours tell more."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _check_onnx_options(repo_id: str | None) -> None:
    """Refuse options that a graph has no use for."""
    context = click.get_current_context()
    if context.get_parameter_source("prune") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--prune goes with checkpoints; a graph's host always reads the prompt whole")
    if repo_id is not None:
        raise click.UsageError("--push-to-hub uploads checkpoints; upload a graph with `hf upload`")


def _is_leank_checkpoint(model: str) -> bool:
    from leank_convert.checkpoint_io import CONFIG_NAME, read_config

    folder = Path(model).expanduser()
    return (folder / CONFIG_NAME).is_file() and "leank" in read_config(folder)


def _write_graph(model: str, mask: ChannelMask | None, out: Path, **options: Any) -> None:
    quiet_transformers()
    from leank_convert.onnx import export_onnx

    given = {name: value for name, value in options.items() if value is not None}
    click.echo(export_onnx(model, mask, out, **given))


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
    from leank_convert.checkpoint_io import read_config
    from leank_convert.hub import resolve_model
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
