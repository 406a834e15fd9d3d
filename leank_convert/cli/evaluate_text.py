"""The `evaluate-text` command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from leank_convert.cli.options import (
    MAX_TOKENS,
    also_option,
    checkpoint_argument,
    device_option,
    json_option,
    print_result,
    results_option,
    trust_option,
)


@click.command(short_help="Compare next-token distributions on a text.")
@checkpoint_argument
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path, dir_okay=False),
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
