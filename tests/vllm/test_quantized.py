"""Quantized weights: their one rank has all heads in order, so what belongs to them is loaded as it is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from leank_convert.vllm.models import _LeanKForCausalLM

ATTENTION = "model.layers.0.self_attn"


class Stock:
    def load_weights(self, weights: Any) -> set[str]:
        self.loaded = dict(weights)
        return set(self.loaded)


class Quantized(_LeanKForCausalLM, Stock):
    def __init__(self) -> None:
        self._quantized = True
        self._attentions = [SimpleNamespace(key_scale=None)]  # the cache is in the model's dtype
        # Keys have no mean.
        self._config, self._source = SimpleNamespace(leank={}), ("out", {})
        self._settings = SimpleNamespace(has_key_mean=False)


def test_scales_of_any_shape_are_loaded_as_they_are():
    weights = {
        f"{ATTENTION}.q_proj.weight": torch.ones(64, 32),
        f"{ATTENTION}.q_proj.weight_scale": torch.ones(1),
        f"{ATTENTION}.o_proj.weight": torch.ones(32, 64),
        f"{ATTENTION}.o_proj.weight_scale": torch.ones(32, 1),
        f"{ATTENTION}.o_proj.input_scale": torch.ones(()),
    }
    model = Quantized()
    assert model.load_weights(weights.items()) == weights.keys()
    assert all(model.loaded[name] is tensor for name, tensor in weights.items())
