"""The command: which plan it takes, and how it tells an error."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bin.reproduction import experiment, workers
from bin.reproduction.__main__ import main
from bin.reproduction.plans import make_plan
from leank_convert.errors import LeanKError


@pytest.fixture
def run(monkeypatch):
    """Calls the command with a `reproduce` that notes what it is asked for, or fails."""

    def call(*arguments, failure=None):
        asked = []

        def note(out, plan, **options):
            asked.append((out, plan, options))
            if failure is not None:
                raise failure
            return out / "tables.md"

        monkeypatch.setattr(experiment, "reproduce", note)
        return CliRunner().invoke(main, arguments), asked

    return call


def test_it_prints_where_the_report_lies(run):
    result, asked = run("there", "--device", "cpu", "--minutes", "5")
    assert result.stdout == "there/tables.md\n"
    options = {"model": None, "texts": None, "device": "cpu", "num_workers": 1, "minutes": 5.0}
    assert asked == [(Path("there"), make_plan("testbed", quick=False, on_gpu=False), options)]


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder"])
def test_a_real_model_is_read_from_its_folder(run, tmp_path, name):
    (tmp_path / "config.json").touch()
    arguments = ("--model", name, "--model-folder", str(tmp_path), "--texts", str(tmp_path), "--quick")
    _, ((out, plan, options),) = run(*arguments, "--device", "cpu")
    assert (out, plan) == (Path(f"out/reproduce-{name}"), make_plan(name, quick=True, on_gpu=False))
    assert (options["model"], options["texts"]) == (str(tmp_path), tmp_path)


def test_every_gpu_has_a_worker_unless_a_device_or_a_number_is_named(run, monkeypatch):
    monkeypatch.setattr(workers, "count_gpus", lambda: 3)
    for arguments, num_workers in (((), 3), (("--device", "cpu"), 1), (("--workers", "2"), 2)):
        _, ((_, _, options),) = run("--quick", *arguments)
        assert options["num_workers"] == num_workers


def test_mistakes_are_told_with_their_remedy(run, tmp_path):
    result, asked = run("--model", "smollm2", "--model-folder", str(tmp_path), "--device", "cpu")
    told = f"error: `{tmp_path}` holds no model\nhint: `bin/fetch-smollm2 {tmp_path}`"
    assert (result.exit_code, asked) == (2, []) and result.stderr.startswith(told)
    result, asked = run("--device", "nonsense")
    assert (result.exit_code, asked) == (2, []) and "nonsense" in result.stderr
    result, _ = run("--device", "cpu", failure=LeanKError("no such thing", hint="take another"))
    assert (result.exit_code, result.stderr) == (2, "error: no such thing\nhint: take another\n")


def test_one_that_was_interrupted_is_gone_on_with_by_the_same_command(run):
    ended = LeanKError("SIGTERM ended the run", hint="pass `--resume`", exit_code=143)
    result, _ = run("--device", "cpu", failure=ended)
    assert result.exit_code == 143
    assert "run the same command again" in result.stderr
    assert "--resume" not in result.stderr
