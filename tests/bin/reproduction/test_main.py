"""The command: which plan it takes, and how it tells an error."""

import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from bin.reproduction import experiment, units
from bin.reproduction.__main__ import main
from bin.reproduction.plan import MAIN
from bin.reproduction.plans import make_plan
from leank_convert.errors import LeanKError
from tests.checks import run_python

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(monkeypatch):
    """Calls the command with an experiment that notes what it is asked for, or fails."""

    def call(*arguments, failure=None):
        made = Mock()
        made.return_value.count_left.return_value = ""
        made.return_value.run.side_effect = failure
        monkeypatch.setattr(experiment, "Experiment", made)
        monkeypatch.setattr(units, "run_workers", made)
        return CliRunner().invoke(main, arguments), [asked.args for asked in made.call_args_list]

    return call


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder"])
@pytest.mark.parametrize("flag", ["", "packaged", "values"])
def test_a_real_model_is_read_from_its_folder(run, tmp_path, name, flag):
    (tmp_path / "config.json").touch()
    arguments = ("--model", name, "--model-folder", str(tmp_path), "--texts", str(tmp_path), "--quick")
    given_flags, suffix = ((f"--{flag}",), f"-{flag}") if flag else ((), "")
    _, ((out, plan, *given),) = run(*arguments, "--device", "cpu", *given_flags)
    assert out == Path(f"out/reproduce-{name}{suffix}")
    assert plan == make_plan(name, quick=True, on_gpu=False, **({flag: True} if flag else {}))
    assert (MAIN in plan.packaged) == bool(flag)
    assert given[:2] == [str(tmp_path), tmp_path]


def test_workers_are_processes_of_the_same_command(tmp_path):
    options = "--device", "cpu", "--quick", "--minutes", "0", "--workers", "2"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python("-m", "bin.reproduction", tmp_path, *options, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/tables.md\n"), done.stderr
    assert len(re.findall(r"^(\d+) of \1 units left$", done.stderr, re.M)) == 2
    assert "Traceback" not in done.stderr


def test_mistakes_are_told_with_their_remedy(run, tmp_path):
    result, asked = run("--model", "smollm2", "--model-folder", str(tmp_path), "--device", "cpu")
    told = f"error: `{tmp_path}` holds no model\nhint: `bin/fetch-smollm2 {tmp_path}`"
    assert (result.exit_code, asked) == (2, []) and result.stderr.startswith(told)
    for arguments, clash in (((), "--model testbed"), (("--model", "smollm2", "--packaged"), "--packaged")):
        result, asked = run("--values", *arguments)
        assert (result.exit_code, asked) == (2, []) and f"`--values` and `{clash}`" in result.stderr
    ended = LeanKError("SIGTERM ended the run", hint="pass `--resume`", exit_code=143)
    result, _ = run("--device", "cpu", failure=ended)
    assert result.exit_code == 143
    assert "run the same command again" in result.stderr and "--resume" not in result.stderr
