"""A run's forecast: numbers worked out by hand, its verdict, and a dry run that leaves nothing behind."""

import json
from unittest.mock import Mock

import pytest
import torch

from bin.benchmarks.geometries import GEOMETRIES
from leank_convert.recipe_file import load_recipe
from leank_convert.train import forecast as module
from leank_convert.train.forecast import Forecast, forecast
from leank_convert.train.model import count_bytes, find_model
from tests.checks import done, run, short_recipe, snapshot

GB = 10**9


def forecast_llama(*overrides, capacity=80 * GB, **changes):
    """The paper's recipe on one GPU of so many bytes, with changes."""
    values = {"processes": 1, "device": "Some GPU", "tokens": 57344, "why_unmeasured": "not asked for"}
    memory = {"weights": 16_060_522_496, "context": 2 * 32 * 8 * 128 * 2 * 98304, "working": 2 * GB}
    memory |= {"total": sum(memory.values()), "capacity": capacity}
    values["memory"] = memory | {"fits": capacity and memory["total"] <= capacity}
    recipe = load_recipe("llama-3.1-8b-instruct", overrides)
    return Forecast("llama", GEOMETRIES["llama-3.1-8b"].facts, recipe, **{**values, **changes})


def test_steps_contexts_questions_and_time_are_counted():
    papers = forecast_llama().to_dict()
    assert papers["steps"] == papers["contexts"] == papers["questions"] == 2200
    assert (papers["scaling_factors"], papers["tokens"]) == (32 * 8 * 128, 2200 * 57344)
    assert papers["phases"] == [
        {"stage": 1, "pruning_ratio": None, "steps": 2000},
        {"stage": 2, "pruning_ratio": 0.7, "steps": 200},
    ]
    overrides = ["pruning_ratio=[0.5, 0.625]", "batch_size=4", "data.questions_per_context=8"]
    found = forecast_llama(*overrides, processes=2, tokens=57792, seconds_per_context=1.5)
    document = json.loads(json.dumps(found.to_dict()))
    assert (document["steps"], document["contexts"], document["questions"]) == (2400, 9600, 76800)
    assert document["tokens_per_step"] == 4 * 57792
    assert document["seconds"] == 2400 * 2 * 1.5  # each process has two contexts of a step
    text = " ".join(found.render().split())
    assert "2,400: 2,000 of stage 1, 200 of stage 2 at 50%, 200 of stage 2 at 62.5%" in text
    assert "2 h 00 min with 2 processes, at 1.50 s a context of 57,792 tokens" in text
    values = forecast_llama("pruning_ratio=[0.5, 0.7]", "value_pruning_ratio=0.5", seconds_per_context=8.0)
    text = " ".join(values.render().split())
    assert "less 0.7 of K and 0.5 of V: K 19.7 kB + V 32.8 kB, about 60.0% saved" in text
    assert "32,768 scaling factors, 32,768 gates of V; the weights" in text
    assert "200 of stage 2 at 70%, 240 of gates of V beside K at 50%, 240" in text
    exact = " ".join(forecast_llama("rounding=budget", seconds_per_context=8.0).render().split())
    assert ", at least " in exact
    assert "before that about 1 min to measure the basis of V" in text
    assert values.to_dict()["bytes_per_token"]["0.5"]["value_pruned"] == 32768
    for overrides, cache in (
        (["method=duo-attention", "pruning_ratio=0.5"], "less 0.5 of K and 0.5 of V: K 32.8 kB + V 32.8 kB,"),
        (["method=duo-attention+leank"], "less 0.7 of K and 0.5 of V: K 19.7 kB + V 32.8 kB,"),
        (["max_width=48", "width_multiple=32"], "less 0.75 of K and 0 of V: K 16.4 kB + V 65.5 kB,"),
    ):
        assert cache in " ".join(forecast_llama(*overrides).render().split())
    for kv_dtype, cache in (("fp8", "K 9.8 kB + V 32.8 kB,"), ("int4", "K 6.1 kB + V 20.5 kB,")):
        assert cache in " ".join(forecast_llama("rounding=budget", kv_dtype=kv_dtype).render().split())
    for pace, told in ((4.21 / 2200, "4.2 s,"), (1080 / 2200, "18 min,"), (3590 / 2200, "1 h 00 min,")):
        assert told in forecast_llama(seconds_per_context=pace).render()


