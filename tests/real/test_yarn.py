"""SmolLM2-135M-Instruct with YaRN x2: trained, exported, verified, and decoded beyond its 8192 positions.

It shows that the path works, which the paper's mask for Qwen2.5-7B under YaRN took too. The model was not
made for such lengths and is weak there: what it answers is no figure.
"""

from pydoc_data.topics import topics

import pytest
import torch

from leank_convert.convert import convert_model
from leank_convert.evaluate.loading import load_evaluated
from leank_convert.evaluate.text import compare_text
from leank_convert.evaluate.variants import Masked
from leank_convert.recipe import Recipe
from leank_convert.verify import verify_checkpoint

pytestmark = pytest.mark.real

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}
PREFIX, NUM_TOKENS = 9000, 16


def test_beyond_its_positions_it_decodes_by_the_rope_that_it_was_trained_with(smollm2, tmp_path):
    recipe = Recipe(
        model={"config_overrides": {"max_position_embeddings": 16384, "rope_parameters": YARN}},
        windows={"sink_size": 64, "recent_size": 256, "flush_size": 32},
        width_multiple=16,
        data={"min_length": 800, "max_length": 900, "questions_per_context": 4},
        stage1={"steps": 2},
        stage2={"steps": 1},
        held_out_samples=0,
        trackers=(),
    )
    (out,) = convert_model(smollm2, tmp_path / "out", recipe, device="cpu", progress=False)
    assert verify_checkpoint(out, smollm2).ok
    evaluated = load_evaluated(out, torch.device("cpu"))
    assert evaluated.model.config.max_position_embeddings == 16384
    assert evaluated.dense.config.rope_parameters["rope_type"] == "yarn"
    every = Masked("all channels", torch.ones_like(evaluated.channel_masks))
    text = "\n\n".join(topics[name] for name in sorted(topics))[:60_000]
    result = compare_text(
        evaluated, text, [every, Masked("pruned")], prefix_tokens=PREFIX, num_tokens=NUM_TOKENS
    )
    whole, pruned = (result.mean(variant) for variant in result.variants)
    assert (whole.first, whole.n) == (PREFIX, NUM_TOKENS)
    assert whole.kl < 0.01 < pruned.kl
    assert whole.dense_nll < 6  # nats of 49152 tokens: it still reads
