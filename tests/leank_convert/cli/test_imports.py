"""Libraries that cannot be imported, or not beside each other: one sentence, whatever they raise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# As transformers does where torch lacks what one of its modules names.
LAZY = """
def __getattr__(name):
    try:
        raise AttributeError("module 'torch' has no attribute 'float8_e8m0fnu'")
    except AttributeError as error:
        raise ModuleNotFoundError(f"Could not import module '{name}'. Are its requirements met?") from error
"""
CASES = {
    "too old a torch": (LAZY, "Could not import module '"),
    "too old a transformers": ("", "cannot import name '"),
    "a library of its own is missing": ("import a_library_of_its_own", "No module named 'a_library_of_its"),
    "a shared object is missing": ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12: canno"),
}


@pytest.fixture
def run(tmp_path):
    def run(code, *options):
        (tmp_path / "transformers.py").write_text(code)
        for name, version in (("torch", "2.6.0"), ("transformers", "5.10.0")):
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        command = [sys.executable, "-m", "leank_convert", *options, "analyze", "testbed"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(("code", "message"), CASES.values(), ids=CASES)
def test_a_failing_import_is_one_sentence_with_the_versions_seen(code, message, run):
    done = run(code)
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: transformers 5.10.0 cannot be imported with torch 2.6.0: {message}")
    assert re.match("hint: pip install -U .*torch.* .*transformers", hint)
    assert (done.returncode, done.stdout) == (2, "")
