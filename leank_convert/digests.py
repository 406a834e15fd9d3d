"""`leank_digests.json`: SHA-256 digests of a checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from leank_convert.checkpoint_io import COMPANION_PATTERNS, CONFIG_NAME, DIGESTS_NAME, TRAINING_FOLDER
from leank_convert.errors import LeanKError, cut
from leank_convert.files import read_json, sha256_of, write_atomically

DIGESTS_VERSION = 1

# What transformers, peft or an engine may read of a folder that is given to it as a model.
_LOADED_PATTERNS = (
    CONFIG_NAME,
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.py",
    "*.jinja",
    "*_config.json",
    "adapter_*",
    "params.json",
    "custom_generate/*",
    *COMPANION_PATTERNS,
)


def write_digests(folder: Path, known: Mapping[str, str]) -> None:
    """Hash every file of a checkpoint, complete but for this one; not those of a training run or hidden ones.

    Digests that are `known` already, by name, are taken as they are.

    Raises:
        OSError: If a file cannot be read or written.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    listed = [name for name in names if not name.startswith((".", f"{TRAINING_FOLDER}/"))]
    files = {name: known.get(name) or sha256_of(folder / name) for name in sorted(listed)}
    content = {"format_version": DIGESTS_VERSION, "files": files}
    write_atomically(folder / DIGESTS_NAME, (json.dumps(content, indent=2) + "\n").encode())


def read_digests(folder: Path) -> dict[str, str]:
    """Read the digests of a checkpoint by file name; LeanKError if there are none, or they are no digests."""
    path = folder / DIGESTS_NAME
    content = read_json(path)
    version = content.get("format_version")
    known = type(version) is int and version == DIGESTS_VERSION  # True and 1.0 equal 1, too
    if not known or content.keys() != {"format_version", "files"}:
        raise LeanKError(
            f"`{path}` has format version {cut(version)} and keys "
            f"{cut(sorted(content))}; this release reads {DIGESTS_VERSION}",
            hint="update leank-convert, or export the checkpoint again",
        )
    files = content["files"]
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise LeanKError(f"`{path}`: `files` is no object of digests", hint="export the checkpoint again")
    return files


def find_unlisted(folder: Path, listed: Iterable[str]) -> list[str]:
    """Files of a checkpoint that no digest covers, though something that loads the folder may read them."""
    covered = {*listed, DIGESTS_NAME}
    depth = max(pattern.count("/") for pattern in _LOADED_PATTERNS)
    found = {
        path.relative_to(folder).as_posix()
        for level in range(depth + 1)
        for path in folder.glob("*/" * level + "*")
        if not path.is_dir()
    }
    return sorted(
        name
        for name in found - covered
        if any(fnmatchcase(name, known) and name.count("/") == known.count("/") for known in _LOADED_PATTERNS)
    )
