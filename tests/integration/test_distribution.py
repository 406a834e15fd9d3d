"""The wheel and the sdist: what they hold, and that an installed leank-convert exports without a checkout."""

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from leank_convert.export.runtime_files import PARTS
from tests.checks import run_python

ROOT = Path(__file__).parents[2]
RUNTIME_FILES = sorted(path.name for path in (ROOT / "runtime").glob("*_leank.py"))
MASKS = sorted(path.name for path in (ROOT / "leank_convert" / "masks").glob("*.safetensors"))
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Folder with a wheel and an sdist, built from a copy of the tracked tree."""
    work = tmp_path_factory.mktemp("dist")
    tree = work / "tree"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, tracked.stdout.decode().split("\0")):
        source, target = ROOT / name, tree / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    built = run_python("-m", "build", "--no-isolation", "--outdir", work / "out", tree)
    assert built.returncode == 0, built.stderr
    return work / "out"


@pytest.fixture(scope="module")
def wheel(distributions):
    (path,) = distributions.glob("*.whl")
    return path


def test_wheel_holds_runtime_recipes_masks_and_the_shipped_model(wheel):
    names = {*zipfile.ZipFile(wheel).namelist()}
    model = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    folders = {"_runtime": RUNTIME_FILES, "_recipes": RECIPES, "masks": MASKS, "testbed/model": model}
    for folder, files in folders.items():
        assert {f"leank_convert/{folder}/{file}" for file in files} <= names
    # An editable install would stand in for a module that the wheel lacks.
    for path in (ROOT / "leank_convert").rglob("*.py"):
        linked = {"_runtime", "_recipes"} & set(path.parts)
        assert linked or path.relative_to(ROOT).as_posix() in names
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"leank_convert"}


def test_sdist_holds_the_whole_project(distributions):
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"runtime/{file}" for file in RUNTIME_FILES} <= names
    assert {f"recipes/{recipe}" for recipe in RECIPES} <= names
    assert {f"leank_convert/masks/{mask}" for mask in MASKS} <= names
    assert "leank_convert/testbed/model/model.safetensors" in names
    whole = {"tests/conftest.py", "tests/runtime/conftest.py", "docs/serving.md", "bin/setup", "bin/release"}
    assert whole | {"examples/serve.py", ".ci/run", "constraints.txt", "CITATION.cff", "Dockerfile"} <= names


def test_installed_wheel_exports_without_a_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # A site folder on PYTHONPATH goes before the checkout's editable install.
    place = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(site)}}
    where = run_python("-c", "import leank_convert; print(leank_convert.__file__)", **place)
    assert where.stdout.startswith(str(site))
    exported = run_python("-m", "leank_convert", "export", "testbed", "-o", "out", **place)
    assert exported.returncode == 0, exported.stderr
    taken = "note: mask `testbed-70` of the package, made by leank-convert (leank) for testbed; "
    taken += "evaluated with 16 tokens at the start and 64 recent ones whole: dense 100.0%"
    assert exported.stderr.startswith(taken)
    assert {path.name for path in (tmp_path / "out").glob("*_leank.py")} == set(RUNTIME_FILES) - set(PARTS)
    refused = run_python("-m", "leank_convert", "evaluate", "out", "--also", "kivi", **place)
    assert (refused.returncode, refused.stdout) == (2, "")
    told = "error: `kivi` is a published baseline, and only a checkout of leank-convert has those"
    assert refused.stderr.startswith(told)
