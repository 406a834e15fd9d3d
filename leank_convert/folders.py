"""Output folders: checks of the path, and locks that let in one process at a time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from leank_convert.checkpoint_io import TRAINING_FOLDER
from leank_convert.errors import LeanKError, cut

# A lock's file, in the folder that it is for; behind the name of a folder that is replaced as a whole.
LOCK_NAME = ".leank-lock"

# What a file system answers that knows no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Locks of this thread: a run that holds its folder's exports into it.
_held: ContextVar[frozenset[Path]] = ContextVar("_held", default=frozenset())

_logger = logging.getLogger("leank_convert")


class BusyError(LeanKError):
    """Another process, or thread, holds a lock."""


def check_folder(path: Path, *, suffix: str = "") -> Path:
    """Check that a path is a folder that may be written to, or can be made; return it without links.

    Behind its name the longest `suffix` has to fit that will be put there.

    Raises:
        LeanKError: If it is or can be none.
    """
    if "\0" in str(path):
        raise LeanKError(f"{cut(str(path))} is no path: it holds a NUL character")
    try:
        absolute = path.absolute()
        # What is there already, be it a parent: a link, lest one that leads nowhere counts as nothing.
        found = next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))
        longest = os.pathconf("/", "PC_NAME_MAX")
        if any(len(os.fsencode(name)) > longest for name in (*path.parts, path.name + suffix)):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        mode = found.stat().st_mode
    except FileNotFoundError as error:
        raise LeanKError(
            f"`{found}` is a link to a place that does not exist", hint="remove it, or make that place"
        ) from error
    except OSError as error:
        shown = cut(str(path)) if error.errno == errno.ENAMETOOLONG else f"`{path}`"
        raise LeanKError(f"{shown} cannot be a folder: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise LeanKError(f"`{found}` is a file", hint="name a folder that does not exist yet")
    if not os.access(found, os.W_OK | os.X_OK):
        raise LeanKError(f"folder `{found}` may not be written to", hint="name another, or change its rights")
    return Path(os.path.realpath(path))


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file while a block lasts, and remove it; a process that dies holds it no longer.

    Folders that are missing are made, and removed if they are empty in the end. Who holds the lock already,
    in the same thread, just goes on.

    Raises:
        BusyError: If another process, or thread, holds it; `busy` is the message.
        OSError: If the file cannot be made.
    """
    path = Path(os.path.realpath(path.parent), path.name)
    if path in _held.get():
        yield
        return
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        descriptor = _lock(path, busy)
        before = _held.set(_held.get() | {path})
        try:
            yield
        finally:
            _held.reset(before)
            # Still locked: who has opened it meanwhile will see that it is no longer the file there.
            with suppress(OSError):
                if _is_at(descriptor, path):
                    path.unlink()
            os.close(descriptor)
    finally:
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()


def lock_training(out: Path) -> AbstractContextManager[None]:
    """Keep others out of a training run's folder while a block lasts: see `locked`."""
    return locked(out / TRAINING_FOLDER / LOCK_NAME, f"another process is training into `{out}`")


def _lock(path: Path, busy: str) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            if path.parent.exists():
                raise
            continue  # another process has just removed the folder that it had made
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size:
                raise LeanKError(f"`{path}` is in the way: it is no lock", hint="move it elsewhere")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BusyError(busy, hint="wait for it, or name another folder") from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                _logger.warning("`%s` cannot be locked here: let nothing else write to it", path.parent)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False
