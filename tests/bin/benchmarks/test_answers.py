"""`bin/benchmark answers` counts the answers that are a plain server's; no engine starts."""

from contextlib import contextmanager
from functools import partial

from bin.benchmarks import answers


def test_answers_are_held_to_those_of_a_plain_server(monkeypatch):
    # What a plain server says to three prompts, and one with options: first tokens of two are the same.
    plain, other = {1: [5, 6], 2: [7, 8], 3: [9, 9]}, {1: [5, 6], 2: [7, 0], 3: [0, 9]}
    started = []

    @contextmanager
    def start(options, gpu):
        started.append((options, gpu))
        yield plain if gpu == 0 else other

    def ask(server, prompt):
        return answers._Answer(server[prompt[0]], [1.5, 1.75] if server is plain else [0.5, 1], None)

    monkeypatch.setattr(answers, "_asker", lambda server, new: partial(ask, server))
    found = answers._compare(start, ["--shared"], [[1], [2], [3]], 2, ["--own"])
    assert started == [(["--shared"], 0), (["--shared", "--own"], None)]
    assert found == {
        "equal_first_tokens": 2,
        "equal_one_by_one": 1,
        "equal_at_once": 1,
        "first_token_milliseconds": 500,
        "token_milliseconds": 500,
        "plain_first_token_milliseconds": 1500,
        "plain_token_milliseconds": 250,
    }
