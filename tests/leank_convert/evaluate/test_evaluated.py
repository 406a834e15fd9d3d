"""A checkpoint and its dense twin."""

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.evaluate.evaluated import load_model


def test_the_dense_twin_holds_the_very_parameters(evaluated):
    """Tensors of the same memory would not do: a decode step may lay a model's parameters elsewhere."""
    ours, twins = (dict(model.named_parameters()) for model in (evaluated.model, evaluated.dense))
    assert ours.keys() == twins.keys()
    assert all(weight is ours[name] for name, weight in twins.items())


def test_weights_of_another_shape_are_one_sentence(source_model, edit_json):
    source = source_model()
    edit_json(source / "config.json", intermediate_size=40)
    with pytest.raises(LeanKError, match=f"`{source}` cannot be loaded: "):
        load_model(source, torch.device("cpu"), trust_remote_code=False)
