"""Weights that are unpacked as a model is loaded: what of it stays as it was."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from leank_convert import unpack
from leank_convert.unpack import unpack_weights


def make_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.dtype, model.hf_quantizer, model._skip_keys_device_placement = torch.float32, "a quantizer", None
    return model


def test_a_scheme_without_weights_is_left_alone():
    model = make_model()
    model[0].quantization_scheme = "of its products"
    model[1].register_module("attention", nn.Module())
    model[1].attention.quantization_scheme = "of a cache"
    before = model[0].weight.clone()
    unpack_weights(model, rounds_inputs=False)
    assert torch.equal(model[0].weight, before)
    assert not model[0].quantization_enabled and not model[1].attention.quantization_enabled
    model[0].quantization_enabled = True
    unpack_weights(model, rounds_inputs=True)
    assert model[0].quantization_enabled


@pytest.mark.parametrize(
    ("devices", "is_packed", "times"),
    [({"0": 0, "1": 1}, True, 1), ({"0": 0, "1": 1}, False, 0), ({"": 0}, True, 0), (None, True, 0)],
)
def test_layers_on_several_devices_stay_there(devices, is_packed, times, monkeypatch):
    """What moves hidden states between them goes with what held the packed weights."""
    dispatch = Mock()
    monkeypatch.setattr(unpack, "dispatch_model", dispatch)
    model = make_model()
    model.hf_device_map = devices
    if is_packed:
        model.register_forward_pre_hook(lambda model, _: delattr(model, "hf_device_map"))
    unpack_weights(model, rounds_inputs=True)
    assert [call.args for call in dispatch.call_args_list] == [(model, devices)] * times
