"""Output folder of an analysis: the page, its figures as PNG, the numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from leank_convert.errors import LeanKError
from leank_convert.export.publish import check_replaceable, staged_folder
from leank_convert.files import write_atomically
from leank_convert.folders import check_folder
from leank_convert.report.analysis_report import AnalysisReport

PAGE_NAME = "analysis.html"
NUMBERS_NAME = "analysis.json"


def check_writable(out: Path) -> None:
    """Refuse a folder that already holds something, or cannot be one.

    Raises:
        LeanKError: If it does, or is a file.
    """
    if check_folder(out).exists() and any(out.iterdir()):
        raise LeanKError(f"`{out}` already exists", hint="name another folder by `--out`, or remove this one")
    check_replaceable(out, overwrite=False)


def write_analysis(report: AnalysisReport, out: Path) -> list[Path]:
    """Write page, figures and numbers into a folder that appears whole or not at all.

    Returns:
        The files, the page first.

    Raises:
        LeanKError: If the folder already holds something.
        OSError: If it cannot be written.
    """
    check_writable(out)
    with staged_folder(out, overwrite=False) as partial:
        contents = {PAGE_NAME: report.to_html().encode()}
        contents |= {f"{section.name}.png": section.to_png() for section in report.sections}
        contents[NUMBERS_NAME] = (json.dumps(report.to_dict(), indent=1) + "\n").encode()
        for name, content in contents.items():
            write_atomically(partial / name, content)
    return [out / name for name in contents]
