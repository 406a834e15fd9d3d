import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leank_convert.mask import load_mask
from leank_convert.methods.make import train_mask


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits may depend on the number of threads; subprocesses are told the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def finished(short_recipe, retriever_folder, tmp_path_factory):
    """The folder of a run of `short_recipe()` that nothing interrupted; to be copied, not changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "finished"
    train_mask(retriever_folder, out, recipe=short_recipe(), progress=False)
    torch.set_num_threads(before)
    return out


@pytest.fixture(scope="session")
def finished_mask(finished):
    """What it learned."""
    return load_mask(finished / "channel_mask.safetensors")


@pytest.fixture(scope="session")
def run_forked(retriever_folder):
    """Trains in children that something happens to, by `forked_runs.py`.

    Takes jobs, and gives for each job and rank the exit code and what was printed.
    """

    def run(recipe, *jobs):
        common = {"recipe": recipe.model_dump(mode="json"), "model": str(retriever_folder)}
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("forked_runs.py")],
            input=json.dumps([{**common, **job, "out": str(job["out"])} for job in jobs]),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return json.loads(done.stdout)

    return run


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Figures take longer than a short run; where a report matters, a fixture of a wider scope trains."""
    monkeypatch.setattr("leank_convert.train.loop.write_report", lambda *_: None)


@pytest.fixture
def train_one(retriever_folder):
    """Trains, and gives the only mask of the run."""

    def train(recipe, out, *, model=retriever_folder, progress=False, **options):
        return train_mask(model, out, recipe=recipe, progress=progress, **options)

    return train


@pytest.fixture(scope="session")
def read_log():
    """Reads log.jsonl by itself."""

    def read(out):
        return [json.loads(line) for line in (out / "leank" / "log.jsonl").read_text().splitlines()]

    return read


@pytest.fixture(scope="session")
def without_times():
    """A log's rows without what differs from run to run."""

    def strip(rows):
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    return strip
