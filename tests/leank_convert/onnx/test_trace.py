"""Tracing a graph: what it leaves of the model, and in memory."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from leank_convert.onnx import PrunedModel
from leank_convert.onnx.trace import write_graph


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_as_before_and_nothing_but_the_model_holds_them(tied, tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    masks = torch.zeros(1, 2, 16, dtype=torch.bool)
    masks[0, 1, ::3] = True
    write_graph(PrunedModel(model, masks, 3, 6, 4), tmp_path / "model.onnx", opset=23)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(weight.equal(before[name]) for name, weight in after.items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied

    held = {name: StorageWeakRef(weight.untyped_storage()) for name, weight in after.items()}
    del after
    model.to("meta")
    gc.collect()
    assert [name for name, storage in held.items() if not storage.expired()] == []
