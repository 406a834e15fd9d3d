"""A model of which half of the layers have linear attention, by all that training is made of."""

import pytest
import torch
from transformers import Cache

from leank_convert.errors import LeanKError
from leank_convert.methods.make import train_mask
from leank_convert.train.graphs import Gradients, is_bound_by_host
from leank_convert.train.model import count_bytes, find_model, load_model
from tests.tiny_families import TRAINS_LINEAR


@pytest.fixture
def linear_folder(speaking_folder):
    return speaking_folder("qwen3_5_text")


@pytest.mark.skipif(not TRAINS_LINEAR, reason="this release of transformers is too old")
def test_a_run_learns_validates_and_answers_held_out_samples(linear_folder, short_recipe, tmp_path, read_log):
    base = short_recipe()
    recipe = short_recipe(
        data={**base.data.model_dump(), "questions_per_context": 2},
        stage2={**base.stage2.model_dump(), "validation_contexts": 2},
    )
    mask = train_mask(linear_folder, tmp_path / "out", recipe=recipe, device="cpu", progress=False)
    assert mask.channel_mask.shape == (2, 2, 16) and mask.provenance.layers == [1, 3]
    assert mask.scaling_factors.std() > 0.01
    steps = read_log(tmp_path / "out")
    assert len(steps) == 7 + 6 and steps[-1]["distillation"] > 0
    assert mask.provenance.held_out.distillation > 0


def test_padding_would_go_into_a_state_so_nothing_is_captured(linear_folder, short_recipe, monkeypatch):
    recipe = short_recipe()
    loaded = load_model(find_model(linear_folder, recipe), recipe, torch.device("cpu"))
    monkeypatch.setattr(type(loaded.model), "device", torch.device("cuda"))
    assert not is_bound_by_host(loaded.model, recipe.data.max_length)
    assert not Gradients(loaded.model, loaded.facts, recipe.data.max_length).captures


def test_the_context_of_a_forecast_is_that_of_layers_with_full_attention(linear_folder, short_recipe):
    recipe = short_recipe()
    found = count_bytes(find_model(linear_folder, recipe), recipe, torch.device("cpu"))
    assert found["context"] == 2 * 2 * 2 * 16 * 280 * 4


def test_an_older_transformers_is_refused(linear_folder, short_recipe, tmp_path, monkeypatch):
    monkeypatch.delattr(Cache, "get_recurrent_state", raising=False)
    with pytest.raises(LeanKError, match=r"layers with linear attention, and transformers 5\.\S+ is too old"):
        train_mask(linear_folder, tmp_path / "out", recipe=short_recipe(), device="cpu", progress=False)
    find_model(linear_folder, short_recipe())  # `analyze --model` runs no questions
