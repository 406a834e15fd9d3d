"""Tell the files of an export from a user's own in one folder."""

from __future__ import annotations

import os
from collections.abc import Set
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from leank_convert.checkpoint_io import CARD_NAME, CONFIG_NAME, DIGESTS_NAME, ONNX_DESCRIPTION_NAME
from leank_convert.digests import find_unlisted
from leank_convert.errors import LeanKError
from leank_convert.files import read_json, sha256_of
from leank_convert.mask import MASK_FILE_NAME

# Marks a folder that an export is being written to, see `export.publish`.
MARKER_NAME = ".leank-export"


def is_export(folder: Path) -> bool:
    """Whether an export wrote a folder: a checkpoint or a graph."""
    return "leank" in _read(folder / CONFIG_NAME) or "channel_order" in _read(folder / ONNX_DESCRIPTION_NAME)


def find_own(out: Path) -> Set[str]:
    """The names in a folder that are the tool's: those of the export in it, and a training's mask."""
    names = {MASK_FILE_NAME}
    if not is_export(out):
        return names
    return names | {CONFIG_NAME, DIGESTS_NAME, ONNX_DESCRIPTION_NAME, CARD_NAME} | _read_digests(out).keys()


def find_gone(out: Path, names: Set[str]) -> list[str]:
    """The tool's files that an export of these names leaves out; none behind a user's links."""
    return [
        name
        for name in sorted(find_own(out) - names)
        if os.path.lexists(place := out / name)
        and (place.is_symlink() or not place.is_dir())
        and not _is_behind_link(out, place)
    ]


def _is_behind_link(out: Path, place: Path) -> bool:
    return any(parent.is_symlink() for parent in place.parents if out in parent.parents)


def _is_within(name: str) -> bool:
    """Whether a listed name is that of a file in the folder: a list that others wrote may name any place."""
    path = PurePosixPath(name)
    return str(path) == name != "." and not path.is_absolute() and ".." not in path.parts


def refuse_edited(out: Path) -> None:
    """Refuse, by a LeanKError, a folder where a file that an export wrote was changed since."""
    for name, digest in _read_digests(out).items():
        place = out / name
        if name == MASK_FILE_NAME or not place.is_file() or _is_behind_link(out, place):
            continue
        status = place.stat()
        if _digest(place, status.st_size, status.st_mtime_ns) != digest:
            raise LeanKError(
                f"`{place}` is not what the export wrote: its SHA-256 is another",
                hint="move it elsewhere to keep it, or delete it",
            )


@cache
def _digest(place: Path, size: int, changed: int) -> str:
    """SHA-256 of a file as it is, which a command that asks twice reads once: weights take minutes."""
    return sha256_of(place)


def refuse_mistakable(out: Path) -> None:
    """Refuse, by a LeanKError, a folder with foreign files that would count as parts of a checkpoint."""
    own = find_own(out)
    mistakable = find_unlisted(out, own)
    if CARD_NAME not in own and os.path.lexists(out / CARD_NAME):
        mistakable.append(CARD_NAME)
    for name in mistakable:
        raise _mistakable(out / name)


def refuse_collisions(out: Path, names: Set[str]) -> None:
    """Refuse, by a LeanKError, a folder where a new export's file would take the place of a foreign one."""
    own = find_own(out)
    for name in sorted(names):
        place = out / name
        # A link to a folder is a foreign file, too: nothing is written where it leads.
        for parent in (path for path in place.parents if out in path.parents):
            if os.path.lexists(parent) and (parent.is_symlink() or not parent.is_dir()):
                raise _mistakable(parent)
        if os.path.lexists(place) and (name not in own or (place.is_dir() and not place.is_symlink())):
            raise _mistakable(place)


def _read_digests(out: Path) -> dict[str, str]:
    """SHA-256 digests of the files that lists in a folder name, by name."""
    listings = (_read(out / name).get("files") for name in (DIGESTS_NAME, ONNX_DESCRIPTION_NAME))
    files = [pair for listed in listings if isinstance(listed, dict) for pair in listed.items()]
    return {name: digest for name, digest in files if _is_within(name)}


def _read(path: Path) -> dict[str, Any]:
    with suppress(LeanKError):
        return read_json(path)
    return {}


def _mistakable(path: Path) -> LeanKError:
    return LeanKError(
        f"`{path}` would count as part of a checkpoint, and none in that folder lists it",
        hint="move it elsewhere",
    )
