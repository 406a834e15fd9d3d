"""Which mask on which shape is measured, and the runtime as a checkpoint loads it."""

import json
from pathlib import Path

import pytest
import torch

from leank_convert.benchmark.geometries import GEOMETRIES, find_geometry
from leank_convert.benchmark.models import build_dense
from leank_convert.benchmark.subject import choose_subject, load_runtime, synthetic_mask
from leank_convert.errors import LeanKError
from leank_convert.mask import ChannelMask, MaskProvenance, save_mask

SHARED_MASKS = Path(__file__).parents[4] / "shared" / "masks"


def test_the_table_has_the_true_shapes():
    llama, qwen = GEOMETRIES["llama-3.1-8b"].facts, GEOMETRIES["qwen2.5-7b"].facts
    assert (llama.num_hidden_layers, llama.num_attention_heads, llama.num_key_value_heads) == (32, 32, 8)
    assert (qwen.num_hidden_layers, qwen.num_attention_heads, qwen.num_key_value_heads) == (28, 28, 4)
    assert llama.head_dim == qwen.head_dim == 128
    assert (llama.qkv_bias, qwen.qkv_bias) == (False, True)


@pytest.mark.skipif(not SHARED_MASKS.is_dir(), reason="no shared masks")
@pytest.mark.parametrize(
    ("file", "name"),
    [("llama-3.1-8b-instruct.pth", "llama-3.1-8b"), ("qwen2.5-7b-instruct.pth", "qwen2.5-7b")],
)
def test_a_mask_names_its_geometry(file, name):
    subject = choose_subject(str(SHARED_MASKS / file), None, None)
    assert subject.geometry.name == name
    assert (subject.windows.sink_size, subject.windows.recent_size, subject.windows.flush_size) == (
        128,
        1024,
        32,
    )


def test_windows_are_those_of_the_masks_training(tmp_path):
    tiny = GEOMETRIES["tiny"]
    known = MaskProvenance.for_model(
        "some/model", tiny.facts, method="leank", sink_size=2, recent_size=5, flush_size=3
    )
    save_mask(ChannelMask(synthetic_mask(tiny).channel_mask, None, known), tmp_path / "mask.safetensors")
    windows = choose_subject(str(tmp_path / "mask.safetensors"), None, None).windows
    assert (windows.sink_size, windows.recent_size, windows.flush_size) == (2, 5, 3)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_synthetic_mask_is_spread_like_a_learned_one(name):
    mask = synthetic_mask(GEOMETRIES[name])
    assert 0.6 < mask.pruning_ratio < 0.75
    widths = {width for layer in mask.widths for width in layer}
    assert 0 in widths
    assert len(widths) == 3
    assert torch.equal(mask.channel_mask, synthetic_mask(GEOMETRIES[name]).channel_mask)
    assert "synthetic" in choose_subject(None, None, name).origin


def test_a_mask_of_no_known_shape_is_refused():
    with pytest.raises(LeanKError, match=r"shape \[3, 4, 8\].* fits no geometry"):
        find_geometry(None, (3, 4, 8))
    with pytest.raises(LeanKError, match="there is no geometry `llama`"):
        find_geometry("llama", None)


def test_a_recipe_names_shape_and_windows(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {id: Qwen/Qwen2.5-7B-Instruct}\nwindows: {recent_size: 77}\n")
    subject = choose_subject(None, str(recipe), None)
    assert subject.geometry.name == "qwen2.5-7b"
    assert subject.windows.recent_size == 77


def test_the_runtime_is_a_checkpoints_own_and_weights_are_shared(tmp_path):
    subject = choose_subject(None, None, "tiny")
    runtime = load_runtime(subject, tmp_path, torch.float32)
    config = json.loads((runtime.folder / "config.json").read_text())
    assert config["leank"]["widths"] == [list(layer) for layer in subject.layout.widths]
    assert list(runtime.folder.glob("*.safetensors")) == []
    model = runtime.build_model(subject.channel_masks, torch.device("cpu"), torch.float32)
    assert type(model).__module__.startswith("transformers_modules.leank_benchmark")
    assert (
        runtime.module("cache_leank").__name__.rpartition(".")[0] == type(model).__module__.rpartition(".")[0]
    )
    kept = [layer.self_attn.channel_mask.sum(-1).tolist() for layer in model.model.layers]
    assert kept == config["leank"]["widths"]
    dense = build_dense(model, subject.geometry)
    assert type(dense).__name__ == "LlamaForCausalLM"
    assert dense.config._attn_implementation == "sdpa"
    ours = dict(model.named_parameters())
    assert all(weight.data_ptr() == ours[name].data_ptr() for name, weight in dense.named_parameters())
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(dense(tokens).logits, model(tokens).logits)
    with pytest.raises(LeanKError, match=r"has no `absent_leank.py`"):
        runtime.module("absent_leank")


def test_kernels_are_found_once_for_layers_that_compile_alike(tmp_path, monkeypatch):
    subject = choose_subject(None, None, "tiny")
    runtime = load_runtime(subject, tmp_path, torch.float32)
    layout, launch = runtime.module("layout_leank"), runtime.module("decode_kernels_leank")
    asked = []

    def find(device, dtype, **shape):
        asked.append(shape)
        return None if shape["max_chunks"] == 7 else object()

    monkeypatch.setattr(launch, "find_kernels", find)
    cuda = torch.device("cuda", 0)
    assert runtime.find_kernels(torch.device("cpu"), torch.bfloat16) is None
    assert asked == []
    for per_layer, expected in (({0: 4}, [4]), ({0: 5, 1: 4}, [4, 5]), ({0: 7, 1: 4}, [4, 7])):
        asked.clear()
        widths = {layer: subject.layout.widths[layer] for layer in range(2)}
        counts = {widths[layer]: per_layer.get(layer, 4) for layer in range(2)}
        most = property(lambda self, counts=counts: counts[self.widths])
        monkeypatch.setattr(layout.ChunkLayout, "max_chunks", most, raising=False)
        found = runtime.find_kernels(cuda, torch.bfloat16)
        assert [shape["max_chunks"] for shape in asked] == expected
        assert asked[0] == {"head_dim": 64, "num_groups": 2, "chunk_size": 16, "max_chunks": 4}
        assert found is None if 7 in expected else len(found) == len(expected)
