"""Atomic replacement of a folder: whole or not at all.

A folder is written as `<out>.partial`, then swapped: `<out>` becomes `<out>.previous`, the partial folder
becomes `<out>`, the previous one is removed. Whatever moment the process dies in, the next run finds its way
back. A lock, `<out>.leank-lock`, is held from the first look to the last removal. A marker file tells these
folders from a user's own of the same name, which are never touched; nor are links followed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from leank_convert.checkpoint_io import TRAINING_FOLDER
from leank_convert.errors import LeanKError
from leank_convert.export.foreign import MARKER_NAME, carry_along, is_export, refuse_mistakable
from leank_convert.files import sync_path
from leank_convert.folders import LOCK_NAME, check_folder, lock_training, locked
from leank_convert.mask import MASK_FILE_NAME
from leank_convert.recipe_file import RUN_RECIPE_NAME

_PARTIAL, _PREVIOUS = ".partial", ".previous"


@contextmanager
def staged_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give an empty folder to write to, and put it in `out`'s place when the block ends without an error.

    What lies in `out` and is not part of a checkpoint, such as a training run, is carried along.

    Args:
        out: Where the folder shall be.
        overwrite: Whether a checkpoint that is there may be replaced.

    Yields:
        `<out>.partial`.

    Raises:
        LeanKError: If something else is in `out`, or another process is writing to it.
    """
    out, partial, previous = _locate(out)
    with ExitStack() as stack:
        stack.enter_context(_lock(out))
        if (out / TRAINING_FOLDER).is_dir():
            stack.enter_context(lock_training(out))
        _recover(out, partial, previous)
        check_replaceable(out, overwrite=overwrite)
        try:
            partial.mkdir()
            (partial / MARKER_NAME).touch()
            yield partial
            if out.exists():
                carry_along(out, partial)
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
            with suppress(OSError):
                _remove(partial)
            raise


def recover(out: Path) -> None:
    """Finish or undo a swap that a killed export left in the middle.

    Nothing happens where there was none. `out` is afterwards what it was before that export, or what that
    export wrote.

    Args:
        out: The folder that was to be written.

    Raises:
        LeanKError: If `out` cannot be a folder, another process is writing to it, or `<out>.partial` or
            `<out>.previous` is not what an export left.
    """
    out, partial, previous = _locate(out)
    with _lock(out):
        _recover(out, partial, previous)


def check_replaceable(out: Path, *, overwrite: bool) -> None:
    """Check that an export may take a folder's place.

    Raises:
        LeanKError: If `out` cannot be a folder, or holds more than a training run and may not be overwritten,
            or foreign files that would count as parts of a checkpoint.
    """
    out, *_ = _locate(out)
    if not out.exists():
        return
    other = sorted({path.name for path in out.iterdir()} - {TRAINING_FOLDER, MASK_FILE_NAME, MARKER_NAME})
    if not other:
        return
    replaces = is_export(out)
    if not replaces and not (out / TRAINING_FOLDER / RUN_RECIPE_NAME).exists():
        raise LeanKError(
            f"`{out}` holds other files, such as `{other[0]}`",
            hint="name a folder that is empty or does not exist yet",
        )
    if replaces and not overwrite:
        raise LeanKError(
            f"`{out}` already holds a checkpoint",
            hint="name another folder; `leank-convert export` replaces it by `--overwrite`",
        )
    refuse_mistakable(out)


def _locate(out: Path) -> tuple[Path, Path, Path]:
    """A folder that can be put in another's place, and the two names that takes. A link stays a link."""
    out = check_folder(out, suffix=max(_PARTIAL, _PREVIOUS, LOCK_NAME, key=len))
    if out.is_dir() and (os.path.ismount(out) or Path.cwd().is_relative_to(out)):
        raise LeanKError(
            f"`{out}` cannot be replaced as a whole: it is the working folder, holds it, or is a mount point",
            hint="name a folder in it",
        )
    if out.exists():
        check_folder(out.parent)
    return out, out.with_name(out.name + _PARTIAL), out.with_name(out.name + _PREVIOUS)


def _lock(out: Path) -> AbstractContextManager[None]:
    return locked(out.with_name(out.name + LOCK_NAME), f"another process is writing to `{out}`")


def _recover(out: Path, partial: Path, previous: Path) -> None:
    for folder in (partial, previous):
        if not os.path.lexists(folder):
            continue
        is_folder = folder.is_dir() and not folder.is_symlink()
        if not is_folder or not (_is_marked(folder) or not any(folder.iterdir())):
            raise LeanKError(
                f"`{folder}` is in the way: it is not what a stopped export left", hint="move it elsewhere"
            )
    _restore(out, previous)
    for folder in (partial, previous):
        if folder.exists():
            _remove(folder)


def _restore(out: Path, previous: Path) -> None:
    if _is_marked(previous) and not out.exists():
        previous.rename(out)
    if out.is_dir():
        (out / MARKER_NAME).unlink(missing_ok=True)


def _is_marked(folder: Path) -> bool:
    return (folder / MARKER_NAME).is_file() and not folder.is_symlink()


def _remove(folder: Path) -> None:
    """Remove a marked folder, its marker last: what a killed removal leaves is removed by the next run."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            for folder_in_it, *_ in os.walk(path):
                Path(folder_in_it).chmod(0o700)  # a user's may be read-only
            shutil.rmtree(path)
        elif path.name != MARKER_NAME:
            path.unlink()
    (folder / MARKER_NAME).unlink(missing_ok=True)
    folder.rmdir()
