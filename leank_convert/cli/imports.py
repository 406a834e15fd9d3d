"""Import errors in one sentence, with the versions that are installed."""

from __future__ import annotations

import linecache
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from traceback import walk_tb

from leank_convert.errors import LeanKError, first_line

_OWN = "leank_convert"


def restate_import(error: Exception) -> LeanKError | None:
    """Say which library failed while code of ours imported it; None if something else failed."""
    library = _library_of(error)
    if library is None:
        return None
    versions = {}
    for name in (library, "torch", "transformers"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    own = versions.pop(library, None)
    others = " and ".join(f"{name} {found}" for name, found in versions.items())
    beside = f" with {others}" if others else ""
    message = f"{library} {own} cannot be imported{beside}" if own else f"{library} cannot be imported"
    wanted = _requirements({library, "torch", "transformers"})
    said = first_line(error).rstrip(".")
    return LeanKError(f"{message}: {said}", f"pip install -U {' '.join(wanted)}")


def _library_of(error: Exception) -> str | None:
    """The library of the import statement of ours during which an error came; None outside of one."""
    own = [
        linecache.getline(frame.f_code.co_filename, line).split()
        for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).split(".")[0] == _OWN
    ]
    if not own or own[-1][:1] not in (["import"], ["from"]):
        return None
    library = own[-1][1].split(".")[0]
    return library if library != _OWN else None


def _requirements(libraries: set[str]) -> list[str]:
    """What this release asks of libraries, as pip's arguments, in its own order."""
    try:
        asked = distribution("leank-convert").requires or []
    except PackageNotFoundError:
        asked = []
    known = {re.split(r"[^\w.-]", text, maxsplit=1)[0]: text for text in asked if "extra ==" not in text}
    return [f'"{text}"' for name, text in known.items() if name in libraries] or sorted(libraries)
