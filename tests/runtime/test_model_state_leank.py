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
        ({"grad": True}, "gradients are enabled"),
        ({"autocast": True}, "autocast is on"),
    ],
    ids=str,
)
def test_which_steps_are_captured(change, reason, graphs, model_pair, some_masks):
    model = model_pair(some_masks(WIDTHS)).leank
    for name, value in change.get("config", {}).items():
        setattr(model.config, name, value)
    tokens = change.get("tokens", torch.full((2, 1), 5))
    inputs = {"input_ids": tokens, "inputs_embeds": None, "position_ids": None, "logits_to_keep": 0}
    inputs |= change.get("inputs", {})
    with (
        torch.set_grad_enabled(change.get("grad", False)),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=change.get("autocast", False)),
    ):
        assert why_step_is_eager(model, inputs, tokens) == reason


class Adapter(torch.nn.Linear):
    """A module that is not of the stock model."""


def test_which_models_are_captured(model_pair, some_masks):
    cpu = torch.device("cpu")
    masks = some_masks(WIDTHS)
    assert ModelState(model_pair(masks).leank, cpu).why_eager is None
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 2048}
    assert ModelState(model_pair(masks, rope_parameters=yarn).leank, cpu).why_eager is None
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    state = ModelState(model_pair(masks, rope_parameters=dynamic).leank, cpu)
    assert state.why_eager == "rotary embedding of type 'dynamic' changes with the length"
    model = model_pair(masks).leank
    model.model.layers[1].mlp.up_proj = Adapter(48, 40, bias=False)
    assert ModelState(model, cpu).why_eager == "module Adapter is not of the stock model"
    model = model_pair(masks).leank
    model.lm_head.forward = lambda states: states
    assert "module Linear has a forward of its own" in ModelState(model, cpu).why_eager
    model = model_pair(masks).leank
    model.lm_head.to("meta")
    assert ModelState(model, cpu).why_eager == "weights are not all on cpu"
    model = model_pair(masks).leank
    model.hf_quantizer = object()
    assert ModelState(model, cpu).why_eager == "the model is quantized"
