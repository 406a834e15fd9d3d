"""Trust: a checkpoint's code is compared with this release's before it is imported."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from leank_convert.checkpoint_io import (
    CONFIG_NAME,
    KERNEL_KEYS,
    OTHER_FILES_KEYS,
    TOKENIZER_CONFIG_NAME,
    read_leank_config,
    read_leank_facts,
    refuse_adapter,
)
from leank_convert.errors import LeanKError, cut
from leank_convert.export.runtime_files import auto_map, needed_parts, read_runtime_files
from leank_convert.fields import Fields
from leank_convert.files import read_json_if_there, sha256_of

_HINT = "look at what it is; pass `--trust` to let it run"
# Twenty times the largest runtime file: what is larger need not be hashed.
_LARGEST = 1 << 20


def check_code(folder: Path, *, trust: bool = False) -> None:
    """Check that transformers, told to trust a checkpoint's remote code, would run this release's alone.

    Every Python file in the folder and below has to be one of the runtime files that this release writes for
    such a config, by name and SHA-256; none of them may be missing; config.json has to refer to those alone.
    Where the owner vouches for it, by `trust`, nothing is checked.

    Raises:
        LeanKError: If anything else could run; names the file.
        OSError: If a folder in it cannot be listed.
    """
    if Fields({"trust": trust}, "evaluation").flag("trust"):
        return
    config, leank = read_leank_config(folder)
    architecture = read_leank_facts(config, folder).architecture
    check_config(folder)
    if config.get("auto_map") != (expected := auto_map(architecture)):
        raise LeanKError(
            f"`{folder / CONFIG_NAME}`: `auto_map` is {cut(config.get('auto_map'))}, and not that of a "
            f"`{architecture.leank_model_type}` checkpoint, such as {cut(expected['AutoConfig'])}",
            hint=_HINT,
        )
    if "auto_map" in read_json_if_there(folder / TOKENIZER_CONFIG_NAME):
        raise LeanKError(
            f"`{folder / TOKENIZER_CONFIG_NAME}`: `auto_map` names code; no checkpoint's tokenizer needs any",
            hint=_HINT,
        )
    needed = read_runtime_files(needed_parts(architecture, leank))
    known = {name: hashlib.sha256(data).hexdigest() for name, data in needed.items()}
    for name in known:
        if not (folder / name).exists():
            raise LeanKError(
                f"`{folder}` lacks the runtime file `{name}`, which its config needs", hint="export it again"
            )
    for path in _python_files(folder):
        hashed = path.parent == folder and path.is_file() and path.stat().st_size < _LARGEST
        if not hashed or sha256_of(path) != known.get(path.name):
            raise LeanKError(
                f"{cut(str(path.relative_to(folder)))} in `{folder}` is no runtime file of this release of "
                "leank-convert",
                hint=_HINT,
            )


def check_config(folder: Path) -> None:
    """Check that transformers would read these files, and no kernels of a hub; raises LeanKError."""
    refuse_adapter(folder)
    path = folder / CONFIG_NAME
    config = read_json_if_there(path)
    for key in OTHER_FILES_KEYS & config.keys():
        raise LeanKError(
            f"`{path}`: `{key}` is {cut(config[key])}, by which transformers would read another file instead",
            hint="remove that key",
        )
    for key in KERNEL_KEYS & config.keys():
        value = config[key]
        # A kernel's name is `owner/name`, or there is one for each part of the model.
        if value is not None and (not isinstance(value, str) or "/" in value):
            raise LeanKError(
                f"`{path}`: `{key}` is {cut(value)}, a kernel that transformers would download and run",
                hint="remove that key",
            )


def _python_files(folder: Path) -> Iterator[Path]:
    """Every Python file in a folder and below, hidden ones too.

    Raises:
        LeanKError: If a folder in it is a link: what it leads to may be another by the time that it is read.
        OSError: If a folder in it cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        for name in folders:
            if Path(parent, name).is_symlink():
                inner = cut(str(Path(parent, name).relative_to(folder)))
                raise LeanKError(
                    f"{inner} in `{folder}` is a link to a folder, which is not looked into", hint=_HINT
                )
        yield from (Path(parent, name) for name in sorted(names) if name.lower().endswith(".py"))
