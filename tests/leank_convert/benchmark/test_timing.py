"""Counts and order of what is timed; never how long it takes."""

import pytest
import torch

from leank_convert.benchmark import environment
from leank_convert.benchmark.decoding import time_limit
from leank_convert.benchmark.timing import Stopwatch, copies_needed, outgrow_l2, summarize, time_calls
from leank_convert.errors import LeanKError

CPU = torch.device("cpu")


def test_a_summary_is_the_median_of_rounds_over_the_calls_of_each():
    timing = summarize([8.0, 2.0, 4.0, 6.0, 100.0], 4, "how")
    assert timing.milliseconds == 6.0 / 4
    assert (timing.rounds, timing.calls, timing.method) == (5, 4, "how")
    assert timing.spread == pytest.approx((8.0 - 4.0) / 2 / 6.0)


def test_calls_take_turns_and_warm_up_once():
    order = []
    timing = time_calls([lambda: order.append("a"), lambda: order.append("b")], CPU, rounds=3)
    assert order == ["a", "b"] * 4
    assert (timing.rounds, timing.calls, timing.method) == (3, 2, "wall clock")


def test_gaps_lie_between_marks():
    stopwatch = Stopwatch(CPU)
    assert stopwatch.gaps() == []
    for _ in range(4):
        stopwatch.mark()
    assert len(stopwatch.gaps()) == 3


def test_small_inputs_are_copied_until_l2_cannot_hold_them(monkeypatch):
    class Properties:
        L2_cache_size = 50 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda", 0)
    assert copies_needed(1 << 30, cuda) == 1
    assert copies_needed(100 << 20, cuda) == 4
    assert copies_needed(1, cuda) == 16
    assert copies_needed(1, CPU) == 1
    assert outgrow_l2(100 << 20, 4, cuda)
    assert outgrow_l2(1 << 30, 1, cuda)
    assert not outgrow_l2(1 << 20, 16, cuda)
    assert outgrow_l2(1, 1, CPU)


def test_a_time_limit_ends_what_runs_inside_and_nothing_after():
    with pytest.raises(TimeoutError, match=r"more than 0.05 s"), time_limit(0.05):
        while True:
            pass
    with time_limit(60):
        pass


def test_bandwidth_counts_the_bytes_of_one_buffer(monkeypatch):
    seen = []

    def fixed(calls, device, *, rounds):
        seen.append(calls[0]())
        return summarize([2.0], 1, "fixed")

    monkeypatch.setattr(environment, "time_calls", fixed)
    ways = environment.measure_read_bandwidth(CPU, rounds=1)
    assert len(seen) == len(ways) > 3
    assert set(ways.values()) == {(1 << 24) / 2.0 / 1e6}


def test_host_bandwidth_is_read_by_the_threads_asked_for(monkeypatch):
    seen = []

    def fixed(calls, device, *, rounds):
        seen.append((calls[0]().numel(), torch.get_num_threads()))
        return summarize([2.0], 1, "fixed")

    monkeypatch.setattr(environment, "time_calls", fixed)
    before = torch.get_num_threads()
    ways = environment.measure_host_read_bandwidth(1004, before + 1, rounds=1)
    assert seen == [(1, before + 1)] * len(ways)
    assert set(ways.values()) == {1000 / 2.0 / 1e6}
    assert torch.get_num_threads() == before


def test_the_commit_is_told_in_a_checkout_and_only_there(monkeypatch, tmp_path):
    facts = environment.describe_environment(CPU)
    assert facts["commit"] is None or len(facts["commit"].removesuffix("+")) == 12
    package = tmp_path / "leank_convert" / "benchmark"
    package.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    assert environment.describe_environment(CPU)["commit"] is None


def test_other_devices_are_refused(monkeypatch):
    monkeypatch.setattr(environment, "choose_device", lambda device: torch.device("meta"))
    with pytest.raises(LeanKError, match="not on `meta`"):
        environment.choose_benchmark_device("meta")
