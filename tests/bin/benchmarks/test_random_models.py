"""Which mask on which shape is measured, and the models that have it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from bin.benchmarks.geometries import GEOMETRIES, find_geometry
from bin.benchmarks.random_models import (
    build_dense,
    build_model,
    choose_setup,
    synthetic_mask,
    write_folder,
)
from leank_convert.errors import LeanKError
from leank_convert.mask import ChannelMask, MaskProvenance, save_mask
from leank_convert.windows import Windows

SHARED_MASKS = Path(__file__).parents[4] / "shared" / "masks"


def test_the_table_has_the_true_shapes():
    llama, qwen = GEOMETRIES["llama-3.1-8b"].facts, GEOMETRIES["qwen2.5-7b"].facts
    assert (llama.num_hidden_layers, llama.num_attention_heads, llama.num_key_value_heads) == (32, 32, 8)
    assert (qwen.num_hidden_layers, qwen.num_attention_heads, qwen.num_key_value_heads) == (28, 28, 4)
    assert llama.head_dim == qwen.head_dim == 128
    assert (llama.qkv_bias, qwen.qkv_bias) == (False, True)


@pytest.mark.skipif(not SHARED_MASKS.is_dir(), reason="no shared masks")
def test_a_mask_names_its_geometry():
    setup = choose_setup(str(SHARED_MASKS / "qwen2.5-7b-instruct.pth"), None, None)
    assert setup.geometry.name == "qwen2.5-7b"
    assert setup.windows == Windows(128, 1024, 32)


def test_windows_are_those_of_the_masks_training_else_the_recipes(tmp_path):
    tiny, windows = GEOMETRIES["tiny"], {"sink_size": 2, "recent_size": 5, "flush_size": 3}
    known = MaskProvenance.for_model("some/model", tiny.facts, method="leank", **windows)
    save_mask(ChannelMask(synthetic_mask(tiny).channel_mask, None, known), tmp_path / "mask.safetensors")
    assert choose_setup(str(tmp_path / "mask.safetensors"), None, None).windows == Windows(**windows)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {id: Qwen/Qwen2.5-7B-Instruct}\nwindows: {recent_size: 77}\n")
    setup = choose_setup(None, str(recipe), None)
    assert (setup.geometry.name, setup.windows) == ("qwen2.5-7b", Windows(128, 77, 32))


def test_a_synthetic_mask_is_spread_like_a_learned_one():
    for name, geometry in GEOMETRIES.items():
        mask = synthetic_mask(geometry)
        assert 0.6 < mask.pruning_ratio < 0.75
        widths = {width for layer in mask.widths for width in layer}
        assert 0 in widths
        assert len(widths) == 3
        assert torch.equal(mask.channel_mask, synthetic_mask(geometry).channel_mask)
        assert "synthetic" in choose_setup(None, None, name).origin


def test_a_mask_of_no_known_shape_is_refused():
    with pytest.raises(LeanKError, match=r"shape \[3, 4, 8\].* fits no geometry"):
        find_geometry(None, (3, 4, 8))


def test_ours_runs_a_checkpoints_own_files_and_shares_its_weights_with_the_stock_class():
    setup = choose_setup(None, None, "tiny")
    model = build_model(setup)
    assert type(model).__module__.startswith("transformers_modules.leank_benchmark")
    kept = [layer.channel_mask[0].sum(-1).tolist() for layer in model.build_cache().layers]
    assert kept == model.config.leank["widths"] == [list(layer) for layer in setup.layout.widths]
    dense = build_dense(model, setup.geometry)
    assert (type(dense).__name__, dense.config._attn_implementation) == ("LlamaForCausalLM", "sdpa")
    ours = dict(model.named_parameters())
    assert all(weight.data_ptr() == ours[name].data_ptr() for name, weight in dense.named_parameters())
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(dense(tokens).logits, model(tokens).logits)


def test_an_engines_tokenizer_has_a_word_for_every_id_that_random_weights_may_choose(tmp_path):
    setup = choose_setup(None, None, "llama-3.1-8b")
    tokenizer = AutoTokenizer.from_pretrained(write_folder(setup, tmp_path))
    ids = list(range(setup.geometry.config["vocab_size"]))
    words = tokenizer.convert_ids_to_tokens(ids)
    assert None not in words
    assert tokenizer(" ".join(words), add_special_tokens=False, truncation=False)["input_ids"] == ids
