"""Evaluation of checkpoints of the shipped model: it tells a good mask from a useless one."""

import pytest
import torch

from leank_convert.errors import LeanKError
from leank_convert.evaluate import evaluate_checkpoint
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask
from leank_convert.recipe_file import load_recipe

DATA = load_recipe("quickstart", ["data.min_length=256", "data.max_length=384"]).data
WINDOWS = {"sink_size": 16, "recent_size": 64, "flush_size": 16}


@pytest.fixture(scope="module")
def compare(tmp_path_factory):
    def run(channel_mask, name, data=DATA, **windows):
        out = tmp_path_factory.mktemp("evaluate") / name
        export_checkpoint("testbed", ChannelMask(channel_mask), out, **(WINDOWS | windows))
        return evaluate_checkpoint(out, data, num_samples=6, seed=7, device="cpu", batch_size=4)

    return run


def test_all_channels_lose_nothing_and_the_window_alone_knows_nothing(compare):
    result = compare(torch.ones(4, 4, 64, dtype=torch.bool), "all")
    assert result.total.n == 6
    assert set(result.by_task) == set(DATA.tasks)
    assert result.total.dense == result.total.pruned == 1.0
    assert result.total.window == 0.0
    assert result.cache.key_pruned == result.cache.key_dense
    assert result.cache.value_pruned == result.cache.value_dense


def test_no_channels_are_the_window_alone(compare):
    result = compare(torch.zeros(4, 4, 64, dtype=torch.bool), "none")
    assert result.total.dense == 1.0
    assert result.total.pruned == result.total.window == 0.0
    assert result.pruning_ratio == 1.0
    slots = WINDOWS["sink_size"] + WINDOWS["recent_size"] + WINDOWS["flush_size"]
    assert result.cache.key_pruned <= result.cache.key_dense * slots / result.cache.num_tokens


def test_same_seed_same_outcomes(compare):
    mask = torch.ones(4, 4, 64, dtype=torch.bool)
    mask[:, :, ::2] = False
    assert compare(mask, "first").outcomes == compare(mask, "second").outcomes


def test_prompts_within_the_window_prove_nothing_and_are_refused(compare):
    with pytest.raises(LeanKError, match="nothing of any prompt would be pruned"):
        compare(torch.ones(4, 4, 64, dtype=torch.bool), "wide", recent_size=400)


def test_some_prompts_within_the_window_are_counted(compare, caplog):
    result = compare(torch.ones(4, 4, 64, dtype=torch.bool), "half", recent_size=300)
    assert 0 < result.num_whole < result.total.n
    assert f"{result.num_whole} of 6 prompts" in caplog.text


def test_a_haystack_that_no_task_uses_is_refused_as_in_training(compare):
    data = load_recipe("quickstart", ["data.haystack.source=story.txt"]).data
    with pytest.raises(LeanKError, match="none of the tasks"):
        compare(torch.ones(4, 4, 64, dtype=torch.bool), "haystack", data)
