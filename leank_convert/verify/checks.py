"""Report of a verification: the checks that were made, among them files against their digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from leank_convert.errors import LeanKError, cut
from leank_convert.files import sha256_of

_Value = TypeVar("_Value")
_LONG_NAME = 100


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool  # whether it holds
    detail: str  # what was found


@dataclass(frozen=True)
class Report:
    """Everything that was checked of a checkpoint or an ONNX folder."""

    path: str
    source: str | None  # what it was compared with
    checks: tuple[Check, ...]  # in their order; one that needs a failed one before it is left out

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return {**asdict(self), "ok": self.ok}


@dataclass
class Checks:
    """Collects checks as they are made."""

    made: list[Check] = field(default_factory=list)

    def holds(self, name: str, look: Callable[[], str]) -> bool:
        """Look at something: what `look` returns is its detail, a LeanKError that it raises its failure."""
        return self.value(name, lambda: (True, look())) is not None

    def value(self, name: str, look: Callable[[], tuple[_Value, str]]) -> _Value | None:
        """Look at something that later checks need; `look` returns it and the detail. None where it fails."""
        try:
            value, detail = look()
        except LeanKError as error:
            self.made.append(Check(name, False, error.message))
            return None
        self.made.append(Check(name, True, detail))
        return value

    def digests(self, folder: Path, files: Mapping[str, object], *, listed_in: str) -> None:
        """Compare every file that is listed with its SHA-256; each that differs is a check of its own."""
        same = 0
        for name, digest in files.items():
            try:
                _check_digest(folder, name, digest, listed_in)
                same += 1
            except LeanKError as error:
                shown = name if name.isprintable() and len(name) < _LONG_NAME else cut(name)
                self.made.append(Check(f"digest of {shown}", False, error.message))
        self.made.append(Check("digests", True, f"{same} of {len(files)} files as {listed_in} says"))

    def report(self, path: str | Path, source: str | Path | None) -> Report:
        """The report of what was checked."""
        return Report(str(path), None if source is None else str(source), tuple(self.made))


def _check_digest(folder: Path, name: str, expected: object, listed_in: str) -> None:
    file, parts = folder / name, PurePosixPath(name)
    try:
        if parts.is_absolute() or ".." in parts.parts or not file.is_file():
            raise LeanKError(f"{cut(str(file))} is missing")
        found = sha256_of(file)
    except OSError as error:  # its name may be too long, too
        raise LeanKError(f"cannot read {cut(str(file))}: {error.strerror}") from error
    if found != expected:
        raise LeanKError(f"`{file}` was changed: its SHA-256 is {found}, {listed_in} says {cut(expected)}")
