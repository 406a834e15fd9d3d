"""A checkpoint and its dense twin."""

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.evaluate.loading import load_evaluated, load_model
from tests.checks import edit_json, refusal


def test_the_dense_twin_holds_the_very_parameters(evaluated):
    """Tensors of the same memory would not do: a decode step may lay a model's parameters elsewhere."""
    ours, twins = (dict(model.named_parameters()) for model in (evaluated.model, evaluated.dense))
    assert ours.keys() == twins.keys()
    assert all(weight is ours[name] for name, weight in twins.items())


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("config.json", {"intermediate_size": 40}),
        ("config.json", {"model_type": "leank_llama", "auto_map": {"AutoConfig": "none_leank.Config"}}),
        ("generation_config.json", {"max_new_tokens": "many"}),
    ],
    ids=["weights of another shape", "a missing file", "nonsense beside the weights"],
)
def test_what_transformers_cannot_load_is_one_sentence(file, keys, source_model):
    source = source_model()
    edit_json(source / file, **keys)
    with pytest.raises(LeanKError, match=f"`{source}` cannot be loaded: "):
        load_model(source, torch.device("cpu"), trust_remote_code=True)


@pytest.mark.parametrize("keys", [{"text_config": {}}, {"text_config": "x"}], ids=str)
def test_a_config_that_transformers_refuses_is_one_sentence(keys, shipped_checkpoint, copy_of):
    out = copy_of(shipped_checkpoint)
    edit_json(out / "config.json", **keys)
    with refusal(f"`{out}` is refused by transformers: ", f"`leank-convert verify {out}`"):
        load_evaluated(out, torch.device("cpu"))
