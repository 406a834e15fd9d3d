"""The package of docs/new-method.md adds a method to an installed leank-convert."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leank_convert.mask import load_mask
from tests.checks import run_python

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(?:python|toml)\n# (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the package installed, not to be changed."""
    folder = tmp_path_factory.mktemp("method")
    source = folder / "source"
    source.mkdir()
    for name, text in BLOCK.findall((ROOT / "docs/new-method.md").read_text(encoding="utf-8")):
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", folder / "site", source]
    subprocess.run([*pip, *options], check=True)
    return folder / "site"


def command(site, *arguments):
    given = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(site), given]))}
    return run_python("-m", "leank_convert", *arguments, env=environment)


def test_a_method_of_an_installed_package_makes_a_mask(site, tmp_path):
    options = ["--method", "key-weight-norm", "--mask-only", "--set", "held_out_samples=0"]
    ended = command(site, "train", "testbed", *options, "-o", tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    mask = load_mask(tmp_path / "out/channel_mask.safetensors")
    assert mask.provenance.method == "key-weight-norm" and len(set(map(max, mask.widths))) == 1


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("METHOD = 3", "it is no `Method` with a name of its own"),
        ("import nothing_there", "ModuleNotFoundError: No module named 'nothing_there'"),
        ('from leank_convert.methods import METHODS; METHOD = METHODS["leank"]', "it is no `Method` with a"),
    ],
    ids=["no method", "no module", "a name that is taken"],
)
def test_a_row_that_is_none_is_left_out_with_a_warning(broken, told, site, copy_of):
    site = copy_of(site)
    (site / "key_weights_method.py").write_text(broken)
    ended = command(site, "train", "--help")
    assert ended.returncode == 0
    assert "method `key-weight-norm` of `key_weights_method:METHOD` is left out: " + told in ended.stderr
