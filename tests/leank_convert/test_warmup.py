"""What `warmup` asks the runtime to compile, and what it refuses; compiling itself needs a GPU."""

import json
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner

from leank_convert import warmup
from leank_convert.benchmark.subject import Runtime
from leank_convert.cli import main
from leank_convert.export import export_checkpoint


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(main, ["warmup", *(str(argument) for argument in arguments)])


@pytest.fixture
def checkpoint(source_model, fitting_mask, tmp_path):
    """A checkpoint of one dtype without weights: they are not read."""

    def build(dtype):
        source = source_model("llama", dtype=dtype)
        out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
        for shard in out.glob("model*.safetensors"):
            shard.unlink()
        return out

    return build


@pytest.fixture
def asked(monkeypatch):
    """A pretended GPU, and what kernels it is asked for; `asked.found` is what is found."""

    class Asked(list):
        found: ClassVar = [object()]

    calls = Asked()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(warmup, "choose_device", torch.device)

    def find(self, *arguments):
        calls.append(arguments)
        return calls.found

    monkeypatch.setattr(Runtime, "find_kernels", find)
    return calls


def test_it_compiles_what_the_checkpoint_needs(run, checkpoint, asked, monkeypatch):
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/some/cache")
    result = run(checkpoint("bfloat16"), "--json")
    assert result.exit_code == 0, result.output
    assert asked == [(torch.device("cuda"), torch.bfloat16)]
    facts = json.loads(result.stdout)
    assert facts["device"] == "a GPU"
    # The largest chunk is a quarter of a head's 12 channels, and divides them.
    assert (facts["head_dim"], facts["num_key_value_groups"], facts["chunk_size"]) == (12, 2, 2)
    assert facts["shapes"] == 1
    assert facts["cache"] == "/some/cache"
    assert facts["seconds"] >= 0


def test_people_get_a_sentence(run, checkpoint, asked):
    result = run(checkpoint("float16"), "--device", "cuda:1")
    assert asked[0] == (torch.device("cuda", 1), torch.float16)
    assert "compiled and checked in" in result.stdout


def test_kernels_that_cannot_be_used_exit_1(run, checkpoint, asked):
    asked.found = None
    result = run(checkpoint("bfloat16"))
    assert result.exit_code == 1
    assert "cannot be used on `a GPU`" in result.stderr


def test_a_dtype_that_kernels_do_not_compute_in_exits_2(run, checkpoint, asked):
    result = run(checkpoint("float32"))
    assert result.exit_code == 2
    assert "stored in float32" in result.stderr
    assert asked == []


@pytest.mark.usefixtures("asked")
def test_what_is_no_checkpoint_exits_2(run, source_model, tmp_path):
    assert "is no folder" in run(tmp_path / "absent").stderr
    dense = run(source_model("llama"))
    assert dense.exit_code == 2
    assert "is no checkpoint that this machine can load" in dense.stderr
    assert run(tmp_path, "--device", "cpu").exit_code == 2


def test_without_a_gpu_it_exits_2_with_a_hint(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "there is no CUDA device" in result.stderr
    assert "hint: run it on the machine that will serve" in result.stderr
