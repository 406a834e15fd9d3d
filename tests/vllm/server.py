"""vLLM's OpenAI server in a process of its own."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bin.benchmarks.server import free_port
from tests.vllm.conftest import ENVIRONMENT


class Server(NamedTuple):
    """Where it listens, its process, and what it writes."""

    url: str
    process: subprocess.Popen
    log: Path


def read(url):
    """Get a page as text."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


@contextmanager
def serving(folder, log, **options):
    """Serve a checkpoint; `options` are vLLM's, such as `max_model_len=512`."""
    given = {
        "model": folder,
        "port": free_port(),
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 16 << 20,
        "block_size": 32,
        **options,
    }
    arguments = [
        part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    with log.open("w") as written:
        # vLLM's command looks for a package `vllm`, which the build for CPUs is not called.
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, "--enforce-eager"],
            env={**os.environ, **ENVIRONMENT},
            stdout=written,
            stderr=written,
        )
    url = f"http://localhost:{given['port']}"
    try:
        for _ in range(240):
            try:
                read(f"{url}/health")
                break
            except urllib.error.URLError:
                assert process.poll() is None, log.read_text()[-8000:]
                time.sleep(1)
        else:
            raise AssertionError(f"no answer in four minutes: {log.read_text()[-8000:]}")
        yield Server(url, process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
