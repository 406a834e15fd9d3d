"""Benchmarks whose published files the user brings: LongBench (arXiv 2308.14508), GSM-Infinite (2502.05252).

Instructions are in words of our own wherever the files do not hold the prompt. Its structure, the tokens to
generate and the scoring are the benchmark's, but for what `scores.py` names: figures are comparable between
models here and not with published ones.
"""

from __future__ import annotations

from pathlib import Path

from leank_convert.errors import LeanKError


def list_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files with these suffixes in a folder and below, in order; LeanKError if there is no folder."""
    if not folder.is_dir():
        raise LeanKError(
            f"data folder `{folder}` {'is a file' if folder.exists() else 'does not exist'}",
            hint="bring the benchmark's published files, and name their folder by `--data`",
        )
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
