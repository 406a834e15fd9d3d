"""What `warmup` needs of a checkpoint and what it refuses; compiling itself needs a GPU."""

import json

import pytest
import torch

from leank_convert import warmup
from leank_convert.export import export_checkpoint
from tests.checks import done, fitting_mask, rejected


@pytest.fixture
def checkpoint(source_model, tmp_path):
    """A checkpoint of one dtype without weights: they are not read."""

    def build(dtype):
        source = source_model("llama", dtype=dtype)
        out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
        for shard in out.glob("model*.safetensors"):
            shard.unlink()
        return out

    return build


def test_a_checkpoint_is_loaded_without_weights_and_its_layers_looked_for_by_their_own_files(checkpoint):
    model = warmup.load_without_weights(checkpoint("bfloat16"))
    layers = model.build_cache().layers
    assert [list(layer.layout.widths) for layer in layers] == model.config.leank["widths"]
    assert warmup.find_kernels(model, torch.device("cpu"), torch.bfloat16) is None
    # The name that `find_kernels` asks a layer's own module for.
    assert callable(vars(warmup.sys.modules[type(layers[0]).__module__])["find_kernels"])


def test_kernels_for_drafts_are_asked_for_by_number_of_columns(checkpoint, monkeypatch):
    model, asked = warmup.load_without_weights(checkpoint("bfloat16")), []
    runtime = warmup.sys.modules[type(model.build_cache().layers[0]).__module__]

    def find(device, dtype, *, max_chunks, num_columns=1, **_):
        asked.append(num_columns)
        return max_chunks, num_columns > 8

    monkeypatch.setattr(runtime, "find_kernels", find)
    one = warmup.find_kernels(model, torch.device("cuda"), torch.bfloat16)
    assert set(asked) == {1}
    assert len(warmup.find_kernels(model, torch.device("cuda"), torch.bfloat16, drafts=True)) == 2 * len(one)
    assert set(asked) == set(range(1, 33))


def test_what_cannot_be_warmed_up_exits_2_with_a_hint(checkpoint, source_model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = rejected("warmup", tmp_path)
    assert "there is no CUDA device" in told and "hint: run it on the machine that will serve" in told
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # what is refused next needs no GPU
    monkeypatch.setattr(warmup, "choose_device", torch.device)
    for arguments, told in (
        ((tmp_path / "absent",), "is no folder"),
        ((tmp_path, "--device", "cpu"), "cpu"),
        ((source_model("llama"),), "is not a LeanK checkpoint"),
        ((checkpoint("float32"),), "stored in float32"),
    ):
        assert told in rejected("warmup", *arguments)


@pytest.mark.gpu
def test_kernels_are_compiled_for_a_checkpoint_on_a_gpu(source_model, tmp_path):
    source = source_model("llama", dtype="bfloat16", head_dim=64)
    out = export_checkpoint(source, fitting_mask(source), tmp_path / "out")
    facts = json.loads(done("warmup", out, "--json"))
    assert (facts["dtype"], facts["head_dim"]) == ("bfloat16", 64)
    assert facts["shapes"] >= 1
    assert facts["draft_kernels"] >= 2
