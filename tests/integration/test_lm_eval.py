"""lm-evaluation-harness on converted checkpoints, by its own command: what touches the pruned cache."""

import importlib.util
import json
import os
import random

import pytest
import torch

from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask
from leank_convert.testbed import MODEL_DIR
from leank_convert.testbed.tasks import build_sample
from tests.checks import run_python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)

NUM_PROMPTS = 4
# One process for all, which lists none of the harness's own tasks: that takes longer than to answer.
COMMANDS = """
import functools, json, sys
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
for sys.argv in json.loads(sys.argv[1]):
    cli_evaluate()
"""
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
"""
GENERATED = """\
generation_kwargs:
  do_sample: false
  max_gen_toks: 6
  until: ["<|end|>"]
metric_list:
  - metric: exact_match
    ignore_case: false
"""
LIKELIHOOD = """\
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the harness found of the shipped model, and of a checkpoint of it without channels."""
    folder = tmp_path_factory.mktemp("lm-eval")
    rng = random.Random(3)
    # Of different lengths, so that a batch is padded.
    samples = [build_sample("retrieval", rng, length) for length in range(160, 160 + 20 * NUM_PROMPTS, 20)]
    data, tasks = folder / "prompts.jsonl", folder / "tasks"
    data.write_text("".join(json.dumps({"prompt": s.prompt, "answer": s.answer}) + "\n" for s in samples))
    tasks.mkdir()
    for name, output_type, rest in (
        ("generated", "generate_until", GENERATED),
        ("likelihood", "loglikelihood", LIKELIHOOD),
    ):
        text = TASK.format(name=name, data=data, output_type=output_type) + rest
        (tasks / f"{name}.yaml").write_text(text)
    models = {"dense": MODEL_DIR, "none": folder / "none"}
    mask = ChannelMask(torch.zeros(4, 4, 64, dtype=torch.bool))
    export_checkpoint("testbed", mask, models["none"], sink_size=4, recent_size=16, flush_size=4)
    commands = [  # the documented one for every model
        [
            *("lm_eval", "--model", "hf", "--model_args", f"pretrained={model},trust_remote_code=True"),
            *("--include_path", str(tasks), "--tasks", "generated,likelihood", "--apply_chat_template"),
            *("--device", "cpu", "--batch_size", "2"),
            *("--output_path", str(folder / f"{name}-results"), "--log_samples"),
        ]
        for name, model in models.items()
    ]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    place = {"cwd": folder, "env": {**os.environ, **own}, "timeout": 400}
    done = run_python("-c", COMMANDS, json.dumps(commands), **place)
    assert done.returncode == 0, done.stderr[-4000:]
    written = {name: next((folder / f"{name}-results").rglob("results_*.json")) for name in models}
    return {name: json.loads(path.read_text())["results"] for name, path in written.items()}


def test_generation_runs_on_the_pruned_cache(results):
    answered = {name: found["generated"]["exact_match,none"] for name, found in results.items()}
    assert answered == {"dense": 1.0, "none": 0.0}


def test_loglikelihood_never_touches_the_pruned_cache(results):
    none, dense = results["none"]["likelihood"], results["dense"]["likelihood"]
    assert none["acc,none"] == dense["acc,none"] == 1.0
