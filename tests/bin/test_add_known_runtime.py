"""`bin/add-known-runtime` adds the runtime files of a commit, and keeps those that are listed."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "bin" / "add-known-runtime"


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_runtime_files_of_a_commit_are_added(tmp_path: Path) -> None:
    for folder in ("bin", "runtime", "leank_convert"):
        (tmp_path / folder).mkdir()
    shutil.copy(SCRIPT, tmp_path / "bin")
    known = tmp_path / "leank_convert" / "known_runtimes.json"
    known.write_text(json.dumps({"b_leank.py": ["00"]}))
    for name in ("b_leank.py", "__init__.py", "README.md"):
        (tmp_path / "runtime" / name).write_text(name)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", str(tmp_path)]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "runtime" / "b_leank.py").write_text("changed since")
    subprocess.run([sys.executable, str(tmp_path / "bin" / SCRIPT.name)], check=True)
    digest = hashlib.sha256(b"b_leank.py").hexdigest()
    assert json.loads(known.read_text()) == {"b_leank.py": ["00", digest]}
