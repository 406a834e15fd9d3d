"""`bin/benchmark serve` starts a server for each side, and prints what vLLM measured of toys."""

import json

import pytest
import torch

from tests.vllm.conftest import run_python

pytest.importorskip("vllm", reason="bin/test-vllm runs it")


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="vLLM's dense model has an FP8 cache on CPUs with AVX-512 alone",
)
def test_all_sides_are_measured_on_as_much_memory():
    options = ("--device", "cpu", "--kv-dtype", "fp8", "--options", "--enforce-eager --block-size 32")
    options += ("--case", "96x8", "--case", "64x6x3")
    done = run_python("-m", "bin.benchmarks", "serve", *options, timeout=600)
    document = json.loads(done.stdout.splitlines()[-1])
    ours, dense = document["sides"]["leank"], document["sides"]["dense"]
    assert document["memory_bytes"] == 20_000_000
    assert dense["blocks"] == 20_000_000 // (2 * 2 * 4 * 64 * 32)  # K and V, layers, heads; a byte a number
    # The toy's mask keeps 0.3125 of K's channels, and V of every head of a width: some 0.6 of a dense page.
    assert 1.3 < ours["blocks"] / dense["blocks"] < 1.8
    whole = document["sides"]["all-channels"]
    assert whole["blocks"] == dense["blocks"]
    for side in (ours, whole, dense):
        assert [run["concurrency"] for run in side["runs"]] == [None, 2, None]
        assert [run["requests"] for run in side["runs"]] == [6, 4, 3]
        for figure in ("output_tokens_per_second", "token_milliseconds", "mean_milliseconds"):
            assert all(run[figure] > 0 for run in side["runs"])
    assert "serve, prompt 96, 8 new tokens, 4 requests, 2 at a time" in done.stderr
    assert dense["attention"] == "its only attention"  # GPUs have several
    assert "dense: vLLM's own LlamaForCausalLM and attention, cache in fp8" in done.stderr


def test_two_servers_that_hand_over_answer_as_one(shipped):
    options = "--device cpu --dtype float32 --hand-over --prompts 1 --longest 500 --new 6 --memory 0.05"
    vllms = ("--peers", "none", "--options", "--block-size 32")
    done = run_python("-m", "bin.benchmarks", "answers", str(shipped), *options.split(), *vllms, timeout=600)
    side = json.loads(done.stdout.splitlines()[-1])["sides"]["leank"]
    assert side["equal_first_tokens"] == side["equal_one_by_one"] == side["equal_at_once"] == 1
    assert side["moved_bytes"] > 0 and side["pieces"] > 1
    assert "answers to prompts of 500 to 500 tokens, 6 new ones" in done.stderr
