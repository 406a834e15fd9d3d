"""Code that is planted in a checkpoint runs by no command, and only by `--trust`."""

import py_compile
import shutil
from unittest.mock import Mock

import pytest
import torch

from leank_convert import warmup
from leank_convert.errors import LeanKError
from leank_convert.evaluate.loading import load_evaluated
from tests.checks import edit_json, refusal, run, write

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(retriever_centred):
    return retriever_centred / "checkpoint"


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that planted code leaves; and nobody answers questions."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    return tmp_path / "ran"


@pytest.fixture
def plant(checkpoint, tmp_path, marker):
    """Copies the checkpoint with code in the places named: `plant("runtime", "custom_generate")`."""

    def make(*places):
        folder = shutil.copytree(checkpoint, tmp_path / "planted")
        text = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        if "runtime" in places:
            for path in folder.glob("*_leank.py"):
                path.write_text(path.read_text() + text)
        if "custom_generate" in places:
            write("custom_generate/generate.py", text + "def generate(model): ...\n")(folder)
        if "tokenizer" in places:
            (folder / "tokenizer_own.py").write_text(text)
            auto_map = {"AutoTokenizer": [None, "tokenizer_own.T"]}
            edit_json(folder / "tokenizer_config.json", auto_map=auto_map)
        if "compiled" in places:
            for path in folder.glob("*_leank.py"):
                (tmp_path / "x.py").write_text(path.read_text() + text)
                compiled = f"{folder}/__pycache__/{path.stem}.cpython-311.pyc"
                py_compile.compile(str(tmp_path / "x.py"), cfile=compiled)
                shutil.copy(compiled, folder / f"{path.stem}.pyc")
        return folder

    return make


LOADING = "evaluate PLANTED -n 2 --recipe quickstart"


@pytest.mark.parametrize(
    ("place", "command"),
    [
        *((place, LOADING) for place in ("runtime", "custom_generate", "tokenizer")),
        ("runtime", "evaluate CHECKPOINT -n 2 --recipe quickstart --against PLANTED"),
        ("tokenizer", "evaluate-text PLANTED --text PLANTED/README.md --prefix-tokens 9"),
        ("custom_generate", "warmup PLANTED"),
    ],
)
def test_commands_that_load_a_checkpoint_refuse_it(place, command, plant, marker, checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: command.startswith("warmup"))
    monkeypatch.setattr(warmup, "choose_device", torch.device)
    paths = {"PLANTED": str(plant(place)), "CHECKPOINT": str(checkpoint)}
    for name, path in paths.items():
        command = command.replace(name, path)
    result = run(*command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    error, hint = result.stderr.strip().splitlines()[-2:]
    assert error.startswith("error: ") and paths["PLANTED"] in error
    assert hint.startswith("hint: ") and "--trust" in hint
    assert not marker.exists()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("inspect PLANTED", 0),
        ("verify PLANTED --source SOURCE", 1),
        ("export PLANTED -o OUT --all-channels", 2),
        ("export-onnx PLANTED -o OUT", 2),
        ("train PLANTED -o OUT --recipe quickstart", 2),
        ("analyze PLANTED --model PLANTED --recipe quickstart", 2),
    ],
)
def test_other_commands_run_nothing_of_it(
    command, exit_code, plant, marker, tmp_path, retriever_folder, monkeypatch
):
    stop = LeanKError("the checkpoint was loaded: tracing it takes a minute and shows no more")
    monkeypatch.setattr("leank_convert.onnx.export.write_graph", Mock(side_effect=stop))
    folder = plant("runtime", "custom_generate", "tokenizer")
    command = command.replace("PLANTED", str(folder)).replace("OUT", str(tmp_path / "out"))
    command = command.replace("SOURCE", str(retriever_folder))
    result = run(*command.split())
    assert (result.exit_code, marker.exists()) == (exit_code, False), result.stderr
    assert ("was loaded" in result.stderr) == ("onnx" in command)


def test_trusted_code_runs_and_none_of_it_once_the_files_are_a_releases(plant, marker, checkpoint):
    folder = plant("runtime", "custom_generate")
    with refusal("`trust` is 'no', neither true nor false"):
        load_evaluated(folder, CPU, trust="no")
    assert not marker.exists()
    load_evaluated(folder, CPU, trust=True)
    assert marker.exists()
    marker.unlink()
    shutil.rmtree(folder)
    # transformers keeps copies by the folder's name.
    shutil.copytree(checkpoint, folder)
    load_evaluated(folder, CPU)
    assert not marker.exists()


def test_compiled_files_beside_the_runtime_never_run(plant, marker):
    load_evaluated(plant("compiled"), CPU)
    assert not marker.exists()
