"""The mean that keys are centred by: what is measured, once in a run, and where it ends up."""

import logging

import pytest
import torch

from leank_convert.mask import load_mask
from leank_convert.train import key_mean
from leank_convert.train.key_mean import count_contexts, measure_keys
from leank_convert.train.state import TrainingDirectory, load_state
from tests.checks import refusal, short_recipe
from tests.leank_convert.train.conftest import stock_cache


@pytest.mark.parametrize("offload", [False, True])
def test_it_is_measured_over_all_tokens_of_the_first_contexts(load, offload):
    loaded, samples = load(offload_context=offload)
    found = measure_keys(loaded, samples, 3)
    contexts = [samples.draw(place).prefix_ids for place in range(3)]
    parts = zip(*(stock_cache(loaded, ids) for ids in contexts), strict=True)
    keys, values = (torch.cat(part, dim=2) for part in parts)
    mean = keys.double().mean(2)
    assert found.mean.dtype == torch.float16
    torch.testing.assert_close(found.mean.double(), mean, rtol=2**-10, atol=1e-5)
    torch.testing.assert_close(found.lowest, keys.amin(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.highest, keys.amax(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.largest_value, values.abs().amax(2), rtol=1e-4, atol=1e-5)
    centred = (keys - found.mean.float()[:, :, None]).abs().amax(2)
    torch.testing.assert_close(found.largest_key(found.mean), centred, rtol=1e-4, atol=1e-5)
    assert found.num_tokens == keys.shape[2]


@pytest.mark.parametrize(
    ("steps", "batch_size", "expected"), [(7, 1, 1), (350, 1, 3), (350, 2, 7), (2000, 4, 8), (1, 1, 1)]
)
def test_a_run_measures_a_hundredth_of_its_contexts(steps, batch_size, expected):
    recipe = short_recipe(stage1={"steps": steps}, stage2={"steps": 0}, batch_size=batch_size)
    assert count_contexts(recipe) == expected


def test_no_ratio_changes_what_the_mean_of_another_is_measured_on():
    steps = {"stage1": {"steps": 600}, "stage2": {"steps": 100}}
    assert [count_contexts(short_recipe(pruning_ratio=own, **steps)) for own in (0.5, [0.5, 0.7])] == [7, 7]


def test_a_run_leaves_it_in_its_mask_and_says_so(train_one, load, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="leank_convert")
    mask = train_one(short_recipe(), tmp_path)
    expected = measure_keys(*load(), 1)
    assert torch.equal(mask.key_mean, expected.mean)
    saved = load_mask(TrainingDirectory(tmp_path).mask)
    assert torch.equal(saved.key_mean, mask.key_mean)
    assert saved.provenance.key_mean_tokens == expected.num_tokens
    told = [record.message for record in caplog.records if "centred" in record.message]
    assert told == [f"keys are centred: their mean was measured on {expected.num_tokens} tokens"]


def test_keys_stay_as_they_are_where_the_recipe_says_so(train_one, finished_mask, tmp_path):
    mask = train_one(short_recipe(key_mean=False), tmp_path)
    assert mask.key_mean is None and mask.provenance.key_mean_tokens is None
    assert load_state(TrainingDirectory(tmp_path).state).key_mean is None
    # What is left of keys is what is learned on.
    assert not torch.equal(mask.scaling_factors, finished_mask.scaling_factors)


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_keys_and_values_that_are_not_finite_are_refused(load, name, value):
    loaded, samples = load()
    with torch.no_grad():
        getattr(loaded.model.model.layers[1].self_attn, name).weight[3] = value
    size = len(samples.draw(0).prefix_ids)
    with refusal(f"are not finite on a context of {size} tokens", exit_code=1):
        measure_keys(loaded, samples, 1)


def test_a_mean_beyond_float16_is_refused(load, monkeypatch):
    loaded, samples = load()
    context = key_mean.run_context_pass(loaded.model, samples.draw(0).prefix_ids)
    key, value = context.load(0)
    context._pairs[0] = key + 1e5, value
    monkeypatch.setattr(key_mean, "run_context_pass", lambda *_: context)
    with refusal(r"the mean of keys of model `.*` is beyond float16's numbers"):
        measure_keys(loaded, samples, 1)
