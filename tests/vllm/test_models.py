"""Scales of an FP8 cache go to the heads of the rank that has them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from leank_convert.vllm import models
from leank_convert.vllm.models import _LeanKForCausalLM

HEADS = (((0, 3), (1, 2)), ((1, 2), (0, 3)))  # of two ranks in two layers
SCALES = {
    f"model.layers.{layer}.self_attn.{name}": 2.0 ** torch.randint(-9, 9, (4, 16))
    for layer in range(2)
    for name in ("key_scale", "value_scale")
}


def set_scales(scales, monkeypatch):
    """What the second rank has of them."""
    monkeypatch.setattr(models, "get_tensor_model_parallel_rank", lambda: 1)
    attentions = [
        SimpleNamespace(
            layer_name=f"model.layers.{layer}.self_attn.attn",
            key_scale=torch.ones(1, 2, 16),
            value_scale=torch.ones(1, 2, 16),
        )
        for layer in range(2)
    ]
    settings = SimpleNamespace(num_key_value_heads=4, head_dim=16)
    model = SimpleNamespace(_attentions=attentions, _pages=SimpleNamespace(heads=HEADS), _settings=settings)
    _LeanKForCausalLM._set_scales(model, scales)
    return attentions


def test_a_rank_has_the_scales_of_its_own_heads(monkeypatch):
    for layer, attention in enumerate(set_scales(SCALES, monkeypatch)):
        for name in ("key_scale", "value_scale"):
            expected = SCALES[f"model.layers.{layer}.self_attn.{name}"][list(HEADS[1][layer])]
            assert getattr(attention, name).equal(expected[None])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, "lack `model.layers.1.self_attn.key_scale`; export it again"),
        (torch.ones(3, 16), r"`model.layers.1.self_attn.key_scale` is of shape \[3, 16\], not \[4, 16\]"),
        (torch.full((4, 16), 0.3), "layer 1: `key_scale` holds 0.3.*, which is no power of two"),
    ],
    ids=["missing", "too short", "no power of two"],
)
def test_a_scale_that_is_wrong_is_named(damage, said, monkeypatch):
    scales = dict(SCALES)
    name = "model.layers.1.self_attn.key_scale"
    if damage is None:
        del scales[name]
    else:
        scales[name] = damage
    with pytest.raises(ValueError, match=said):
        set_scales(scales, monkeypatch)
