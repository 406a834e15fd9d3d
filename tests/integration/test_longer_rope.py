"""A rope that a recipe stretches, from training to decoding beyond the positions of the model."""

import random

import pytest
import torch
from transformers import LlamaForCausalLM

from leank_convert.convert import convert_model
from leank_convert.evaluate.loading import load_evaluated
from leank_convert.evaluate.text import compare_text
from leank_convert.evaluate.variants import Masked
from leank_convert.mask import load_mask
from leank_convert.testbed.tasks import NUMBERS
from leank_convert.verify import verify_checkpoint
from tests.checks import short_recipe

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
NUM_TOKENS, PREFIX, FLOAT32 = 700, 600, 1e-4


def dense_nll(folder, input_ids, **config):
    """Of the model's own class in one forward pass [tokens - 1], in nats."""
    model = LlamaForCausalLM.from_pretrained(folder, **config)
    with torch.no_grad():
        log_probs = model(input_ids=input_ids).logits[0, :-1].log_softmax(-1)
    return -log_probs.gather(-1, input_ids[0, 1:, None])[:, 0]


@pytest.mark.usefixtures("without_report")
def test_a_stretched_rope_is_trained_exported_verified_and_decoded_with(retriever_folder, tmp_path):
    model = {"config_overrides": {"max_position_embeddings": 1024, "rope_parameters": YARN}}
    short = {"stage1": {"steps": 2}, "stage2": {"steps": 1}, "held_out_samples": 0}
    data = {"wording": "testbed", "min_length": 600, "max_length": 700}
    recipe = short_recipe(model=model, data=data, **short)
    (out,) = convert_model(retriever_folder, tmp_path / "out", recipe, progress=False)
    assert verify_checkpoint(out, retriever_folder).ok
    assert load_mask(out / "channel_mask.safetensors").provenance.rope_parameters["rope_type"] == "yarn"
    evaluated = load_evaluated(out, torch.device("cpu"))
    assert evaluated.model.config.max_position_embeddings == 1024
    text = " ".join(random.Random(3).choices(NUMBERS, k=NUM_TOKENS))
    input_ids = evaluated.tokenizer(text, return_tensors="pt").input_ids
    every = torch.ones_like(evaluated.channel_masks)
    result = compare_text(
        evaluated, text, [Masked("all channels", every), Masked("pruned")], prefix_tokens=PREFIX
    )
    rope = {"rope_theta": 10_000.0, **YARN}
    stretched = dense_nll(retriever_folder, input_ids, rope_parameters=rope, max_position_embeddings=1024)
    assert result.dense_nll == pytest.approx(stretched[PREFIX:].tolist(), abs=FLOAT32)
    whole, pruned = result.variants
    assert whole.nll == pytest.approx(result.dense_nll, abs=FLOAT32)
    assert max(whole.divergence) < FLOAT32 < min(pruned.divergence)
    assert (dense_nll(retriever_folder, input_ids) - stretched)[PREFIX:].abs().max() > 100 * FLOAT32
