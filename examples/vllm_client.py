"""Ask a server of vLLM several questions at once, stream an answer, and look at its cache: an OpenAI client.

    vllm serve out/quickstart
    python examples/vllm_client.py

Needs `pip install openai`.
"""

from __future__ import annotations

import argparse
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from openai import APIConnectionError, OpenAI

from leank_convert.testbed.tasks import build_sample

METRICS = ("vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")


def main() -> None:
    """Ask, print the answers, then what the cache did."""
    parser = argparse.ArgumentParser(description="Ask a server of vLLM.")
    parser.add_argument("--prompt", action="append", help="repeatable; default: questions for the toy model")
    parser.add_argument("--url", default="http://localhost:8000")
    args = parser.parse_args()
    prompts = args.prompt or [build_sample("retrieval", random.Random(n), 512).prompt for n in range(4)]

    with OpenAI(base_url=f"{args.url}/v1", api_key="none") as client:
        try:
            model = client.models.list().data[0].id
        except APIConnectionError:
            parser.exit(1, f"error: no server at {args.url}\nhint: start `vllm serve OUT`, or pass --url\n")
        asked = {"model": model, "max_tokens": 64, "temperature": 0}

        def ask(prompt: str) -> str:
            messages = [{"role": "user", "content": prompt}]
            answer = client.chat.completions.create(messages=messages, **asked)
            return str(answer.choices[0].message.content)

        with ThreadPoolExecutor(32) as pool:  # the server decodes them in one batch
            for answer in pool.map(ask, prompts):
                print(answer)
        # The first prompt again: the prefix cache has it.
        messages = [{"role": "user", "content": prompts[0]}]
        for event in client.chat.completions.create(messages=messages, stream=True, **asked):
            print(event.choices[0].delta.content or "", end="", flush=True)
        print()

    with urllib.request.urlopen(f"{args.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    print(*(line for line in lines if line.startswith(METRICS)), sep="\n")


if __name__ == "__main__":
    main()
