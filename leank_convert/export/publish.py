"""Replacement of an export in a folder that may hold a training run and a user's own files.

An export is written as `<out>.partial`. When it is whole, its files are moved into `<out>`, one by one: what
makes the folder loadable, config.json, goes first and comes last. A kill before the first move leaves `<out>`
as it was. After that, nothing loads `<out>` until the next run has moved the rest. No other file in `<out>`
is touched. A lock, `<out>.leank-lock`, is held from the first look to the last move. A marker file tells
`<out>.partial` from a user's folder of the same name, which is left alone; so are links.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from leank_convert.checkpoint_io import CONFIG_NAME, ONNX_DESCRIPTION_NAME, TRAINING_FOLDER
from leank_convert.errors import LeanKError
from leank_convert.export.foreign import (
    MARKER_NAME,
    find_gone,
    is_export,
    refuse_collisions,
    refuse_edited,
    refuse_mistakable,
)
from leank_convert.files import sync_path, write_atomically
from leank_convert.folders import LOCK_NAME, check_folder, lock_training, locked
from leank_convert.mask import MASK_FILE_NAME
from leank_convert.recipe_file import RUN_RECIPE_NAME

_PARTIAL = ".partial"
# In a partial folder that is whole: names of its files, and of those in `out` that go.
_WHOLE_NAME = ".leank-whole"
_ENTRY_FILES = (CONFIG_NAME, ONNX_DESCRIPTION_NAME)


@contextmanager
def staged_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give an empty folder to write to, and put its files into `out` when the block ends without an error.

    What lies in `out` and is not part of an export, such as a training run, stays.

    Raises:
        LeanKError: If something else is in `out`, another process is writing to it, or a file cannot be put
            there.
    """
    out, partial = _locate(out)
    with ExitStack() as stack:
        stack.enter_context(_lock(out))
        if (out / TRAINING_FOLDER).is_dir():
            stack.enter_context(lock_training(out))
        check_replaceable(out, overwrite=overwrite)
        try:
            partial.mkdir()
            (partial / MARKER_NAME).touch()
            yield partial
            names = set(_list_files(partial))
            refuse_collisions(out, names)
            sync_path(partial)
            moves = {"names": sorted(names), "gone": find_gone(out, names)}
            write_atomically(partial / _WHOLE_NAME, json.dumps(moves).encode())
        except BaseException:
            with suppress(OSError):
                _remove(partial)
            raise
        _publish(partial, out)


def recover(out: Path) -> None:
    """Finish or undo the replacement that a killed export left in the middle.

    `out` is afterwards what it was before that export, or what that export wrote.

    Raises:
        LeanKError: If `out` cannot be a folder, another process is writing to it, or `<out>.partial` is not
            what an export left.
    """
    out, partial = _locate(out)
    with _lock(out):
        if not os.path.lexists(partial):
            return
        is_folder = partial.is_dir() and not partial.is_symlink()
        if is_folder and (partial / _WHOLE_NAME).is_file():
            names = json.loads((partial / _WHOLE_NAME).read_bytes())["names"]
            if all(os.path.lexists(partial / name) or os.path.lexists(out / name) for name in names):
                _publish(partial, out)
            else:  # somebody removed what had been moved: what is left is no export
                _remove(partial)
        elif is_folder and ((partial / MARKER_NAME).is_file() or not any(partial.iterdir())):
            _remove(partial)
        else:
            raise LeanKError(
                f"`{partial}` is in the way: it is not what a stopped export left", hint="move it elsewhere"
            )


def check_replaceable(out: Path, *, overwrite: bool) -> None:
    """Check that an export may be put into a folder, once what a killed one left is recovered.

    Raises:
        LeanKError: If `out` cannot be a folder, or holds more than a training run and may not be overwritten,
            foreign files that would count as parts of a checkpoint, or an export's file that was changed.
    """
    out, partial = _locate(out)
    if os.path.lexists(partial):
        recover(out)
    if not out.exists():
        return
    other = sorted({path.name for path in out.iterdir()} - {TRAINING_FOLDER, MASK_FILE_NAME})
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
            f"`{out}` already holds an export",
            hint="name another folder; `--overwrite` of `export` and `export-onnx` replaces what is there",
        )
    refuse_mistakable(out)
    refuse_edited(out)


def _locate(out: Path) -> tuple[Path, Path]:
    """A folder without links, and the one that is written in its place."""
    out = check_folder(out, suffix=max(_PARTIAL, LOCK_NAME, key=len))
    if os.path.ismount(out):
        raise LeanKError(
            f"`{out}` is a mount point: files cannot be moved into it", hint="name a folder in it"
        )
    if out.exists():
        check_folder(out.parent)
    return out, out.with_name(out.name + _PARTIAL)


def _lock(out: Path) -> AbstractContextManager[None]:
    return locked(out.with_name(out.name + LOCK_NAME), f"another process is writing to `{out}`")


def _list_files(partial: Path) -> list[str]:
    """Names of the files to move, that by which the folder is loaded last."""
    found = (path.relative_to(partial).as_posix() for path in partial.rglob("*") if not path.is_dir())
    names = [name for name in found if name not in (MARKER_NAME, _WHOLE_NAME)]
    return sorted(names, key=lambda name: (name in _ENTRY_FILES, name))


def _publish(partial: Path, out: Path) -> None:
    """Move the files of a whole partial folder; a second call goes on where the first was stopped."""
    gone, names = json.loads((partial / _WHOLE_NAME).read_bytes())["gone"], _list_files(partial)
    try:
        out.mkdir(exist_ok=True)
        for name in _ENTRY_FILES:
            if name in (*gone, *names):
                (out / name).unlink(missing_ok=True)
        sync_path(out)
        for name in gone:
            (out / name).unlink(missing_ok=True)
            with suppress(OSError):  # a folder that holds more stays
                if "/" in name:
                    (out / name).parent.rmdir()
        for name in names:
            if name in _ENTRY_FILES:
                sync_path(out)
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).replace(out / name)
        sync_path(out)
    except OSError as error:
        raise LeanKError(
            f"`{error.filename or out}` cannot be put in place: {error.strerror}; until then nothing loads "
            f"`{out}`, and what is left to move is in `{partial}`",
            hint="run the same command again: it first finishes this export",
        ) from error
    with suppress(OSError):  # the next run removes what is left
        _remove(partial)


def _remove(partial: Path) -> None:
    """Remove a partial folder, its marker last: what a killed removal leaves is removed by the next run."""
    (partial / _WHOLE_NAME).unlink(missing_ok=True)  # first: what is left is whole no more
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER_NAME:
            path.unlink()
    (partial / MARKER_NAME).unlink(missing_ok=True)
    partial.rmdir()
