"""The `evaluate` command: options, and one call each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from leank_convert.cli.options import (
    device_option,
    held_out_seed_option,
    json_option,
    recipe_option,
    set_option,
)
from leank_convert.errors import LeanKError

if TYPE_CHECKING:
    from leank_convert.evaluate.prompt import Prompt
    from leank_convert.evaluate.subject import EvaluatedModel
    from leank_convert.evaluate.variants import Variant
    from leank_convert.recipe import Recipe

_ALL_TASKS = "ruler"
_OTHERS = ("window", "think", "per-head-budget-dynamic")


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--against", metavar="MODEL", help="Compare with this model, checkpoint or ONNX folder instead."
)
@click.option(
    "--also",
    type=click.Choice(_OTHERS),
    multiple=True,
    help="Answer in other ways, too: from the window alone; by ThinK, which chooses channels for every "
    "prompt; with the checkpoint's widths and ThinK's choice. Default: window, and nothing with --task.",
)
@recipe_option
@set_option
@click.option(
    "--task", "tasks", multiple=True, metavar="NAME|ruler", help="RULER's tasks instead of a recipe's data."
)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(1),
    multiple=True,
    help="With --task: tokens of a prompt and its answer. Repeatable.",
)
@click.option(
    "--haystack",
    metavar="FILE|ID",
    help="With --task: running text, .txt, .json, .jsonl or a dataset's id. Default: built-in sentences.",
)
@click.option(
    "--questions",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --task qa: in the form of SQuAD or HotpotQA, or .jsonl (question, answers, documents).",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare next-token distributions on this text instead, fed token by token.",
)
@click.option("--prefix-tokens", type=click.IntRange(1), help="With --text: the first tokens, prefilled.")
@click.option(
    "-n",
    "--num-samples",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Prompts; with --task, of each task at each length.",
)
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
    also: tuple[str, ...],
    recipe_name: str | None,
    overrides: tuple[str, ...],
    tasks: tuple[str, ...],
    lengths: tuple[int, ...],
    haystack: str | None,
    questions: Path | None,
    text_file: Path | None,
    prefix_tokens: int | None,
    num_samples: int,
    seed: int,
    batch_size: int,
    device: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare CHECKPOINT's pruned answers with its own dense ones, from one prefill.

    On held-out samples of its recipe's data; with --task on RULER's tasks, at any length; with --text by the
    next-token distributions on any text. Harnesses that score given answers by one forward pass
    (loglikelihood tasks) never read the pruned cache, as such a pass is prefill: use generate_until tasks.
    """
    if bool(tasks) != bool(lengths):
        raise click.UsageError("--task and --length go together")
    if text_file is not None and (tasks or against or recipe_name or overrides):
        raise click.UsageError("--text goes without --task, --against, --recipe and --set")
    source = click.get_current_context().get_parameter_source
    ignored = {"num_samples": "-n", "seed": "--seed", "batch_size": "--batch-size"}
    for name, flag in ignored.items():
        if text_file is not None and source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--text goes without {flag}: it is one text, and all of it")
    if (text_file is None) != (prefix_tokens is None):
        raise click.UsageError("--text and --prefix-tokens go together")
    if tasks and (recipe_name or overrides):
        raise click.UsageError("--recipe and --set choose a recipe's data, --task RULER's instead")
    if not tasks and (haystack or questions):
        raise click.UsageError("--haystack and --questions go with --task")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if text_file is not None and prefix_tokens is not None:
        _evaluate_text(checkpoint, text_file, prefix_tokens, also, device, out, as_json)
        return
    from leank_convert.evaluate.comparison import render_comparison
    from leank_convert.evaluate.held_out import MEASURE, held_out_prompts
    from leank_convert.evaluate.session import evaluate_checkpoint

    draw: Callable[[Any], Sequence[Prompt]]
    if tasks:
        measure, draw = "RULER", _ruler_prompts(tasks, lengths, haystack, questions, num_samples, seed)
    else:
        recipe = _choose_recipe(checkpoint, recipe_name, overrides)
        measure, also = MEASURE, also or ("window",)

        def draw(tokenizer: Any) -> Sequence[Prompt]:
            return held_out_prompts(tokenizer, recipe.data, num_samples=num_samples, seed=seed)

    result = evaluate_checkpoint(
        checkpoint,
        draw,
        measure=measure,
        seed=seed,
        others=lambda evaluated: _find_variants(also, evaluated),
        against=against,
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


def _ruler_prompts(
    tasks: Sequence[str],
    lengths: Sequence[int],
    haystack: str | None,
    questions: Path | None,
    num_samples: int,
    seed: int,
) -> Callable[[Any], Sequence[Prompt]]:
    from leank_convert.evaluate.ruler import RULER_TASKS, cached_prompts
    from leank_convert.recipe import HaystackSection

    # `qa` is the one task that has nothing to ask without a file.
    known = [task for task in RULER_TASKS if task != "qa" or questions is not None]
    named = [name for task in tasks for name in (known if task == _ALL_TASKS else [task])]

    def draw(tokenizer: Any) -> Sequence[Prompt]:
        return cached_prompts(
            tokenizer,
            list(dict.fromkeys(named)),
            sorted(set(lengths)),
            num_samples,
            seed,
            HaystackSection(source=haystack),
            questions,
        )

    return draw


def _evaluate_text(
    checkpoint: Path,
    text_file: Path,
    prefix_tokens: int,
    also: Sequence[str],
    device: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from leank_convert.device import choose_device
    from leank_convert.evaluate.logits import evaluate_text, render_text_comparison
    from leank_convert.evaluate.logits_figure import write_text_figure
    from leank_convert.evaluate.subject import load_evaluated
    from leank_convert.evaluate.variants import PRUNED, Masked
    from leank_convert.files import write_atomically

    try:
        text = text_file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise LeanKError(f"`{text_file}`: {error}", hint="--text takes plain text in UTF-8") from error
    evaluated = load_evaluated(checkpoint, choose_device(device))
    variants: list[Variant] = [Masked(PRUNED), *_find_variants(also, evaluated)]
    result = evaluate_text(
        evaluated, text, variants, prefix_tokens=prefix_tokens, checkpoint=str(checkpoint), progress=True
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        numbers = out / "text.json"
        write_atomically(numbers, json.dumps(result.to_dict()).encode())
        for path in (numbers, write_text_figure(result, out / "text.png")):
            click.echo(path, err=True)
    click.echo(json.dumps(result.to_dict()) if as_json else render_text_comparison(result), nl=as_json)


def _find_variants(names: Sequence[str], evaluated: EvaluatedModel) -> list[Variant]:
    """What answers beside the dense model and the pruned cache, by its name."""
    import torch

    from leank_convert.evaluate.dynamic import THINK_WINDOWS, PerHeadBudget, ThinK
    from leank_convert.evaluate.variants import window_alone

    known: dict[str, Callable[[], Variant]] = {
        "window": lambda: window_alone(evaluated.channel_masks),
        "think": lambda: ThinK(evaluated.leank["pruning_ratio"], THINK_WINDOWS),
        "per-head-budget-dynamic": lambda: PerHeadBudget(torch.tensor(evaluated.leank["widths"])),
    }
    return [known[name]() for name in dict.fromkeys(names)]


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
