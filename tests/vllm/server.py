"""vLLM's OpenAI server in a process of its own."""

import urllib.request
from contextlib import contextmanager

from bin.benchmarks.server import start_server
from tests.vllm.conftest import ENGINE, ENVIRONMENT


def read(url):
    """Get a page as text."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


@contextmanager
def serving(folder, log, **options):
    """Serve a checkpoint; `options` are vLLM's, such as `max_model_len=512`. It has to end when told to."""
    given = {**ENGINE, **options}.items()
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given]
    with start_server(folder, [*arguments, "--enforce-eager"], log, **ENVIRONMENT) as server:
        server.wait()
        yield server
        server.process.terminate()
        server.process.wait(60)
