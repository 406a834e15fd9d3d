"""The command: which sizes it takes, and how it tells an error."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bin.reproduction import experiment, workers
from bin.reproduction.__main__ import main
from bin.reproduction.plan import ON_CPU, QUICK, SMOLLM2
from leank_convert.errors import LeanKError


@pytest.fixture
def run(monkeypatch):
    """Calls the command with a `reproduce` that notes what it is asked for, or fails."""

    def call(*arguments, failure=None):
        asked = []

        def note(out, sizes, *, model, texts, device, num_workers):
            asked.append((out, sizes, model, texts, device, num_workers))
            if failure is not None:
                raise failure
            return out / "report.html"

        monkeypatch.setattr(experiment, "reproduce", note)
        return CliRunner().invoke(main, arguments), asked

    return call


def test_it_prints_where_the_report_lies(run):
    result, asked = run("there", "--device", "cpu")
    assert result.stdout == "there/report.html\n"
    assert asked == [(Path("there"), ON_CPU, None, None, "cpu", 1)]


def test_quick_takes_a_few_of_everything(run):
    _, asked = run("--quick", "--device", "cpu")
    assert asked == [(Path("out/reproduce"), QUICK, None, None, "cpu", 1)]


def test_smollm2_is_read_from_its_folder(run, tmp_path):
    (tmp_path / "config.json").touch()
    arguments = ("--model", "smollm2", "--model-folder", str(tmp_path), "--texts", str(tmp_path))
    _, asked = run(*arguments, "--device", "cpu")
    assert asked == [(Path("out/reproduce-smollm2"), SMOLLM2, str(tmp_path), tmp_path, "cpu", 1)]


def test_a_folder_without_a_model_is_an_error_that_says_how_to_get_it(run, tmp_path):
    result, asked = run("--model", "smollm2", "--model-folder", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"error: `{tmp_path}` holds no model\nhint: `bin/fetch-smollm2 {tmp_path}`"
    )
    assert not asked


def test_every_gpu_has_a_worker_unless_a_device_or_a_number_is_named(run, monkeypatch):
    monkeypatch.setattr(workers, "count_gpus", lambda: 3)
    for arguments, num_workers in (((), 3), (("--device", "cpu"), 1), (("--workers", "2"), 2)):
        _, asked = run("--quick", *arguments)
        assert asked[0][-1] == num_workers


def test_an_error_is_told_with_its_remedy(run):
    result, _ = run("--device", "cpu", failure=LeanKError("no such thing", hint="take another"))
    assert result.exit_code == 2
    assert result.stderr == "error: no such thing\nhint: take another\n"


def test_one_that_was_interrupted_is_gone_on_with_by_the_same_command(run):
    ended = LeanKError("SIGTERM ended the run", hint="pass `--resume`", exit_code=143)
    result, _ = run("--device", "cpu", failure=ended)
    assert result.exit_code == 143
    assert "run the same command again" in result.stderr
    assert "--resume" not in result.stderr


def test_a_device_that_is_not_there_is_an_error(run):
    result, asked = run("--device", "nonsense")
    assert result.exit_code == 2
    assert "nonsense" in result.stderr
    assert not asked
