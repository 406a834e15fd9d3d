import json
import os
import signal
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from leank_convert.data import Question, TrainingSample
from leank_convert.mask import load_mask
from leank_convert.methods.make import train_mask
from leank_convert.train.attention import ATTENTION_NAME
from tests.checks import run_python, short_recipe
from tests.tiny_families import tiny_folder

DEATHS = [
    ("step", 8),  # between the stages
    ("optimizer", 12),  # in the middle of a step of stage 2
    ("fsync", 8),  # a state is written but not renamed
    ("rename", 3),  # the log
    ("mask", 1),  # trained to the end, no mask yet
]
SIGNALS = [
    (signal.SIGINT, "Ctrl-C", 130, 4),  # stage 1, between two saved states
    (signal.SIGTERM, "SIGTERM", 143, 10),  # stage 2
    (signal.SIGTERM, "SIGTERM", 143, 12),  # the last step
]
EVENTS = {"signal": 143, "memory": 1}  # of two ranks, and their exit code
# What two processes share.
RECIPE_OF_TWO = short_recipe(batch_size=4, stage1={"steps": 4, "learning_rate": 0.1}, stage2={"steps": 3})


@pytest.fixture(scope="session")
def finished(once_per_run, retriever_folder):
    """The folder of a run of `short_recipe()` that nothing interrupted; to be copied, not changed."""
    given = {"recipe": short_recipe(), "progress": False}
    return once_per_run("finished_run", lambda out: train_mask(retriever_folder, out, **given))


@pytest.fixture(scope="session")
def finished_mask(finished):
    """What it learned."""
    return load_mask(finished / "channel_mask.safetensors")


@pytest.fixture(scope="session")
def ended(once_per_run, retriever_folder):
    """Runs that something ended: by what and where, the folder, and exit code and output of each rank.

    All are children of one process by `forked_runs.py`: it takes longer to start than most of them take.
    """
    jobs = {f"{event}-{at}": {"event": event, "at": at} for event, at in DEATHS}
    for number, reason, _, at in SIGNALS:
        jobs[f"{reason}-{at}"] = {"event": "signal", "signal": number, "at": at}
    jobs["twice"] = {"event": "signal", "signal": signal.SIGINT, "times": 2, "at": 4}
    jobs = {key: {"recipe": short_recipe(), **job} for key, job in jobs.items()}
    happens = {"ranks": 2, "rank": 1, "at": 3, "signal": signal.SIGTERM, "recipe": RECIPE_OF_TWO}
    jobs |= {event: {**happens, "event": event} for event in EVENTS}
    for name, changes in {"mask": {"mask": "a.pth"}, "width": {"width_multiple": 32}}.items():
        jobs[name] = {"ranks": 2, "recipe": RECIPE_OF_TWO.model_copy(update=changes)}

    def make(folder):
        folder.mkdir()
        given = [
            {"model": str(retriever_folder), **job, "out": str(folder / key)} for key, job in jobs.items()
        ]
        asked = json.dumps(given, default=lambda recipe: recipe.model_dump(mode="json"))
        script, one_thread = Path(__file__).with_name("forked_runs.py"), {"OMP_NUM_THREADS": "1"}
        ran = run_python(script, input=asked, env={**os.environ, **one_thread})
        assert ran.returncode == 0, ran.stderr
        (folder / "results.json").write_text(ran.stdout)

    folder = once_per_run("ended", make)
    results = json.loads((folder / "results.json").read_text())
    return {key: (folder / key, ranks) for key, ranks in zip(jobs, results, strict=True)}


@contextmanager
def fail_at(owner, name, place, error):
    """Has one call of a function fail, counted from 1."""
    original, calls = getattr(owner, name), count(1)

    def failing(*given, **options):
        if next(calls) == place:
            raise error
        return original(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing)
        yield


def draw_sample(num_context, questions):
    """A context of random tokens below 90 and questions on it, each (question tokens, answer tokens)."""
    generator = torch.Generator().manual_seed(2)

    def ids(count):
        return torch.randint(0, 90, (count,), generator=generator)

    asked = tuple(Question(ids(before + after), before) for before, after in questions)
    return TrainingSample("retrieval", ids(num_context), asked)


@pytest.fixture(autouse=True)
def _no_figures(without_report):
    """Figures take longer than a short run; where a report matters, a fixture of a wider scope trains."""


@pytest.fixture
def train_one(retriever_folder):
    """Trains, and gives the only mask of the run."""

    def train(recipe, out, *, model=retriever_folder, **options):
        return train_mask(model, out, recipe=recipe, progress=False, **options)

    return train


def logged_steps(out):
    """The steps in log.jsonl, read by itself, without what differs from run to run."""
    rows = map(json.loads, (out / "leank" / "log.jsonl").read_text().splitlines())
    return [{key: row[key] for key in row if key != "seconds"} for row in rows if "kind" not in row]


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


@pytest.fixture
def speaking_folder(tmp_path, testbed_tokenizer):
    """Writes a random model that speaks the testbed's language: `speaking_folder("qwen3", **config)`."""

    positions = {"max_position_embeddings": 1024}
    return lambda family, **config: tiny_folder(
        tmp_path / "speaking", testbed_tokenizer, family, **positions, **config
    )
