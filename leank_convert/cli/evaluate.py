"""The `evaluate` command: options, and one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from leank_convert.baselines import NAMES, check_baselines
from leank_convert.cli.options import (
    MAX_COUNT,
    MAX_TOKENS,
    device_option,
    held_out_seed_option,
    json_option,
    recipe_option,
    set_option,
    trust_option,
)

if TYPE_CHECKING:
    from leank_convert.recipe import Recipe

# The first are those of `leank_convert.evaluate.variants`, which imports torch.
_OTHERS = ("window", "think", "per-head-budget-dynamic", "fp8", "leank+fp8", "int4", "leank+int4", *NAMES)


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
    "prompt; with the checkpoint's widths and ThinK's choice; by FP8 or int4 (4 bits), alone or on the kept "
    "channels. In a checkout of leank-convert alone: by rotated int4, KIVI (2 bits), Quest (chosen pages) or "
    "SnapKV (chosen tokens). Default: window, and nothing with --task.",
)
@recipe_option
@set_option
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="NAME|ruler|longbench|gsm-infinite",
    help="RULER's tasks instead of a recipe's data, or with --data another benchmark.",
)
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(1, MAX_TOKENS),
    multiple=True,
    help="With --task: tokens of a prompt and its answer. Repeatable. LongBench's prompts lose their middle "
    "where they are longer; default there: the model's positions.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --task longbench or gsm-infinite and the extra `datasets`: the folder of its published files.",
)
@click.option(
    "--haystack",
    metavar="FILE|ID",
    help="With --task: running text, .txt, or with the extra `datasets` .json, .jsonl or a dataset's id. "
    "Default: built-in sentences.",
)
@click.option(
    "--questions",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --task qa and the extra `datasets`: .json or .jsonl of records (question, answers, "
    "documents), or SQuAD's .json.",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare next-token distributions on this text instead, fed token by token.",
)
@click.option(
    "--prefix-tokens", type=click.IntRange(1, MAX_TOKENS), help="With --text: the first tokens, prefilled."
)
@click.option(
    "--num-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=2000,
    show_default=True,
    help="With --text: how many tokens after those are fed at most, a decode step each.",
)
@click.option(
    "-n",
    "--num-samples",
    type=click.IntRange(1, MAX_COUNT),
    default=200,
    show_default=True,
    help="Prompts; with --task, of each task at each length.",
)
@held_out_seed_option
@click.option(
    "--batch-size", type=click.IntRange(1, MAX_COUNT), default=8, show_default=True, help="Prompts at a time."
)
@device_option
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for every answer as it comes, and for the results as JSON, CSV and a plot. Where it holds "
    "some of the answers already, the rest are asked.",
)
@trust_option
@json_option
def evaluate(
    checkpoint: Path,
    against: str | None,
    also: tuple[str, ...],
    recipe_name: str | None,
    overrides: tuple[str, ...],
    tasks: tuple[str, ...],
    lengths: tuple[int, ...],
    data: Path | None,
    haystack: str | None,
    questions: Path | None,
    text_file: Path | None,
    prefix_tokens: int | None,
    num_tokens: int,
    num_samples: int,
    seed: int,
    batch_size: int,
    device: str | None,
    out: Path | None,
    trust: bool,
    as_json: bool,
) -> None:
    """Compare CHECKPOINT's pruned answers with its own dense ones, from one prefill.

    On held-out samples of its recipe's data; with --task on RULER's tasks, at any length, or on LongBench or
    GSM-Infinite, whose files you bring; with --text by the next-token distributions on any text. Harnesses
    that score given answers by one forward pass (loglikelihood tasks) never read the pruned cache, as such a
    pass is prefill: use generate_until tasks.
    """
    check_baselines(also)
    if data is None and bool(tasks) != bool(lengths) and not set(tasks) & {"longbench", "gsm-infinite"}:
        raise click.UsageError("--task and --length go together")
    if data is not None and not tasks:
        raise click.UsageError("--data goes with --task longbench or gsm-infinite")
    if data is not None and (haystack or questions):
        raise click.UsageError("--haystack and --questions go with RULER's tasks, not with --data")
    if text_file is not None and (tasks or against or recipe_name or overrides):
        raise click.UsageError("--text goes without --task, --against, --recipe and --set")
    source = click.get_current_context().get_parameter_source
    if data is not None and source("seed") is not ParameterSource.DEFAULT:
        raise click.UsageError("--seed has no effect with --data: the first prompts of every task are asked")
    ignored = {"num_samples": "-n", "seed": "--seed", "batch_size": "--batch-size"}
    for name, flag in ignored.items():
        if text_file is not None and source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--text goes without {flag}: it is one text")
    if text_file is None and source("num_tokens") is not ParameterSource.DEFAULT:
        raise click.UsageError("--num-tokens goes with --text")
    if (text_file is None) != (prefix_tokens is None):
        raise click.UsageError("--text and --prefix-tokens go together")
    if tasks and (recipe_name or overrides):
        raise click.UsageError("--recipe and --set choose a recipe's data, and --task asks something else")
    if not tasks and (haystack or questions):
        raise click.UsageError("--haystack and --questions go with --task")
    if text_file is not None and prefix_tokens is not None:
        from leank_convert.evaluate.text import evaluate_text, render_text_comparison

        text_result = evaluate_text(
            checkpoint,
            text_file,
            prefix_tokens=prefix_tokens,
            num_tokens=num_tokens,
            also=also,
            out=out,
            device=device,
            trust=trust,
            progress=True,
        )
        text = json.dumps(text_result.to_dict()) if as_json else render_text_comparison(text_result)
    else:
        from leank_convert.checkpoint_io import read_leank_config
        from leank_convert.recipe_choice import find_recipe

        read_leank_config(checkpoint)
        recipe: str | Recipe | None = recipe_name
        if not tasks:  # before torch is imported
            recipe = find_recipe(recipe_name, None, run=checkpoint, overrides=overrides)
        from leank_convert.evaluate.comparison import render_comparison
        from leank_convert.evaluate.session import evaluate_checkpoint

        result = evaluate_checkpoint(
            checkpoint,
            recipe=recipe,
            overrides=overrides,
            tasks=tasks,
            lengths=lengths,
            haystack=haystack,
            questions=questions,
            data=data,
            num_samples=num_samples,
            seed=seed,
            also=also or None,
            against=against,
            out=out,
            device=device,
            batch_size=batch_size,
            trust=trust,
            progress=True,
        )
        text = json.dumps(result.to_dict()) if as_json else render_comparison(result)
    if out is not None:
        click.echo(out, err=True)
    click.echo(text, nl=as_json)
