"""The commands `evaluate` and `evaluate-text`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from leank_convert.cli.options import (
    MAX_COUNT,
    MAX_TOKENS,
    SEED,
    UserPath,
    also_option,
    checkpoint_argument,
    device_option,
    evaluated_mask_option,
    json_option,
    print_result,
    recipe_option,
    results_option,
    set_option,
    trust_option,
)


@click.command(short_help="Compare a checkpoint's pruned answers with its dense ones.")
@checkpoint_argument
@evaluated_mask_option
@click.option(
    "--against", metavar="MODEL", help="Compare with this model, checkpoint or ONNX folder instead."
)
@also_option("Default: window, and nothing with --task.")
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
    help="Tokens of a prompt and its answer, which tasks of RULER need. Repeatable. LongBench's prompts lose "
    "their middle where they are longer; default there: the model's positions.",
)
@click.option(
    "--data",
    type=UserPath(file_okay=False),
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
    type=UserPath(dir_okay=False),
    help="With --task qa and the extra `datasets`: .json or .jsonl of records (question, answers, "
    "documents), or SQuAD's .json.",
)
@click.option(
    "-n",
    "--num-samples",
    type=click.IntRange(1, MAX_COUNT),
    default=200,
    show_default=True,
    help="Prompts; with --task, of each task at each length.",
)
@click.option("--seed", type=SEED, help="Held-out prompts. Default: 1000000.")
@click.option(
    "--batch-size", type=click.IntRange(1, MAX_COUNT), default=8, show_default=True, help="Prompts at a time."
)
@device_option
@results_option(
    "Folder for every answer as it comes, and for the results as JSON, CSV and a plot. Where it holds "
    "some of the answers already, the rest are asked."
)
@trust_option
@json_option
def evaluate(
    checkpoint: Path, recipe_name: str | None, also: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Compare CHECKPOINT's pruned answers with its own dense ones, from one prefill.

    On held-out samples of its recipe's data; with --task on RULER's tasks, at any length, or on LongBench or
    GSM-Infinite, whose files you bring. `evaluate-text` compares next-token distributions on any text.
    Harnesses that score given answers by one forward pass (loglikelihood tasks) never read the pruned cache,
    as such a pass is prefill: use generate_until tasks.
    """
    from leank_convert.evaluate import evaluate_checkpoint

    result = evaluate_checkpoint(checkpoint, recipe=recipe_name, also=also or None, progress=True, **options)
    from leank_convert.evaluate.comparison import render_comparison

    print_result(result, render_comparison, options["out"], as_json=as_json)


@click.command(short_help="Compare next-token distributions on a text.")
@checkpoint_argument
@evaluated_mask_option
@click.option(
    "--text",
    "text_file",
    type=UserPath(dir_okay=False),
    required=True,
    help="The text: a file of plain text in UTF-8.",
)
@click.option(
    "--prefix-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    required=True,
    help="The first tokens, prefilled.",
)
@click.option(
    "--num-tokens",
    type=click.IntRange(1, MAX_TOKENS),
    default=2000,
    show_default=True,
    help="How many tokens after those are fed at most, a decode step each.",
)
@also_option()
@device_option
@results_option("Folder for the results as JSON and a plot.")
@trust_option
@json_option
def evaluate_text(checkpoint: Path, text_file: Path, as_json: bool, **options: Any) -> None:
    """Compare CHECKPOINT's next-token distributions on a text with its own dense ones.

    The first tokens are prefilled, which is dense; every later one, the text's own, is fed by itself, as a
    decode step.
    """
    from leank_convert.evaluate import text

    result = text.evaluate_text(checkpoint, text_file, progress=True, **options)
    print_result(result, text.render_text_comparison, options["out"], as_json=as_json)
