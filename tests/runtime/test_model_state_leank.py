"""What may be captured: which steps, and which models."""

import pytest
import torch

from runtime.model_state_leank import ModelState, why_step_is_eager
from tests.runtime.tiny_inputs import WIDTHS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"inputs": {"output_hidden_states": True}}, "argument output_hidden_states"),
        ({"inputs": {"labels": torch.ones(2, 1)}}, "argument labels"),
        ({"inputs": {"logits_to_keep": torch.tensor([0])}}, "argument logits_to_keep"),
        ({"inputs": {"logits_to_keep": -1}}, "argument logits_to_keep"),
        ({"inputs": {"return_dict": False}}, "argument return_dict"),
        ({"inputs": {"position_ids": torch.ones(3, 2, 1, dtype=torch.long)}}, "argument position_ids"),
        ({"inputs": {"some_mask": torch.ones(1)}}, "argument some_mask"),
        ({"inputs": {"some_mask": None, "labels": None, "return_dict": True}}, None),
        ({"tokens": torch.ones(2, 1, dtype=torch.long, device="meta")}, "device meta has no graphs"),
        ({"config": {"output_hidden_states": True}}, "the config asks for another output"),
        ({"autocast": True}, "autocast is on"),
    ],
    ids=str,
)
def test_which_steps_are_captured(change, reason, graphs, model_pair):
    model = model_pair(WIDTHS).leank
    for name, value in change.get("config", {}).items():
        setattr(model.config, name, value)
    tokens = change.get("tokens", torch.full((2, 1), 5))
    inputs = {"input_ids": tokens, "inputs_embeds": None, "position_ids": None, "logits_to_keep": 0}
    inputs |= change.get("inputs", {})
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=change.get("autocast", False)),
    ):
        assert why_step_is_eager(model, inputs, tokens) == reason


ON_META = torch.nn.Parameter(torch.empty(64, 48, device="meta"))


class Adapter(torch.nn.Linear):
    """A module that is not of the stock model."""


def rope(kind):
    original = {"original_max_position_embeddings": 2048} if kind == "yarn" else {}
    return {"rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, **original}}


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        ({}, (), None),
        (rope("yarn"), (), None),
        (rope("dynamic"), (), "rotary embedding of type 'dynamic' changes with the length"),
        ({}, ("model.layers.1.mlp", "up_proj", Adapter(48, 40)), "module Adapter is not of the stock model"),
        ({}, ("lm_head", "weight", ON_META), "weights are not all on cpu"),
        ({}, ("", "hf_quantizer", object()), "the model is quantized"),
    ],
)
def test_which_models_are_captured(config, change, reason, model_pair):
    model = model_pair(WIDTHS, **config).leank
    if change:
        module, name, value = change
        setattr(model.get_submodule(module), name, value)
    found = ModelState(model, torch.device("cpu")).why_eager
    assert found == reason or reason in found
