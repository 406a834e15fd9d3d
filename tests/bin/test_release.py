"""`bin/release`: what it refuses, and the links of what it builds."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import yaml

from tests.checks import run_python

ROOT = Path(__file__).parents[2]


def test_a_release_without_an_address_is_refused():
    ended = run_python(ROOT / "bin/release")
    assert ended.returncode == 1 and "`PROJECT_URL` in leank_convert/release.py is empty" in ended.stderr


def test_links_of_a_released_readme_are_absolute(monkeypatch):
    loader = SourceFileLoader("release", str(ROOT / "bin/release"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    release = module_from_spec(spec_from_loader("release", loader))
    loader.exec_module(release)
    monkeypatch.setattr(release, "PROJECT_URL", "https://there")
    given = "[a](docs/a.md#b), [c](https://c), [d](#d)"
    assert release.absolute_links(given, "1.2") == (
        "[a](https://there/blob/v1.2/docs/a.md#b), [c](https://c), [d](#d)"
    )


def test_the_citation_is_whole():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["preferred-citation"]["title"].startswith("LeanK") and cited["cff-version"] == "1.2.0"
    assert len(cited["preferred-citation"]["authors"]) == 7
