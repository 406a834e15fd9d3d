"""vLLM's server streams a converted checkpoint's answer to a chat request of an OpenAI client."""

import functools
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from leank_convert.testbed.tasks import build_sample
from tests.vllm.conftest import answer_of, load_runtime, read, run_python, serving

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

import random

from openai import BadRequestError, OpenAI

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def server(shipped, tmp_path_factory):
    with serving(shipped, tmp_path_factory.mktemp("server") / "log") as running:
        yield running.url


def test_an_answer_is_streamed_and_the_next_turn_hits_the_prefix_cache(server, shipped):
    prompt = build_sample("retrieval", random.Random(0), 512).prompt
    messages = [{"role": "user", "content": prompt}]
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = tokenizer.decode(answer_of(load_runtime(shipped), tokens, 24), skip_special_tokens=True)

    with OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        for _ in range(2):
            stream = client.chat.completions.create(
                model=str(shipped), messages=messages, max_tokens=24, temperature=0, stream=True
            )
            parts = [event.choices[0].delta.content or "" for event in stream]
            assert len([part for part in parts if part]) > 1
            assert "".join(parts).strip() == expected.strip()
    metrics = read(f"{server}/metrics")
    hits = [line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert float(hits[0].split()[-1]) > len(tokens) // 2


def test_a_prompt_that_is_too_long_is_refused_and_an_answer_ends_where_the_model_does(server, shipped):
    with OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60, max_retries=0) as client:
        ask = functools.partial(client.completions.create, model=str(shipped), temperature=0)
        with pytest.raises(BadRequestError, match="maximum context length is 1024 tokens"):
            ask(prompt=[5] * 1100, max_tokens=1)
        answer = ask(prompt=[5] * 1000, max_tokens=100, extra_body={"ignore_eos": True})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 24)


def test_the_example_asks_it_and_looks_at_its_cache(server):
    done = run_python(ROOT / "examples" / "vllm_client.py", "--url", server, timeout=120)
    *answers, again = (line for line in done.stdout.splitlines() if not line.startswith("vllm:"))
    assert len(answers) == 4 and all(answers) and again == answers[0]
    counters = re.findall(r"^vllm:(\w+)_total\{.*\} (\S+)$", done.stdout, re.MULTILINE)
    counted = {name: float(count) for name, count in counters}
    assert counted["num_preemptions"] == 0
    assert 0 < counted["prefix_cache_hits"] < counted["prefix_cache_queries"]


def test_metrics_that_the_page_names_are_there(server):
    page = (ROOT / "docs" / "serving.md").read_text()
    named = set(re.findall(r"`(vllm:\w+)`", page))
    assert len(named) > 5
    there = read(f"{server}/metrics")
    assert [name for name in sorted(named) if f"\n{name}" not in there] == []
