"""Put a folder in place whole or not at all.

A folder is written as `<out>.partial`, then swapped: `<out>` becomes `<out>.previous`, the partial folder
becomes `<out>`, the previous one is removed. Whatever moment the process dies in, the next run finds its way
back.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leank_convert.checkpoint_io import CONFIG_NAME, sync_path
from leank_convert.errors import LeanKError
from leank_convert.mask import MASK_FILE_NAME

TRAINING_FOLDER = "leank"
# Marks a folder as half written, and is locked while its writer lives.
_MARKER = ".leank-partial"


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
    # A link to a folder stays a link.
    out = out.resolve()
    partial, previous = out.with_name(out.name + ".partial"), out.with_name(out.name + ".previous")
    out.parent.mkdir(parents=True, exist_ok=True)
    _recover(out, previous)
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
        (partial / _MARKER).unlink()
        sync_path(partial)
        if out.exists():
            out.rename(previous)
        partial.rename(out)
        sync_path(out.parent)
        shutil.rmtree(previous, ignore_errors=True)
    except BaseException:
        if previous.exists() and not out.exists():
            previous.rename(out)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_replaceable(out: Path, *, overwrite: bool) -> None:
    """Check that an export may take a folder's place.

    Raises:
        LeanKError: If `out` is a file, or holds more than a training run and may not be overwritten.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise LeanKError(f"`{out}` is a file", hint="name a folder that does not exist yet")
    other = sorted({path.name for path in out.iterdir()} - {TRAINING_FOLDER, MASK_FILE_NAME})
    if not other:
        return
    if not _is_checkpoint(out):
        raise LeanKError(
            f"`{out}` holds other files, such as `{other[0]}`",
            hint="name a folder that is empty or does not exist yet",
        )
    if not overwrite:
        raise LeanKError(
            f"`{out}` already holds a checkpoint", hint="name another folder, or pass `--overwrite`"
        )


def _recover(out: Path, previous: Path) -> None:
    """Finish or undo a swap that a killed run left in the middle."""
    if not previous.is_dir():
        return
    other = {path.name for path in previous.iterdir()} - {TRAINING_FOLDER, MASK_FILE_NAME}
    if other and not _is_checkpoint(previous):
        raise LeanKError(
            f"`{previous}` is in the way: it is neither a checkpoint nor a training run",
            hint="move it elsewhere",
        )
    if out.exists():
        shutil.rmtree(previous)
    else:
        previous.rename(out)


def _start(partial: Path) -> int:
    if partial.exists():
        if not partial.is_dir() or (
            any(partial.iterdir()) and not (partial / _MARKER).exists() and not _is_checkpoint(partial)
        ):
            raise LeanKError(
                f"`{partial}` is in the way: it is no half-written export", hint="move it elsewhere"
            )
        if (partial / _MARKER).exists():
            os.close(_lock(partial))
        shutil.rmtree(partial)
    partial.mkdir()
    return _lock(partial)


def _lock(partial: Path) -> int:
    descriptor = os.open(partial / _MARKER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise LeanKError(
            f"another export is writing to `{partial}`", hint="wait for it, or name another folder"
        ) from error
    return descriptor


def _is_checkpoint(folder: Path) -> bool:
    try:
        return "leank" in json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _link_or_copy(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
