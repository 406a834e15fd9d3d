"""vLLM's server streams a converted checkpoint's answer to a chat request of an OpenAI client."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leank_convert.testbed.tasks import build_sample
from tests.vllm.conftest import ENVIRONMENT

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

import random

from openai import OpenAI


def read(url):
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


@pytest.fixture
def server(shipped, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # vLLM's command looks for a package `vllm`, which the build for CPUs is not called.
    options = {"--model": shipped, "--port": port, "--dtype": "float32", "--max-model-len": 1024}
    memory = {"--kv-cache-memory-bytes": 16 << 20, "--block-size": 32}
    arguments = [str(part) for pair in {**options, **memory}.items() for part in pair]
    log = (tmp_path / "server.log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, "--enforce-eager"],
        env={**os.environ, **ENVIRONMENT},
        stdout=log,
        stderr=log,
    )
    url = f"http://localhost:{port}"
    try:
        for _ in range(240):
            try:
                read(f"{url}/health")
                break
            except urllib.error.URLError:
                assert process.poll() is None, (tmp_path / "server.log").read_text()[-8000:]
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def test_an_answer_is_streamed_and_the_next_turn_hits_the_prefix_cache(server, shipped):
    prompt = build_sample("retrieval", random.Random(0), 512).prompt
    messages = [{"role": "user", "content": prompt}]
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    row = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(shipped, trust_remote_code=True, dtype=torch.float32)
    tokens = model.generate(**row, max_new_tokens=24, do_sample=False)[0, row["input_ids"].shape[1] :]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)

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
    assert float(hits[0].split()[-1]) > row["input_ids"].shape[1] // 2
