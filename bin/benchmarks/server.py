"""vLLM's server in a process of its own, with caches of its own, and what it tells of itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from leank_convert.errors import LeanKError

QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
# Where a server keeps what it compiles: each begins without, whoever ran before.
_CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR")
_SECONDS_TO_START = 900
LINES_OF_LOG = 100  # that are shown of a server that failed: an engine's error, and what came of it


@dataclass(frozen=True)
class Server:
    """A server that was started."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> str:
        """Return its address once it answers; LeanKError, with an error of its log, if it does not start."""
        latest = time.monotonic() + _SECONDS_TO_START
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return self.url
            if self.process.poll() is not None or time.monotonic() > latest:
                lines = read_log(self.log)
                said = [line for line in lines if "Error" in line] or lines or ["nothing"]
                raise LeanKError(f"vLLM's server did not start: {said[-1]}", exit_code=1)
            time.sleep(1)


@contextmanager
def start_server(folder: Path, options: Sequence[str], log: Path, **environment: str) -> Iterator[Server]:
    """Start a server on a model's folder, without waiting for it; at the end, end all of its processes.

    Its caches lie beside the log.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--port", str(port), *options]
    caches = {name: str(log.with_suffix("") / name) for name in _CACHES}
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **QUIET, **caches, **environment},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield Server(f"http://localhost:{port}", process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):  # the next one needs the memory of whatever is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Find a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def read_log(log: Path) -> list[str]:
    """Return the lines of a server's log, none if it has not begun one."""
    return log.read_text(errors="replace").strip().splitlines() if log.exists() else []


def read_metric(url: str, name: str) -> list[str]:
    """Return the lines of a server's metric."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    return [line for line in text.splitlines() if line.startswith(name)]
