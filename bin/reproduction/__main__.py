"""`python -m bin.reproduction`: the experiments on one model, in one command."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path

import click

from leank_convert.cli import Command
from leank_convert.errors import LeanKError


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("out", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option(
    "--model",
    type=click.Choice(["testbed", "smollm2", "qwen2.5-coder"]),
    default="testbed",
    help="`testbed`, the shipped toy, `smollm2`, SmolLM2-135M-Instruct, or `qwen2.5-coder`, "
    "Qwen2.5-Coder-1.5B-Instruct. Default: testbed.",
)
@click.option(
    "--model-folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Of a real model: what `bin/fetch-smollm2` or `bin/fetch-qwen2.5-coder` wrote. Default: $SMOLLM2, "
    "else `.venv/` and the model's name.",
)
@click.option(
    "--texts",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Of a real model: what `bin/fetch-texts` wrote. Default: Python's documentation is the only text.",
)
@click.option("--device", help="Device to train and measure on. Default: cuda if there is one, else cpu.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Processes that share the work, each on one GPU. Default: as many as there are GPUs.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    default=math.inf,
    help="Begin no piece of work after so many. Default: do all.",
)
@click.option(
    "--packaged",
    is_flag=True,
    help="Of a real model: take LeanK's masks from the package, by the model's hub id and the ratio, in "
    "place of training them anew; of a larger lambda those of ratios that it alone has.",
)
@click.option(
    "--values",
    is_flag=True,
    help="Of a real model: prune V, too, beside K by the package's masks.",
)
@click.option(
    "--quick", is_flag=True, help="A few steps and prompts of everything; its figures mean nothing."
)
@click.option("--worker", type=int, hidden=True)  # one of several, of which another process reports
def main(
    out: Path | None,
    model: str,
    model_folder: Path | None,
    texts: Path | None,
    device: str | None,
    workers: int | None,
    minutes: float,
    packaged: bool,
    values: bool,
    quick: bool,
    worker: int | None,
) -> None:
    """Make masks, let their caches answer the same prompts, and write what was found to OUT/tables.md.

    Of testbed and smollm2: the paper's experiments, masks by every method. Of qwen2.5-coder: LeanK's masks
    and rounded caches, keys centred and not. Before it begins and at its end it says what is left.

    OUT (default: out/reproduce, for others out/reproduce-MODEL, -packaged or -values behind it) keeps masks
    and answers: run the same command again, and it goes on where it was. Several at once share the work.
    """
    import torch

    from bin.reproduction.experiment import Experiment
    from bin.reproduction.plans import make_plan
    from bin.reproduction.units import run_workers
    from leank_convert.device import choose_device

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        if values and (model == "testbed" or packaged):
            clash = "--packaged" if packaged else "--model testbed"
            raise LeanKError(f"`--values` and `{clash}`: V is pruned on real models, by the package's masks")
        on_gpu = choose_device(device).type == "cuda"
        workers = workers or (torch.cuda.device_count() if on_gpu and device is None else 1)
        folder = None if model == "testbed" else str(_find_model(model, model_folder))
        suffix = ("" if folder is None else f"-{model}") + ("-packaged" if packaged else "")
        suffix += "-values" if values else ""
        plan = make_plan(model, quick=quick, on_gpu=on_gpu, packaged=packaged, values=values)
        experiment = Experiment(out or Path(f"out/reproduce{suffix}"), plan, folder, texts, device, minutes)
        if worker is not None:
            experiment.work(f"worker {worker}: ")
            return
        click.echo(experiment.count_left(), err=True)
        if workers > 1:
            run_workers(sys.argv[1:], workers)
        report = experiment.run()
        click.echo(experiment.count_left(), err=True)
        click.echo(report)
    except LeanKError as error:
        if error.exit_code >= 128:  # a signal ended it
            error.hint = "run the same command again: it goes on from there"
        raise


def _find_model(model: str, folder: Path | None) -> Path:
    """The folder of a real model; LeanKError if it holds none."""
    named = os.environ.get("SMOLLM2") if model == "smollm2" else None
    folder = folder or Path(named or f".venv/{model}")
    if not (folder / "config.json").is_file():
        raise LeanKError(
            f"`{folder}` holds no model",
            hint=f"`bin/fetch-{model} {folder}` writes it; `--model-folder` names another",
        )
    return folder


if __name__ == "__main__":
    main()
