"""Quantized weights and their scales go to the ranks that have their heads, or are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from leank_convert.vllm.models import _LeanKForCausalLM

ATTENTION = "model.layers.0.self_attn"
ONE, TWO = ((range(4),),), (((0, 3),), ((1, 2),))  # KV heads of one rank and of two


class Stock:
    def load_weights(self, weights: Any) -> set[str]:
        self.loaded = dict(weights)
        return set(self.loaded)


class Quantized(_LeanKForCausalLM, Stock):
    def __init__(self, heads: Any) -> None:
        self._quantized, self._has_gate, self._layers_differ = True, False, False
        self._num_heads = 8
        self._attentions = [SimpleNamespace(key_scale=None)]  # the cache is in the model's dtype
        self._pages = SimpleNamespace(heads=heads, widths=((),))
        # Keys have no mean, and V is as it comes.
        self._config, self._source = SimpleNamespace(leank={}), ("out", {})
        has = {"has_key_mean": False, "has_value_basis": False}
        self._settings = SimpleNamespace(**has, head_dim=16, layers=(0,))


def test_one_rank_loads_whatever_layout_as_it_is():
    weights = {
        f"{ATTENTION}.q_proj.qweight": torch.ones(64, 32),
        f"{ATTENTION}.q_proj.weight_scale": torch.ones(7),
        f"{ATTENTION}.o_proj.weight": torch.ones(32, 64),
        f"{ATTENTION}.o_proj.weight_scale": torch.ones(32, 1),
        f"{ATTENTION}.o_proj.input_scale": torch.ones(()),
    }
    model = Quantized(ONE)
    assert model.load_weights(weights.items()) == weights.keys()
    assert all(model.loaded[name] is tensor for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("name", "shape", "moves"),
    [
        ("q_proj.weight_scale", (128, 1), 16),  # of rows
        ("k_proj.weight_scale", (64,), 16),
        ("v_proj.weight_scale_inv", (4, 2), 1),  # of blocks that are a head
        ("o_proj.weight_scale_inv", (2, 16), 2),  # of two blocks to a head
        ("q_proj.weight_scale", (), 0),  # of all
        ("q_proj.input_scale_ub", (1,), 0),
        ("o_proj.weight_scale", (32, 1), 0),
        ("o_proj.weight_scale", (32,), 0),
        ("k_proj.weight_scale_inv", (2, 2), None),  # two heads share a block
        ("k_proj.weight_packed", (64, 4), None),
        ("o_proj.weight", (32, 64), None),  # two elements to a byte
    ],
)
def test_what_heads_have_of_a_tensor_moves_with_them(name, shape, moves):
    model, tensor = Quantized(TWO), torch.rand(shape)
    name = f"{ATTENTION}.{name}"
    if moves is None:
        with pytest.raises(ValueError, match=rf"^`{name}` is of shape \[.*serve it on one GPU"):
            model.with_ordered_heads(name, tensor)
        return
    found = model.with_ordered_heads(name, tensor)
    if not moves:
        assert found is tensor
        return
    dim = int("o_proj" in name)
    heads = tensor.unflatten(dim, (-1, moves))
    order = torch.tensor([0, 3, 1, 2])
    if heads.shape[dim] == 8:  # two query heads to each of K and V
        order = torch.stack([2 * order, 2 * order + 1], 1).flatten()
    assert found.equal(heads.index_select(dim, order).flatten(dim, dim + 1))
