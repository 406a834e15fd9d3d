"""Atomic replacement of a folder: whole or not at all.

A folder is written as `<out>.partial`, then swapped: `<out>` becomes `<out>.previous`, the partial folder
becomes `<out>`, the previous one is removed. Whatever moment the process dies in, the next run finds its way
back. A marker file tells these folders from a user's own of the same name, which are never touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leank_convert.checkpoint_io import CONFIG_NAME, ONNX_DESCRIPTION_NAME, TRAINING_FOLDER
from leank_convert.errors import LeanKError
from leank_convert.files import sync_path
from leank_convert.mask import MASK_FILE_NAME

# Says that a folder is part of a swap; the partial folder's is locked while its writer lives.
MARKER_NAME = ".leank-export"


@contextmanager
def staged_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give an empty folder to write to, and put it in `out`'s place when the block ends without an error.

    A training run that lies in `out` (its folder `leank/`) is carried along.

    Args:
        out: Where the folder shall be.
        overwrite: Whether a checkpoint that is there may be replaced.

    Yields:
        `<out>.partial`.

    Raises:
        LeanKError: If something else is in `out`, or another export is writing to it.
    """
    out, partial, previous = _locate(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    recover(out)
    check_replaceable(out, overwrite=overwrite)
    lock = _start(partial)
    try:
        yield partial
        if (out / TRAINING_FOLDER).is_dir():
            shutil.copytree(
                out / TRAINING_FOLDER,
                partial / TRAINING_FOLDER,
                copy_function=_link_or_copy,
                dirs_exist_ok=True,
            )
        sync_path(partial)
        if out.exists():
            (out / MARKER_NAME).touch()
            sync_path(out)
            out.rename(previous)
        partial.rename(out)
        sync_path(out.parent)
        (out / MARKER_NAME).unlink()
        with suppress(OSError):  # the next run removes what is left
            _remove(previous)
    except BaseException:
        with suppress(OSError):
            _restore(out, previous)
            _remove(partial)
        raise
    finally:
        os.close(lock)


def recover(out: Path) -> None:
    """Finish or undo a swap that a killed export left in the middle.

    Nothing happens where there was none. `out` is afterwards what it was before that export, or what that
    export wrote.

    Args:
        out: The folder that was to be written.

    Raises:
        LeanKError: If another export is writing to `out`, or `<out>.partial` or
            `<out>.previous` is not what an export left.
    """
    out, partial, previous = _locate(out)
    for folder in (partial, previous):
        if folder.exists() and not (folder / MARKER_NAME).exists() and not _is_empty(folder):
            raise LeanKError(
                f"`{folder}` is in the way: it is not what a stopped export left", hint="move it elsewhere"
            )
    if (partial / MARKER_NAME).exists():
        os.close(_lock(partial))
    _restore(out, previous)
    if previous.exists():
        _remove(previous)


def check_replaceable(out: Path, *, overwrite: bool) -> None:
    """Check that an export may take a folder's place.

    Raises:
        LeanKError: If `out` is a file, or holds more than a training run and may not be overwritten.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise LeanKError(f"`{out}` is a file", hint="name a folder that does not exist yet")
    other = sorted({path.name for path in out.iterdir()} - {TRAINING_FOLDER, MASK_FILE_NAME, MARKER_NAME})
    if not other:
        return
    if not _is_checkpoint(out):
        raise LeanKError(
            f"`{out}` holds other files, such as `{other[0]}`",
            hint="name a folder that is empty or does not exist yet",
        )
    if not overwrite:
        raise LeanKError(
            f"`{out}` already holds a checkpoint",
            hint="name another folder; `leank-convert export` replaces it by `--overwrite`",
        )


def _locate(out: Path) -> tuple[Path, Path, Path]:
    # A link to a folder stays a link.
    out = out.resolve()
    return out, out.with_name(out.name + ".partial"), out.with_name(out.name + ".previous")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _restore(out: Path, previous: Path) -> None:
    if (previous / MARKER_NAME).exists() and not out.exists():
        previous.rename(out)
    if out.is_dir():
        (out / MARKER_NAME).unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove a marked folder, its marker last: what a killed removal leaves is removed by the next run."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER_NAME:
            path.unlink()
    (folder / MARKER_NAME).unlink(missing_ok=True)
    folder.rmdir()


def _start(partial: Path) -> int:
    if partial.exists():
        _remove(partial)
    partial.mkdir()
    return _lock(partial)


def _lock(partial: Path) -> int:
    descriptor = os.open(partial / MARKER_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise LeanKError(
            f"another export is writing to `{partial}`", hint="wait for it, or name another folder"
        ) from error
    return descriptor


def _is_checkpoint(folder: Path) -> bool:
    """Whether an export wrote a folder: a checkpoint or a graph."""
    for name, key in ((CONFIG_NAME, "leank"), (ONNX_DESCRIPTION_NAME, "channel_order")):
        with suppress(OSError, ValueError, TypeError):
            if key in json.loads((folder / name).read_text(encoding="utf-8")):
                return True
    return False


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
