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


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_generation_runs_on_the_pruned_cache_and_loglikelihood_never_touches_it(tmp_path):
    """Held by a checkpoint of the shipped model without channels, which answers nothing right."""
    rng = random.Random(3)
    # Of different lengths, so that a batch is padded.
    samples = [build_sample("retrieval", rng, length) for length in range(160, 160 + 20 * NUM_PROMPTS, 20)]
    data, tasks = tmp_path / "prompts.jsonl", tmp_path / "tasks"
    data.write_text("".join(json.dumps({"prompt": s.prompt, "answer": s.answer}) + "\n" for s in samples))
    tasks.mkdir()
    for name, output_type, rest in (
        ("generated", "generate_until", GENERATED),
        ("likelihood", "loglikelihood", LIKELIHOOD),
    ):
        text = TASK.format(name=name, data=data, output_type=output_type) + rest
        (tasks / f"{name}.yaml").write_text(text)
    models = {"dense": MODEL_DIR, "none": tmp_path / "none"}
    mask = ChannelMask(torch.zeros(4, 4, 64, dtype=torch.bool))
    export_checkpoint("testbed", mask, models["none"], sink_size=4, recent_size=16, flush_size=4)
    commands = [  # the documented one for every model
        [
            *("lm_eval", "--model", "hf", "--model_args", f"pretrained={model},trust_remote_code=True"),
            *("--include_path", str(tasks), "--tasks", "generated,likelihood", "--apply_chat_template"),
            *("--device", "cpu", "--batch_size", "2"),
            *("--output_path", str(tmp_path / f"{name}-results"), "--log_samples"),
        ]
        for name, model in models.items()
    ]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    place = {"cwd": tmp_path, "env": {**os.environ, **own}, "timeout": 400}
    done = run_python("-c", COMMANDS, json.dumps(commands), **place)
    assert done.returncode == 0, done.stderr[-4000:]
    for name, generated in (("dense", 1.0), ("none", 0.0)):
        (written,) = (tmp_path / f"{name}-results").rglob("results_*.json")
        found = json.loads(written.read_text())["results"]
        assert found["generated"]["exact_match,none"] == generated
        assert found["likelihood"]["acc,none"] == 1.0
