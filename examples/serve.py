"""Serve a converted checkpoint with an OpenAI-compatible API: `transformers serve`, and a client.

    leank-convert train testbed -o out/quickstart
    python examples/serve.py out/quickstart

Needs `pip install fastapi uvicorn openai`. On a GPU run `leank-convert warmup` first, or the first answer
waits for the decode kernels to be compiled. Continuous batching is not supported: leave it off.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
import urllib.request

from openai import OpenAI

from leank_convert.testbed.tasks import build_sample


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    while server.poll() is None:
        try:
            return urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.5)
    sys.exit("the server ended")


def main() -> None:
    """Start the server, ask it one question, stop it."""
    parser = argparse.ArgumentParser(description="Serve a checkpoint and ask it a question.")
    parser.add_argument("checkpoint")
    parser.add_argument("--prompt", help="default: a list of facts and a question for the toy model")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()

    transformers = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
    options = ["--trust-remote-code", "--port", str(args.port), args.checkpoint]
    url = f"http://localhost:{args.port}"
    server = subprocess.Popen([*transformers, "serve", *options])
    try:
        wait_for(f"{url}/health", server)
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            prompt = args.prompt or build_sample("retrieval", random.Random(0), 512).prompt
            messages = [{"role": "user", "content": prompt}]
            answer = client.chat.completions.create(model=args.checkpoint, messages=messages, max_tokens=64)
            print(answer.choices[0].message.content)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
