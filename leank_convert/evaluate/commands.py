"""The `evaluate` command: options, and one call each. Imports torch only inside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from leank_convert.options import (
    device_option,
    held_out_seed_option,
    json_option,
    recipe_option,
    set_option,
)

if TYPE_CHECKING:
    from leank_convert.evaluate.subject import EvaluatedModel
    from leank_convert.evaluate.variants import Variant
    from leank_convert.recipe import Recipe


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--against", metavar="MODEL", help="Compare with this model, or checkpoint, instead.")
@recipe_option
@set_option
@click.option("-n", "--num-samples", type=click.IntRange(1), default=200, show_default=True, help="Prompts.")
@held_out_seed_option
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Prompts at a time.")
@device_option
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for every answer as it comes, and for the results as JSON, CSV and a plot. Where it holds "
    "some of the answers already, the rest are asked.",
)
@json_option
def evaluate(
    checkpoint: Path,
    against: str | None,
    recipe_name: str | None,
    overrides: tuple[str, ...],
    num_samples: int,
    seed: int,
    batch_size: int,
    device: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare CHECKPOINT's pruned answers with its own dense ones on held-out samples of a recipe's data."""
    from transformers.utils import logging as transformers_logging

    from leank_convert.evaluate import evaluate_checkpoint, render_comparison
    from leank_convert.evaluate.held_out import MEASURE, held_out_prompts

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    recipe = _choose_recipe(checkpoint, recipe_name, overrides)
    result = evaluate_checkpoint(
        checkpoint,
        lambda tokenizer: held_out_prompts(tokenizer, recipe.data, num_samples=num_samples, seed=seed),
        measure=MEASURE,
        seed=seed,
        others=_window_alone,
        against=against,
        settings={"data": recipe.data.model_dump(mode="json")},
        out=out,
        device=device,
        batch_size=batch_size,
        progress=True,
    )
    if out is not None:
        from leank_convert.evaluate.results import write_results

        for path in write_results(result, out):
            click.echo(path, err=True)
    click.echo(json.dumps(result.to_dict()) if as_json else render_comparison(result), nl=as_json)


def _window_alone(evaluated: EvaluatedModel) -> Sequence[Variant]:
    from leank_convert.evaluate.variants import window_alone

    return [window_alone(evaluated.channel_masks)]


def _choose_recipe(checkpoint: Path, name: str | None, overrides: tuple[str, ...]) -> Recipe:
    """The recipe whose data is drawn: by name, of the run beside the checkpoint, or its model's."""
    from leank_convert.inspection import inspect_artifact
    from leank_convert.recipe_file import find_recipe, load_recipe

    trained = checkpoint / "leank" / "recipe.yaml"
    if name is None and trained.exists():
        name = str(trained)
    if name is None:
        name = find_recipe(str(inspect_artifact(checkpoint)["model"]))
    return load_recipe(name, overrides)
