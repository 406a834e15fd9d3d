"""`python -m bin.reproduction`: the paper's experiments on one model, in one command."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from leank_convert.errors import LeanKError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("out", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option(
    "--model",
    type=click.Choice(["testbed", "smollm2"]),
    default="testbed",
    help="`testbed`, the shipped toy, or `smollm2`, SmolLM2-135M-Instruct. Default: testbed.",
)
@click.option(
    "--model-folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="SMOLLM2",
    default=".venv/smollm2",
    help="Of smollm2: what `bin/fetch-smollm2` wrote. Default: $SMOLLM2, else .venv/smollm2.",
)
@click.option(
    "--texts",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Of smollm2: what `bin/fetch-texts` wrote. Default: Python's documentation is the only text.",
)
@click.option("--device", help="Device to train and measure on. Default: cuda if there is one, else cpu.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Processes that share the work, each on one GPU. Default: as many as there are GPUs.",
)
@click.option(
    "--quick", is_flag=True, help="A few steps and prompts of everything; its figures mean nothing."
)
def main(
    out: Path | None,
    model: str,
    model_folder: Path,
    texts: Path | None,
    device: str | None,
    workers: int | None,
    quick: bool,
) -> None:
    """Make masks by every method, measure them on the same prompts, and write OUT/report.html.

    OUT (default: out/reproduce, for smollm2 out/reproduce-smollm2) keeps masks and answers: run the same
    command again, and it goes on where it was. Several at once share the work.
    """
    from bin.reproduction.experiment import reproduce
    from bin.reproduction.plan import ON_CPU, ON_GPU, QUICK, QUICK_SMOLLM2, SMOLLM2
    from bin.reproduction.workers import count_gpus
    from leank_convert.device import choose_device

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        on_gpu = choose_device(device).type == "cuda"
        folder = None
        if model == "smollm2":
            if not (model_folder / "config.json").is_file():
                raise LeanKError(
                    f"`{model_folder}` holds no model",
                    hint=f"`bin/fetch-smollm2 {model_folder}` writes it; `--model-folder` names another",
                )
            sizes, folder = QUICK_SMOLLM2 if quick else SMOLLM2, str(model_folder)
        else:
            sizes = QUICK if quick else ON_GPU if on_gpu else ON_CPU
        out = out or Path("out/reproduce" if folder is None else "out/reproduce-smollm2")
        if workers is None:
            workers = max(1, count_gpus()) if device is None else 1
        click.echo(reproduce(out, sizes, model=folder, texts=texts, device=device, num_workers=workers))
    except LeanKError as error:
        ended = error.exit_code >= 128  # by a signal
        hint = "run the same command again: it goes on from there" if ended else error.hint
        click.echo(f"error: {error}" + (f"\nhint: {hint}" if hint else ""), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
