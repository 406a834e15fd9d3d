"""The commands on a CUDA device, at toy sizes: graphs are captured, peers run, peaks are counted."""

import json

import pytest

from tests.checks import run_python

pytestmark = pytest.mark.gpu


def measured(*arguments):
    done = run_python("-m", "bin.benchmarks", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("sizes", [["1x64", "3x5"], ["2x1024", "2x1024x8"]], ids=str)
def test_kernel_is_timed_by_graph_replay(sizes):
    cases = [part for size in sizes for part in ("--case", size)]
    peers = "leank-all-channels,sdpa-flash,sdpa"
    document = measured("kernel", "--geometry", "tiny", *cases, "--peers", peers, "--rounds", "3")
    assert document["kernel"] == "compiled kernel"
    assert document["environment"]["driver"]
    for case in document["cases"]:
        for entry in (*case["layers"], *case["peers"].values()):
            assert entry.get("method") == "CUDA graph replay", entry


def test_generate_replays_steps_of_all_but_the_stock_cache():
    document = measured("generate", "--geometry", "tiny", "--case", "2x100x24", "--drafts", "4")
    assert document["kernel"] == "compiled kernel"
    (case,) = document["cases"]
    ours = case["sides"]["leank"]
    assert ours["graph"]["why_eager"] is None
    assert ours["graph"]["replays"] >= 16
    assert [side.get("why") for side in case["sides"].values()] == [None] * 5
    for name in ("leank", "all-channels", "dense-graph-cudnn", "dense-graph-flash"):
        assert case["sides"][name]["replay"]["method"] == "CUDA graph replay"
        assert case["sides"][name]["check"]["ok"]
    for name in ("leank", "all-channels"):
        assert case["sides"][name]["draft"]["method"] == "CUDA graph replay"


def test_fp8_caches_decode_by_kernel_beside_ours_in_bfloat16():
    fp8 = ("--geometry", "tiny", "--kv-dtype", "fp8")
    cases = ("--case", "2x1024", "--case", "2x1024x8")
    document = measured("kernel", *fp8, *cases, "--peers", "leank-own-dtype")
    assert document["kernel"] == "compiled kernel"
    assert all(case["ok"] and case["ratios"]["leank-own-dtype"] > 0 for case in document["cases"])
    document = measured("generate", *fp8, "--case", "2x100x24", "--peers", "own-dtype,all-channels")
    (case,) = document["cases"]
    for side in case["sides"].values():
        assert side["check"]["ok"] and side["replay"]["method"] == "CUDA graph replay"


def test_memory_measures_peaks_and_finds_batches():
    document = measured("memory", "--geometry", "tiny", "--largest", "1000x12", "--limit", "0.1")
    assert document["prefill"]["leank"]["peak_bytes"] > 0
    (case,) = document["largest_batch"]
    assert case["ratio"] > 1
    assert case["dense"]["batch"] == case["dense"]["predicted_by_bytes"]


def test_training_counts_peaks_and_is_right_in_bfloat16():
    document = measured("train", "--geometry", "tiny", "--length", "512")
    assert document["ok"]
    step = document["step"]
    assert [case["questions"] for case in step["steps"]] == [1, 8]
    for case in step["steps"]:
        assert step["weight_bytes"] < case["peak_bytes"]
        assert case["ratio"] == case["peak_bytes"] / (step["weight_bytes"] + step["cache_bytes"])
