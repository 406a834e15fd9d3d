"""Counts and order of what is timed; never how long it takes. The search for the largest batch."""

import pytest
import torch

from bin.benchmarks.measuring import (
    copies_needed,
    outgrow_l2,
    time_calls,
)
from bin.benchmarks.memory import Trial, find_largest, join_rows, prefill_row
from bin.benchmarks.random_models import build_dense, build_model, choose_setup
from leank_convert._runtime.configuration_leank import CACHE

CPU = torch.device("cpu")
# What a tiny model's dense cache takes: K and V of 2 layers, 4 heads of 64 channels in fp32.
DENSE_ROW = 2 * 2 * 4 * 64 * 4


def test_calls_take_turns_and_warm_up_once():
    order = []
    timing = time_calls([lambda: order.append("a"), lambda: order.append("b")], CPU, rounds=3)
    assert order == ["a", "b"] * 4
    assert (timing.rounds, timing.calls, timing.method) == (3, 2, "wall clock")


def test_small_inputs_are_copied_until_l2_cannot_hold_them():
    l2 = 50 << 20
    assert [copies_needed(size, l2) for size in (1 << 30, 100 << 20, 1)] == [1, 4, 16]
    assert copies_needed(1, 0) == 1, "no L2, as on the CPU"
    assert outgrow_l2(100 << 20, 4, l2)
    assert not outgrow_l2(1 << 20, 16, l2)


@pytest.mark.parametrize("guess", [1, 17, 500])
@pytest.mark.parametrize("largest", [0, 1, 18, 100])
def test_the_search_ends_at_the_largest_that_fits(guess, largest):
    asked = []
    found, tried = find_largest(lambda count: asked.append(count) or count <= largest, guess)
    assert found == largest
    assert tried == {count: count <= largest for count in asked}
    assert len(asked) == len(set(asked)), "nothing is tried twice"
    assert min(asked) >= 1
    # What is reported was tried: it fits, and one more does not.
    assert largest == 0 or tried[largest]
    assert not tried[largest + 1]
    assert find_largest(lambda count: count <= 40, 40)[1] == {40: True, 41: False}


@pytest.fixture(scope="module")
def both():
    setup = choose_setup(None, "tiny")
    torch.manual_seed(0)
    model = build_model(setup)
    with torch.no_grad():
        yield model, build_dense(model, setup.geometry)


@pytest.mark.parametrize("index", [0, 1], ids=["leank", "dense"])
def test_rows_are_joined_and_decode_as_each_alone(index, both):
    model = both[index]
    prompts = torch.randint(3, 128, (3, 1, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        alone = [
            model(torch.full((1, 1), 7), **{CACHE: prefill_row(model, prompt, 60)}).logits
            for prompt in prompts
        ]
        cache = join_rows([prefill_row(model, prompt, 60) for prompt in prompts], 60)
        together = model(torch.full((3, 1), 7), **{CACHE: cache}).logits
    torch.testing.assert_close(together, torch.cat(alone))
    assert cache.get_seq_length() == 51


def test_a_trial_decodes_to_the_last_token_counts_what_is_held_and_keeps_a_limit(both, monkeypatch):
    ours, dense = both
    weights = sum(weight.nbytes for weight in dense.parameters())
    with torch.no_grad():
        trial = Trial(dense, 40, 20, limit=weights + 5 * 60 * DENSE_ROW + 1)
        assert trial.row_bytes == 60 * DENSE_ROW
        assert trial.predict() == 5
        assert trial.fits(5)
        assert not trial.fits(6)
        # 60 tokens, all of them whole, take a page of 64 for what is kept and one for what is dropped.
        assert Trial(ours, 40, 20, limit=None).row_bytes == 64 * DENSE_ROW

    def fail(batch_size):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trial, "_decode", fail)
    assert not trial.fits(1)
