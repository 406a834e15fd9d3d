import json
import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from leank_convert.mask import load_mask
from leank_convert.methods.make import train_mask
from leank_convert.train.attention import ATTENTION_NAME
from tests.tiny_families import tiny_folder


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits may depend on the number of threads; subprocesses are told the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def finished(once_per_run, short_recipe, retriever_folder):
    """The folder of a run of `short_recipe()` that nothing interrupted; to be copied, not changed."""

    def train(out):
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        train_mask(retriever_folder, out, recipe=short_recipe(), progress=False)
        torch.set_num_threads(before)

    return once_per_run("finished_run", train)


@pytest.fixture(scope="session")
def finished_mask(finished):
    """What it learned."""
    return load_mask(finished / "channel_mask.safetensors")


@pytest.fixture(scope="session")
def run_forked(once_per_run, retriever_folder):
    """Trains in children that something happens to, by `forked_runs.py`: `run_forked("name", recipe, jobs)`.

    Gives for each job, by its key, the folder it trained into, and exit code and output of each rank.
    """

    def run(name, recipe, jobs):
        common = {"recipe": recipe.model_dump(mode="json"), "model": str(retriever_folder)}

        def make(folder):
            folder.mkdir()
            done = subprocess.run(
                [sys.executable, Path(__file__).with_name("forked_runs.py")],
                input=json.dumps([{**common, **job, "out": str(folder / key)} for key, job in jobs.items()]),
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            (folder / "results.json").write_text(done.stdout)

        folder = once_per_run(name, make)
        results = json.loads((folder / "results.json").read_text())
        return {key: (folder / key, ranks) for key, ranks in zip(jobs, results, strict=True)}

    return run


@pytest.fixture
def fail_at():
    """Has one call of a function fail, counted from 1: `with fail_at(owner, name, place, error)`."""

    @contextmanager
    def patched(owner, name, place, error):
        original, calls = getattr(owner, name), count(1)

        def failing(*given, **options):
            if next(calls) == place:
                raise error
            return original(*given, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, failing)
            yield

    return patched


@pytest.fixture(autouse=True)
def _no_figures(without_report):
    """Figures take longer than a short run; where a report matters, a fixture of a wider scope trains."""


@pytest.fixture
def train_one(retriever_folder):
    """Trains, and gives the only mask of the run."""

    def train(recipe, out, *, model=retriever_folder, **options):
        return train_mask(model, out, recipe=recipe, progress=False, **options)

    return train


@pytest.fixture(scope="session")
def read_log():
    """Reads the steps in log.jsonl by itself."""

    def read(out):
        lines = (out / "leank" / "log.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "kind" not in row]

    return read


@contextmanager
def stock_attention(model):
    """Lets a model of training attend by transformers' own code within this context."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def stock_cache(loaded, input_ids):
    """Keys and values that transformers' own cache holds of a context, each [L, H_kv, N, D]."""
    cache = DynamicCache(config=loaded.model.config)
    with torch.no_grad(), stock_attention(loaded.model):
        loaded.model.base_model(input_ids=input_ids[None], cache=cache, use_cache=True)
    return [torch.stack([getattr(layer, name)[0] for layer in cache.layers]) for name in ("keys", "values")]


def without_times(rows):
    """A log's rows without what differs from run to run."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.fixture
def speaking_folder(tmp_path, testbed_tokenizer):
    """Writes a random model that speaks the testbed's language: `speaking_folder("qwen3", **config)`."""

    positions = {"max_position_embeddings": 1024}
    return lambda family, **config: tiny_folder(
        tmp_path / "speaking", testbed_tokenizer, family, **positions, **config
    )
