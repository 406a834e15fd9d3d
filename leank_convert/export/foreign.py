"""Preserve unrelated files when an export overwrites a folder."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    DIGESTS_NAME,
    ONNX_DESCRIPTION_NAME,
    TRAINING_FOLDER,
)
from leank_convert.digests import find_unlisted
from leank_convert.errors import LeanKError, first_line
from leank_convert.files import read_json, sha256_of, sync_path
from leank_convert.folders import LOCK_NAME
from leank_convert.mask import MASK_FILE_NAME

# Marks a folder that is part of a swap, see `export.publish`.
MARKER_NAME = ".leank-export"
README_NAME = "README.md"

_logger = logging.getLogger("leank_convert")


def is_export(folder: Path) -> bool:
    """Whether an export wrote a folder: a checkpoint or a graph."""
    return "leank" in _read(folder / CONFIG_NAME) or "channel_order" in _read(folder / ONNX_DESCRIPTION_NAME)


def refuse_mistakable(out: Path) -> None:
    """Refuse a folder with foreign files that would count as parts of a checkpoint in it.

    Raises:
        LeanKError: If it has some.
    """
    own = _find_own(out)
    mistakable = find_unlisted(out, own)
    if README_NAME not in own and os.path.lexists(out / README_NAME):
        mistakable.append(README_NAME)
    for name in mistakable:
        raise _mistakable(out / name)


def carry_along(out: Path, target: Path) -> None:
    """Give a new folder everything of the old one that is not part of the export in it: links, or copies.

    A model card that was edited since is kept under another name.

    Args:
        out: The old folder.
        target: The new one, complete but for this.

    Raises:
        LeanKError: If something cannot be copied, or bears the name of a file of the new export.
        OSError: If no space is left.
    """
    try:
        _carry(out, target, "", _find_own(out))
        _keep_edited_card(out, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise LeanKError(
            f"`{error.filename or out}` cannot be carried along into the new `{out}`: "
            f"{error.strerror or first_line(error)}",
            hint="move it elsewhere",
        ) from error


def _keep_edited_card(out: Path, target: Path) -> None:
    card, listed = out / README_NAME, _read(out / DIGESTS_NAME).get("files")
    written = listed.get(README_NAME) if isinstance(listed, dict) else None
    if written is None or not card.is_file() or (digest := sha256_of(card)) == written:
        return
    kept = f"README.{digest[:8]}.md"
    if not os.path.lexists(target / kept):
        _link_or_copy(card, target / kept)
    _logger.warning("`%s` was edited since it was written; it is kept as `%s`", card, kept)


def _find_own(out: Path) -> Set[str]:
    """The names in a folder that are the tool's: of the export in it, and of what marks and locks it."""
    names = {MASK_FILE_NAME, MARKER_NAME, f"{TRAINING_FOLDER}/{LOCK_NAME}"}
    if not is_export(out):
        return names
    names |= {CONFIG_NAME, DIGESTS_NAME, ONNX_DESCRIPTION_NAME, README_NAME}
    lists = [_read(out / name).get("files") for name in (DIGESTS_NAME, ONNX_DESCRIPTION_NAME)]
    for files in lists:
        names.update(files if isinstance(files, dict) else ())
    return names


def _read(path: Path) -> dict[str, Any]:
    with suppress(LeanKError):
        return read_json(path)
    return {}


def _carry(source: Path, target: Path, prefix: str, own: Set[str]) -> None:
    """Carry the entries of a folder; `prefix` stands before their names in the output folder."""
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        name, place = prefix + entry.name, target / entry.name
        if name in own:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        if os.path.lexists(place) and not (is_folder and place.is_dir()):
            raise _mistakable(Path(entry.path))
        if not is_folder:
            _link_or_copy(Path(entry.path), place)
        elif place.exists():
            _carry(Path(entry.path), place, f"{name}/", own)
        else:
            place.mkdir()
            _carry(Path(entry.path), place, f"{name}/", own)
            if any(place.iterdir()) or not any(Path(entry).iterdir()):
                shutil.copystat(entry, place)
                sync_path(place)
            else:  # all of it was the export's
                place.rmdir()


def _link_or_copy(source: Path, place: Path) -> None:
    """Put a file, or a link as it is, at a second place."""
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, place, follow_symlinks=False)
        if not place.is_symlink():
            sync_path(place)


def _mistakable(path: Path) -> LeanKError:
    return LeanKError(
        f"`{path}` would count as part of a checkpoint, and none in that folder lists it",
        hint="move it elsewhere",
    )
