"""`bin/benchmark serve` goes on where a side fails, and says which and how its log ends; no engine starts."""

from dataclasses import asdict

import pytest
import torch

from bin.benchmarks import serve
from bin.benchmarks.geometries import TOY
from bin.benchmarks.random_models import choose_setup
from leank_convert.errors import LeanKError

RUN = {
    "most_running": 3,
    "output_tokens_per_second": 50.0,
    "first_token_milliseconds": 20.0,
    "token_milliseconds": 4.0,
    "mean_milliseconds": 5.0,
}


def measure(monkeypatch, failing):
    """Run the command with sides of which some write a log and fail, before or after their first load."""

    def measure_side(report, name, side, loads, folder, log):
        log.write_text("starting\nRuntimeError: no room\n")
        if failing.get(name) == "start":
            raise LeanKError("vLLM's server did not start: RuntimeError: no room", exit_code=1)
        side["blocks"] = 10
        for load in loads:
            side["runs"].append({**RUN, **asdict(load)})
            if failing.get(name) == "interrupt":
                raise KeyboardInterrupt
            if failing.get(name) == "later":
                raise LeanKError("1 of 2 requests were not answered", hint="lower them", exit_code=1)

    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(serve, "_measure_side", measure_side)
    return serve.benchmark_serve(
        choose_setup(None, TOY, torch.device("cpu"), kv_dtype="fp8"),
        cases=[(64, 8), (128, 8, 5)],
        requests=6,
        concurrency=[2],
        memory=0.02,
        options="",
        dense_options="",
        peers="all-channels,dense",
    )


def test_what_the_other_sides_measured_is_kept(monkeypatch, capsys):
    document = measure(monkeypatch, {"leank": "later", "dense": "start"})
    assert not document["ok"]
    assert [len(side["runs"]) for side in document["sides"].values()] == [1, 3, 0]
    assert document["sides"]["dense"]["error"] == "vLLM's server did not start: RuntimeError: no room"
    said = capsys.readouterr().err
    assert "  RuntimeError: no room\ndense: vLLM's server did not start: RuntimeError: no room\n" in said
    assert "leank: 1 of 2 requests were not answered; lower them" in said
    assert said.count("better than all-channels") == 1


def test_where_ours_does_not_start_the_others_are_measured(monkeypatch):
    document = measure(monkeypatch, {"leank": "start"})
    assert [len(side["runs"]) for side in document["sides"].values()] == [0, 3, 3]
    with pytest.raises(LeanKError, match="did not start"):
        measure(monkeypatch, dict.fromkeys(("leank", "all-channels", "dense"), "start"))


def test_what_was_measured_before_an_interrupt_is_kept(monkeypatch, capsys):
    document = measure(monkeypatch, {"all-channels": "interrupt"})
    assert not document["ok"]
    runs = {name: len(side["runs"]) for name, side in document["sides"].items()}
    assert runs == {"leank": 3, "all-channels": 1}
    assert document["sides"]["all-channels"]["error"] == "interrupted"
    assert capsys.readouterr().err.count("serve, prompt") == 3
