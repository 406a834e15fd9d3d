"""SmolLM2-135M-Instruct with its packaged mask, served: answers of its own runtime, in float32."""

import json
import os
from pathlib import Path

import pytest

from leank_convert.evaluate.ruler import draw_prompts
from leank_convert.export import export_checkpoint
from leank_convert.tokenizer import load_tokenizer
from tests.vllm.conftest import answer_of, load_runtime, run_python, serving

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

from openai import OpenAI

ROOT = Path(__file__).parent.parent.parent
SMOLLM2 = Path(os.environ.get("SMOLLM2", ROOT / ".venv" / "smollm2"))
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not SMOLLM2.exists(), reason="bin/fetch-smollm2 .venv/smollm2 was not run"),
]
NEW = 24
TASK = """\
task: needles
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {do_sample: false, max_gen_toks: NEW, until: ["<|im_end|>"]}
filter_list:
  - name: number
    filter:
      - {function: regex, regex_pattern: "(\\\\d{7})"}
      - {function: take_first}
metric_list:
  - {metric: exact_match}
""".replace("NEW", str(NEW))


@pytest.fixture(scope="module")
def prompts():
    """50 prompts of some 700 tokens; with its windows of 64 and 256 more than half of each is pruned."""
    return draw_prompts(load_tokenizer(SMOLLM2), ["niah_single_2"], [830], num_samples=50, seed=3)


@pytest.fixture(scope="module")
def checkpoint(once_per_run):
    return once_per_run("served_smollm2", lambda out: export_checkpoint(SMOLLM2, None, out))


@pytest.fixture(scope="module")
def answers(checkpoint, prompts):
    """What `generate` answers, one prompt at a time."""
    model = load_runtime(checkpoint)
    return [answer_of(model, prompt.input_ids.tolist(), NEW) for prompt in prompts]


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    # Room for all prompts: the harness asks for them again.
    with serving(checkpoint, log, kv_cache_memory_bytes=2 << 30) as running:
        yield running.url


def test_fifty_prompts_are_answered_with_generates_tokens(server, checkpoint, prompts, answers):
    with OpenAI(base_url=f"{server}/v1", api_key="none", timeout=900) as client:
        options = {"max_tokens": NEW, "temperature": 0, "extra_body": {"return_token_ids": True}}
        asked = [prompt.input_ids.tolist() for prompt in prompts]
        said = client.completions.create(model=str(checkpoint), prompt=asked, **options)
    assert [choice.token_ids for choice in said.choices] == answers


def test_lm_eval_scores_what_generate_answers(server, checkpoint, prompts, answers, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(SMOLLM2)
    samples = [
        {"prompt": tokenizer.decode(prompt.input_ids), "answer": prompt.references[0]} for prompt in prompts
    ]
    data = tmp_path / "needles.jsonl"
    data.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (tmp_path / "needles.yaml").write_text(TASK.replace("DATA", str(data)))
    arguments = f"model={checkpoint},base_url={server}/v1/completions,num_concurrent=8,max_length=1024"
    monkeypatch.chdir(tmp_path)
    run_python(
        *("-m", "lm_eval", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", "needles", "--include_path", tmp_path, "--output_path", tmp_path / "out"),
        timeout=900,
        HF_HOME=str(tmp_path / "hub"),
    )
    (results,) = (tmp_path / "out").rglob("results_*.json")
    texts = [tokenizer.decode(answer) for answer in answers]
    right = [prompt.references[0] in text for prompt, text in zip(prompts, texts, strict=True)]
    score = json.loads(results.read_text())["results"]["needles"]["exact_match,number"]
    assert score == pytest.approx(sum(right) / len(right))
    assert score > 0.8
