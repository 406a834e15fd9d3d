"""`transformers serve` answers from a converted checkpoint."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from transformers import AutoTokenizer

MISSING = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
TEXT = " ".join(f"w{number}" for number in range(20))


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.skipif(bool(MISSING), reason=f"transformers serve needs {', '.join(MISSING)}")
def test_a_server_answers_with_the_models_tokens(converted, load, tmp_path):
    folder = converted(widths=[[8, 0], [16, 3]]).folder
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            *(sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"),
            *("--trust-remote-code", "--device", "cpu", "--port", str(port), str(folder)),
        ],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for _ in range(120):
            try:
                ask(f"http://localhost:{port}/health")
                break
            except urllib.error.URLError:
                assert server.poll() is None, server.communicate()[0]
                time.sleep(0.5)
        body = {"model": str(folder), "messages": [{"role": "user", "content": TEXT}], "max_tokens": 9}
        answer = ask(f"http://localhost:{port}/v1/chat/completions", {**body, "stream": False})
    finally:
        server.terminate()
        server.communicate(timeout=20)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    prompt = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        tokens = load(folder).generate(**prompt, do_sample=False, max_new_tokens=9)[
            0, prompt["input_ids"].shape[1] :
        ]
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(tokens, skip_special_tokens=True)