def test_what_fits_is_told_to_and_what_does_not_with_what_helps():
    text = " ".join(forecast_llama().render().split())
    assert "weights 16.1 GB + K/V of 98,304 tokens 12.9 GB + working room 2.0 GB = 30.9 GB" in text
    assert "fits: Some GPU has 80.0 GB" in text and "not estimated: not asked for" in text
    for overrides, capacity, remedy in (
        ((), 24 * GB, "`--set offload_context=true` keeps"),
        # There is no room for a layer's K/V, or there would be no use.
        ((), 16 * GB, "`--set model.device_map=auto` spreads"),
        (("offload_context=true",), GB, "`--set model.device_map=auto`"),
        (("model.device_map=auto",), GB, "lower `data.max_length`"),
    ):
        found = forecast_llama(*overrides, capacity=capacity)
        text = " ".join(found.render().split())
        assert found.to_dict()["memory"]["fits"] is False and remedy in text and "DOES NOT FIT: Some" in text
    assert "not judged: `Some GPU` is no GPU" in forecast_llama(capacity=None).render()


def test_a_dry_run_measures_the_toy_and_writes_nothing(retriever_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = snapshot(retriever_folder)
    settings = ("data.max_length=400", "data.min_length=260", "data.questions_per_context=3")
    arguments = [part for setting in (*settings, "width_multiple=4") for part in ("--set", setting)]
    arguments += ["--recipe", "quickstart", "--recent-size", "16", "--sink-size", "4", "--device", "cpu"]
    command = ["train", str(retriever_folder), "-o", "out", *arguments, "--dry-run", "--json"]
    command += ["--value-pruning-ratio", "0.5"]
    document = json.loads(done(*command))
    assert document["memory"]["context"] == 2 * 2 * 2 * 16 * 4 * 400
    assert document["steps"] == 400 + 240  # those of V
    assert document["seconds"] == 640 * document["seconds_per_context"] > 0 < document["value_seconds"]
    assert 330 < document["tokens_per_step"] < 500  # the mean length, and two more questions
    monkeypatch.setenv("RANK", "1")  # one of several processes prints the plan
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(*command).output == ""
    assert list(tmp_path.iterdir()) == [] and snapshot(retriever_folder) == before


def test_memory_is_counted_in_the_dtype_that_is_trained_in(source_model):
    folder = source_model("llama")
    numbers = sum(path.stat().st_size for path in folder.glob("*.safetensors")) // 4
    for changes, size, layers in (
        ({"model": {"dtype": "auto"}}, 4, 3),
        ({"model": {"dtype": "bfloat16"}}, 2, 3),
        ({"offload_context": True}, 4, 1),
    ):
        recipe = short_recipe(**changes)
        found = count_bytes(find_model(folder, recipe), recipe, torch.device("cpu"))
        # Files have headers beside their numbers.
        assert 0.7 * numbers * size < found["weights"] < numbers * size
        assert found["context"] == 2 * layers * 4 * 12 * 280 * size
        assert layers == 1 or found["working"] == 280 * (3 * 48 + 2 * 32) * size


def test_what_cannot_be_measured_leaves_the_rest(retriever_folder, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore of it")
    fail = Mock(side_effect=error)
    for place, part in (("train.graphs.distil", "a step"), ("train.model._load_weights", "the weights")):
        with monkeypatch.context() as patch:
            patch.setattr(f"leank_convert.{place}", fail)
            found = forecast(retriever_folder, short_recipe(), device="cpu")
        assert found.to_dict()["seconds"] is None and found.to_dict()["steps"] == 13
        assert f"not estimated: memory does not suffice for {part}" in found.render()


@pytest.mark.gpu
def test_on_a_gpu_it_is_judged(retriever_folder):
    found = forecast(retriever_folder, short_recipe())
    assert found.memory["fits"] and found.seconds_per_context is not None


def test_a_context_that_takes_minutes_on_a_cpu_is_not_run(retriever_folder, monkeypatch):
    monkeypatch.setattr(module, "load_model", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(module, "_LONGEST_SECONDS", 0)
    found = forecast(retriever_folder, short_recipe(), device="cpu")
    assert "not estimated: a context of 240 tokens takes minutes on this CPU" in found.render()
