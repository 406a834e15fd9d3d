"""Counts and order of what is timed; never how long it takes. The search for the largest batch."""

import pytest
import torch

from bin.benchmarks.measuring import copies_needed, time_calls
from bin.benchmarks.memory import find_largest

CPU = torch.device("cpu")


def test_calls_take_turns_and_warm_up_once():
    order = []
    timing = time_calls([lambda: order.append("a"), lambda: order.append("b")], CPU, rounds=3)
    assert order == ["a", "b"] * 4
    assert (timing.rounds, timing.calls, timing.method) == (3, 2, "wall clock")


def test_small_inputs_are_copied_until_l2_cannot_hold_them():
    l2 = 50 << 20
    assert [copies_needed(size, l2) for size in (1 << 30, 100 << 20, 1)] == [1, 4, 64]
    assert copies_needed(1, 0) == 1, "no L2, as on the CPU"


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
