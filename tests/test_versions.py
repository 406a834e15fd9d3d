"""The oldest releases that are allowed are those that are tried."""

import re
import subprocess
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="in the standard library from Python 3.11")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BOUNDS = [re.match(r"([\w-]+)>=([\d.]+)", asked).groups() for asked in PROJECT["dependencies"]]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]


def test_the_oldest_set_is_that_of_the_lower_bounds():
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = [tuple(line.split("==")) for line in lines if not line.startswith("#")]
    assert pinned == BOUNDS


def test_the_script_tries_every_python_that_is_supported():
    script = (ROOT / "bin" / "test-versions").read_text()
    newest = re.findall(r"newest-([\d.]+)", re.search(r"^all=\((.*)\)$", script, re.M).group(1))
    assert newest == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_the_tests_that_the_script_runs_are_there():
    listed = 'eval "$(sed -n \'/^tests=(/,/^)/p\' bin/test-versions)" && ls -d "${tests[@]}"'
    subprocess.run(["bash", "-c", listed], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/getting-started.md", "runtime/README.md", "leank_convert/export/model_card.py"],
)
@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_pages_say_the_true_floor(library, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(rf"\b{library}\b[ |(]+([\d.]+) (?:or|and) later", text) == [dict(BOUNDS)[library]]
